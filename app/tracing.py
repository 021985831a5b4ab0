"""Logging decoding steps in every way they could have been drafted, along texts that the target has written already.

At a logged position a tree is grown for every word over S and M. The accepted length of each is read off the known text, so no
forward of the target is needed beyond one over each text, for drafters that look at its layers.

A drafter must not see one word's tree after another's: what it remembers belongs to node numbers. So both drafters follow one
*atlas*, a tree that holds the union of all words' nodes; a question about a word's tree is asked about the same paths in the
atlas. A drafter's answer depends on the path only, hence each path is computed once, and answers to different words agree.
What a word would have cost is counted from its own tree, as the drafter would have computed it if the word had been alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

from app.drafter_quality import Text
from app.teacher_forcing import Memory, Trail
from drafters.base import Drafter, Halt
from drafters.causal_lm import CausalLMDrafter
from drafters.reading import missing_nodes
from scheduler.features import Moment, Row, features, moving_mean
from scheduler.schedule import Action, Schedule
from scheduler.traces import Branch, Record
from scheduler.value import words_of
from tree.graft import GraftGrowth, TreeGraft
from tree.growth import Answer, Ask
from tree.tree import TokenTree

_ATLAS = "atlas"  # creator of its nodes: each drafter may be asked what it thinks of all of them


class GaveUp(Exception):
    """A drafter stopped following a text."""

    def __init__(self, drafter: str, reason: str) -> None:
        super().__init__(f"{drafter} gave up ({reason})")


@dataclass(frozen=True, slots=True)
class Plan:
    """What is logged."""

    policy: TreeGraft
    drafters: Mapping[str, Drafter]  # by letter: S, M, and N if lookups help in between
    depth: int = 3
    stride: int = 4
    stop_tokens: frozenset[int] = frozenset()
    vocab_size: int = 0
    cost_ratio: Callable[[int], float] = lambda context: 1.0  # medium call over target forward, at a context


def plan_for(
    schedule: Schedule,
    drafters: Mapping[str, Drafter],
    *,
    depth: int,
    stride: int,
    stop_tokens: frozenset[int],
    vocab_size: int,
    cost_ratio: Callable[[int], float],
) -> Plan:
    """The plan of a schedule that grafts. ValueError for one whose policy or drafters are others."""
    policy = schedule.policy
    if not isinstance(policy, TreeGraft) or not {Action.SMALL, Action.MEDIUM} <= set(schedule.drafters):
        raise ValueError(f"schedule {schedule.name!r} does not graft a small and a medium drafter on one tree")
    # Cuts are made offline, so nothing is cut here.
    grown = replace(policy, steps=depth, budget=policy.max_nodes, min_probability=0.0)
    letters = {action.value: drafters[name] for action, name in schedule.drafters.items()}
    return Plan(grown, letters, depth, stride, stop_tokens, vocab_size, cost_ratio)


def trace_text(
    text: Text, prompt: int, category: str | None, plan: Plan, memory_of: Callable[[Text, tuple[int, ...]], Memory]
) -> Iterator[Record]:
    """The records of one text, in order. Raises GaveUp where a drafter does; what came before stands."""
    with ExitStack() as stack:
        trails = {}
        for letter, drafter in plan.drafters.items():
            memory = memory_of(text, drafter.layers) if drafter.layers else None
            trails[letter] = Trail(drafter, text.tokens, text.num_prompt, memory)
            stack.callback(trails[letter].close)
        for trail in trails.values():
            for _ in range(trail.num_reads):
                _answer(trail, trail.ask_along_truth(0, 1))
        mean, place = 0.0, 0
        while trails["S"].num_left >= 2:  # a step emits its path and one token more
            if place % plan.stride == 0:
                record = _Position(text, prompt, category, plan, trails, mean).record()
                yield record
                mean = moving_mean(mean, len(record.branches["S" * plan.depth].path))
            for trail in trails.values():
                trail.advance()
            place += 1


@dataclass(slots=True, eq=False)
class _Position:
    """One position at work."""

    text: Text
    prompt: int
    category: str | None
    plan: Plan
    trails: Mapping[str, Trail]
    mean: float
    atlas: TokenTree = field(init=False)

    def __post_init__(self) -> None:
        self.atlas = TokenTree(self.text.tokens[self.root])

    @property
    def root(self) -> int:
        """Index of the last verified token."""
        return self.trails["S"].root

    def record(self) -> Record:
        """Every word played out."""
        rows: dict[str, Row] = {}
        words = words_of(self.plan.depth)
        return Record(
            self.prompt, self.category, self.root + 1, rows, {word: self._play(word, rows) for word in words}
        )

    def _play(self, word: str, rows: dict[str, Row]) -> Branch:
        plan, policy = self.plan, self.plan.policy
        growth = policy.begin(
            self.text.tokens[self.root],
            stop_tokens=plan.stop_tokens,
            max_depth=self.trails["S"].num_left - 1,
            vocab_size=plan.vocab_size,
        )
        assert isinstance(growth, GraftGrowth)
        forwards: list[tuple[str, int]] = []
        seen: dict[str, set[int]] = {letter: set() for letter in self.trails}
        for step, letter in enumerate(word):
            self._look_up(growth, seen)
            if word[:step] not in rows:
                rows[word[:step]] = self._signals(growth, word[:step])
            drafter = plan.drafters[letter]
            ask = growth.ask(drafter.name)
            if ask is None:
                continue
            # What one forward answers, as when a rule calls in a server; a head would need one more for every layer.
            known = seen[letter]
            ask = ask.within_one_forward(growth.tree, partial(_num_forwards, drafter, growth.tree, known))
            forwards += [(letter, count) for count in _forwards(drafter, growth.tree, ask, known)]
            growth.attach(drafter.name, self._ask(letter, growth.tree, ask, seen[letter]))
        self._look_up(growth, seen)
        return self._branch(growth.tree, tuple(forwards))

    def _look_up(self, growth: GraftGrowth, seen: Mapping[str, set[int]]) -> None:
        """What costs nothing is done whenever there is something new to do it for, as the engine does."""
        if "N" not in self.plan.drafters:
            return
        name = self.plan.drafters["N"].name
        while (ask := growth.ask(name)) is not None:
            before = len(growth.tree)
            growth.attach(name, self._ask("N", growth.tree, ask, seen["N"]))
            if len(growth.tree) == before:
                return

    def _signals(self, growth: GraftGrowth, before: str) -> Row:
        plan = self.plan
        moment = Moment(
            context=self.root + 1,
            step=len(before),
            steps=plan.depth,
            calls=tuple(index for index, letter in enumerate(before) if letter == "M"),
            accepted_mean=self.mean,
            cost_ratio=plan.cost_ratio(self.root + 1),
        )
        small, medium = (growth.frontier(plan.drafters[letter].name) for letter in "SM")
        return features(growth.tree, small, medium, moment)

    def _ask(self, letter: str, tree: TokenTree, ask: Ask, seen: Set[int]) -> Answer:
        """The answer to a question about a word's tree, found at the same paths of the atlas.

        `seen` are the nodes of the tree that the drafter would have looked at: it scores what hangs below them.
        """
        place = self._places(tree)
        trail = self.trails[letter]
        question = trail.ask(self.atlas, [place[node] for node in ask.nodes], ask.width, rescore=ask.rescore)
        found = _answer(trail, question)
        candidates = {node: found.candidates[place[node]] for node in ask.nodes if place[node] in found.candidates}
        name = trail.drafter.name
        others = [node for node in range(1, len(tree)) if tree.scorer[node] != name and tree.parent[node] in seen]
        rescored = {node: found.rescored[place[node]] for node in others if place[node] in found.rescored}
        return Answer(candidates, rescored)

    def _places(self, tree: TokenTree) -> list[int]:
        """Per node of a word's tree its twin in the atlas, which is given those that it lacks."""
        place = [0]
        for node in range(1, len(tree)):
            above, token = place[tree.parent[node]], tree.token[node]
            known = self.atlas.children[above].get(token)
            place.append(self.atlas.add(above, token, 0.0, _ATLAS) if known is None else known)
        return place

    def _branch(self, tree: TokenTree, forwards: tuple[tuple[str, int], ...]) -> Branch:
        letters = {drafter.name: letter for letter, drafter in self.plan.drafters.items()}
        path, node = [], 0
        for token in self.text.tokens[self.root + 1 :]:
            child = tree.children[node].get(token)
            if child is None:
                break
            path.append(child)
            node = child
        creator = "".join(letters[name] for name in tree.creator[1:])
        return Branch(tuple(tree.parent[1:]), tuple(tree.lp[1:]), creator, tuple(path), forwards)


