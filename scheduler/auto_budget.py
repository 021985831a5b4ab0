"""The budget that nobody has to set: how much is drafted and how much of it verified, from prices and probabilities.

A step is worth the tokens it emits and costs milliseconds. With R, the tokens per millisecond that the server makes on the long
run, a drafter's call pays if the tokens it can add are worth more than its time, and a node pays if its probability is worth
more than its row of the target's forward: both are compared through R (Dinkelbach: maximizing tokens - R * ms at the best R
maximizes tokens / ms over many steps).

R is kept as a *speed-up* over plain decoding times the price of plain decoding now: the speed-up changes slowly while batch
size and context, which the price knows, may change at any step. It never falls below 1, since plain decoding is always there.

What a call would add is not known before it is made. Certain is only that it adds at most the open mass (`scheduler.sizing`);
where even that cannot pay, drafting ends. Else the guess is an average: what the children of such nodes were worth lately, by
rank, separately for nodes of which the drafters were sure and unsure and, at the root, by how the last step went.

    budget.begin(sequences=1, context=300, base_rows=1)   # of this step
    budget.best_call("treegraft", questions)              # before a call: whose, and for which nodes, if for any
    budget.drafted(offer)                                 # after it
    budget.choose(candidates, ["small"])                  # before verification: the nodes of each tree
    budget.verified(tree, nodes, path)                    # after it
    budget.stepped("small", tokens=3, ms=31.0)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scheduler.acceptance import LiveAcceptance, TextRecord
from scheduler.drift import LiveCosts
from scheduler.load import NO_NODES, share_rows
from scheduler.sizing import may_pay, open_masses
from tree.tree import TokenTree

TARGET = "target"  # the target's name in a cost profile

_HALF_LIFE = 48.0  # steps, of the speed-up
_SURE = (0.3, 0.6, 0.85)  # bounds between kinds of nodes, by the probability of the edge above
_RANKS = 4  # children of a node whose probabilities are remembered
_FIRST_GUESS = (0.5, 0.12, 0.06, 0.03)
_WEIGHT = 0.02  # of the newest children in the mean of their kind
_MOST_SPEEDUP = 16.0  # beyond it the clock is wrong


@dataclass(frozen=True, slots=True)
class Offer:
    """A drafter's call that could be made for one tree."""

    drafter: str
    tree: TokenTree
    nodes: Sequence[int]  # that would get children
    passes: Sequence[int]  # rows of each forward that the answer takes, one after the other; empty for a free drafter
    context: int  # verified tokens of the sequence
    last_accepted: int = 0  # drafted tokens that its last step accepted
    record: TextRecord | None = None  # how drafters have fared on this text


@dataclass(frozen=True, slots=True)
class Question:
    """All that a drafter could be asked about one tree, as the calls that would answer more and more of it."""

    nodes: Sequence[int]  # that would get children if all of it were answered
    parts: Iterable[Offer]  # smallest and cheapest first; the last one is about all of `nodes`


@dataclass(slots=True)
class _Step:
    """The verification that the step ends with, as far as it is known before."""

    sequences: int
    context: int  # of all sequences together
    base_rows: int  # rows that are forwarded in any case: roots, prompt chunks, trees of fixed size