def _forwards(drafter: Drafter, tree: TokenTree, ask: Ask, seen: set[int]) -> list[int]:
    """Rows of the forwards that the drafter would need for an answer; `seen` are nodes it has looked at, the root too.

    A language model looks at all in one forward; a head at a node only after the one above it, layer by layer.
    """
    if not drafter.runs_model:
        return []
    nodes = missing_nodes(tree, ask, dict.fromkeys(seen))
    nodes = nodes if 0 in seen else [0, *nodes]
    seen.update(nodes)
    if not nodes or isinstance(drafter, CausalLMDrafter):
        return [len(nodes)] if nodes else []
    layers, missing = [], set(nodes)
    while missing:
        layer = {node for node in missing if node == 0 or tree.parent[node] not in missing}
        layers.append(len(layer))
        missing -= layer
    return layers


def _num_forwards(drafter: Drafter, tree: TokenTree, seen: Set[int], ask: Ask) -> int:
    return len(_forwards(drafter, tree, ask, set(seen)))


def _answer(trail: Trail, question: object) -> Answer:
    (answer,) = trail.drafter.propose([question])  # type: ignore[list-item]
    if isinstance(answer, Halt):
        raise GaveUp(trail.drafter.name, answer.reason)
    return answer


def memory_rows(texts: Sequence[Text], drafters: Sequence[Drafter]) -> int:
    """Rows of the target's cache that the longest text needs: one copy for every drafter that looks at its layers."""
    longest = max((len(text.tokens) for text in texts), default=0)
    return longest * sum(bool(drafter.layers) for drafter in drafters)