class AutoBudget:
    """Prices, probabilities and what became of them. One owner, the engine's thread; memory is bounded."""

    def __init__(self, costs: LiveCosts, acceptance: LiveAcceptance | None = None, *, most_rows: int = 512) -> None:
        self.costs = costs
        self.acceptance = acceptance or LiveAcceptance()
        self.most_rows = most_rows
        self._keep = 0.5 ** (1 / _HALF_LIFE)
        self._history: dict[str, tuple[float, float]] = {}  # schedule -> (plain decoding's ms for the same tokens, ms), fading
        self._children: dict[tuple[str, int], list[float]] = {}  # (drafter, kind of parent) -> mean edge probability by rank
        self._step = _Step(1, 0, 1)
        self._forward_ms: float | None = None  # of the newest step
        self._overhead_ms: float | None = None  # of a plain step beyond its forward, per sequence
        self._speculated = True  # somebody got a node in the last step that had any
        self.reason = NO_NODES
        """Why the last `choose` chose no more, in the words of `scheduler.load`."""

    # ---- one step ---------------------------------------------------------------------------------------------------

    def begin(self, *, sequences: int, context: int, base_rows: int) -> None:
        """A step of `sequences` decoding sequences with `context` verified tokens in all; see `_Step`."""
        self._step = _Step(max(sequences, 1), context, max(base_rows, sequences, 1))

    def add_rows(self, rows: int) -> None:
        """More rows that are forwarded in any case: nodes of trees of fixed size."""
        self._step.base_rows += rows

    def chances(self, tree: TokenTree, record: TextRecord | None = None) -> list[float]:
        """By node, the probability that it is accepted; 1 for the root."""
        return self.acceptance.acceptance.paths(tree, record)

    def best_call(
        self, schedule: str, questions: Iterable[Question], *, sharing: int = 1, chances: Sequence[float] | None = None
    ) -> Offer | None:
        """Which of the calls that could be made for one tree is worth most beyond its price; None if none is worth it.

        All `questions` are about the same tree. `sharing` trees are drafted together and share what a call costs. `chances` are
        the tree's, if they are known.
        """
        rate = self.rate(schedule)
        row = rate * self._row_ms()
        best, most = None, 0.0
        masses: list[float] | None = None
        for question in questions:
            whole: float | None = None  # tokens that any part can bring
            for offer in question.parts:
                if offer.drafter not in self.costs.profile.models:  # free
                    return offer
                if masses is None:
                    masses = open_masses(chances or self.chances(offer.tree, offer.record), offer.tree.parent)
                if whole is None:
                    whole = sum(masses[node] for node in question.nodes)
                call_ms = self._call_ms(offer, sharing)
                if not may_pay(whole, rate, call_ms):
                    break  # for sure, nor would a later part, which costs more
                worth = self._expected_gain(offer, masses, row) - rate * call_ms
                if worth > most:
                    best, most = offer, worth
        return best

    def _call_ms(self, offer: Offer, sharing: int) -> float:
        """One tree's share, in milliseconds, of a call for `sharing` trees like that of `offer`."""
        drafter, context = offer.drafter, offer.context * sharing
        passes = (self.costs.ms(drafter, rows * sharing, sequences=sharing, context=context) for rows in offer.passes)
        return sum(passes) / sharing

    def called(self, offers: Sequence[Offer], ms: float) -> None:
        """A call for `offers`, as they were before it, took `ms`: prices follow the machine."""
        drafter = offers[0].drafter
        if drafter in self.costs.profile.models and any(offer.passes for offer in offers):
            passes = self._passes(offers)
            predicted = sum(self.costs.profile.ms(drafter, rows, sequences=n, context=context) for rows, n, context in passes)
            rows, sequences, _ = max(passes)  # which decides most of it
            self.costs.compare(drafter, predicted, ms, rows=rows, sequences=sequences)

    def drafted(self, offer: Offer) -> None:
        """A call was answered: remember how probable children turned out to be."""
        tree, acceptance = offer.tree, self.acceptance.acceptance
        for node in offer.nodes:
            children = tree.children[node].values()
            edges = sorted((acceptance.edge(tree.scorer[v], tree.depth[v], tree.lp[v]) for v in children), reverse=True)
            mean = self._children_of(offer, node)
            for rank in range(_RANKS):
                edge = edges[rank] if rank < len(edges) else 0.0
                mean[rank] += _WEIGHT * (edge - mean[rank])

    def choose(
        self, candidates: Sequence[tuple[Sequence[int], Sequence[float]]], schedules: Iterable[str]
    ) -> list[list[int]]:
        """Which nodes of each tree are verified, ascending, root first.

        `candidates` are, per tree, the nodes that its policy would verify, ancestor-closed, and the chances of all its nodes.
        """
        ranked, falling = [], []
        for nodes, chances in candidates:
            order = sorted((-chances[node], node) for node in nodes if node)
            ranked.append([node for _, node in order])
            falling.append([-chance for chance, _ in order])
        step = self._step
        most = min(self.most_rows, step.base_rows + sum(map(len, ranked)))
        # The sharing counts a row per tree; what is forwarded besides comes on top.
        rows = range(step.base_rows - len(candidates) + 1, most + 1)
        curve = self.costs.curve(TARGET, rows, sequences=step.sequences, context=step.context)
        # Alone, a sequence has nothing to flutter with: its trees differ from step to step, not its load.
        speculated = self._speculated or step.sequences == 1
        share = share_rows(falling, curve, rate=max(map(self.rate, schedules)), speculated=speculated)
        self._speculated, self.reason = share.speculates, share.reason
        return [sorted([0, *own[:count]]) for own, count in zip(ranked, share.nodes, strict=True)]

    def verified(self, tree: TokenTree, nodes: Iterable[int], path: Sequence[int], record: TextRecord | None = None) -> None:
        """What the target made of a tree."""
        self.acceptance.observe_tree(tree, nodes, path, record)

    def forwarded(self, rows: int, ms: float) -> None:
        """The target's forward of this step, over `rows` rows in all, took `ms`."""
        step, self._forward_ms = self._step, ms
        self.costs.observe(TARGET, max(rows, step.sequences), step.sequences, step.context, ms)

    def went_plainly(self, sequences: int, ms: float) -> None:
        """A step without drafted nodes took `ms`, the asking of drafters left out: plain decoding has its overhead, too."""
        if self._forward_ms is None or not math.isfinite(ms):
            return
        seen = max(ms - self._forward_ms, 0.0) / sequences
        before = seen if self._overhead_ms is None else self._overhead_ms
        self._overhead_ms = self._keep * before + (1 - self._keep) * seen

    def stepped(self, schedule: str, *, tokens: int, ms: float) -> None:
        """`schedule` emitted `tokens` in `ms`, its share of a step, drafting included. For steps without prompts only."""
        if not (math.isfinite(ms) and ms > 0):
            return
        plain = tokens * self.plain_ms
        before = self._history.get(schedule, (0.0, 0.0))
        self._history[schedule] = (self._keep * before[0] + plain, self._keep * before[1] + ms)

    # ---- what it knows ----------------------------------------------------------------------------------------------

    def speedup(self, schedule: str) -> float:
        """Tokens per millisecond over plain decoding's, lately; 1 before anything is known. May be below 1."""
        plain, ms = self._history.get(schedule, (0.0, 0.0))
        # One plain step counts beforehand, so that the first steps do not decide everything.
        prior = 1.0 / self._plain_rate()
        return min((plain + prior) / (ms + prior), _MOST_SPEEDUP)

    @property
    def plain_ms(self) -> float:
        """Milliseconds per token of plain decoding at the load of this step."""
        return 1.0 / self._plain_rate()

    def rate(self, schedule: str) -> float:
        """R: tokens per millisecond that time is worth in this step."""
        return max(self.speedup(schedule), 1.0) * self._plain_rate()

    def _plain_rate(self) -> float:
        step = self._step
        forward_ms = self.costs.ms(TARGET, step.sequences, sequences=step.sequences, context=step.context)
        return step.sequences / (forward_ms + (self._overhead_ms or 0.0) * step.sequences)

    def _row_ms(self) -> float:
        """Milliseconds of one more row, on average over a few."""
        step, more = self._step, 4 * self._step.sequences
        few, many = (
            self.costs.ms(TARGET, rows, sequences=step.sequences, context=step.context)
            for rows in (step.base_rows, step.base_rows + more)
        )
        return max(many - few, 0.0) / more

    def _expected_gain(self, offer: Offer, masses: Sequence[float], row: float) -> float:
        """Tokens that the children are expected to bring, each less the price of its row: a guess, within what is possible."""
        gain, most, factor = 0.0, 0.0, 1.0 if offer.record is None else offer.record.factor(offer.drafter)
        for node in offer.nodes:
            mass = masses[node]
            most += mass
            if factor * mass > row:
                gain += sum(max(factor * mass * edge - row, 0.0) for edge in self._children_of(offer, node))
        return min(gain, most)

    @staticmethod
    def _passes(offers: Sequence[Offer]) -> list[tuple[int, int, int]]:
        """Rows, sequences and context of each forward that a call for `offers` takes."""
        passes = []
        for turn in range(max((len(offer.passes) for offer in offers), default=0)):
            taking = [offer for offer in offers if len(offer.passes) > turn]
            rows, context = sum(offer.passes[turn] for offer in taking), sum(offer.context for offer in taking)
            passes.append((rows, len(taking), context))
        return passes

    def _children_of(self, offer: Offer, node: int) -> list[float]:
        if node == 0:
            kind = -1 - min(offer.last_accepted, 2)
        else:
            tree = offer.tree
            edge = self.acceptance.acceptance.edge(tree.scorer[node], tree.depth[node], tree.lp[node])
            kind = sum(edge > bound for bound in _SURE)
        return self._children.setdefault((offer.drafter, kind), list(_FIRST_GUESS))
