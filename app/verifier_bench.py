"""What a tree policy and a rule give together: tokens per verification, what the trees cost, and where time goes.

All pairs answer the same prompts with the same drafters, one at a time and in turns, prompt by prompt, so that a machine that
gets slower hits all alike. A *verification* is a pass of the target over a tree; the pass over the prompt is left out, since
nothing is drafted for it. Terms, with the names they have in the literature:

    tau     tokens per verification: accepted drafts and the one that the target adds
    delta   forwards of drafters per verification
    funnel  verifications with a node at depth d, and those that accepted one there
    rank    place of an accepted node among its verified siblings, by what the drafter thought of them

A perfect chain has tau = delta + 1. A pair below that line drafts more than it gets.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from app.bridge import Engine as EdgeEngine
from app.local import Answer, Question, ask_all
from engine.outlet import Observer
from engine.request import FinishReason, RequestStats, StepStats
from engine.sequence import TreeRecord
from models.sampling import SamplingParams
from scheduler.schedule import Schedule


class Engine(EdgeEngine, Protocol):
    """An engine in this very process."""

    @property
    def schedules(self) -> Mapping[str, Schedule]: ...


@dataclass(slots=True)
class Seconds:
    """Where the time of verifications went."""

    step: float = 0.0  # from one step's end to the next one's: everything
    draft: float = 0.0  # in drafters
    tree: float = 0.0  # in growing, cutting and flattening trees, drafters left out
    target: float = 0.0  # in the target's pass
    rule: float = 0.0  # from logits to what is accepted

    @property
    def own_share(self) -> float | None:
        """Share of a step that no model computes: trees and rules."""
        return (self.tree + self.rule) / self.step if self.step else None


class StepLog(Observer):
    """Takes the time of an engine's steps while one request at a time is answered; forgets the steps over prompts."""

    def __init__(self) -> None:
        """Nothing seen yet."""
        self.seconds = Seconds()
        self._last: float | None = None  # end of the last step of the request at hand

    def on_step(self, steps: list[StepStats]) -> None:
        """Called on the engine thread, as is `on_finish`; both before the answer's next delta."""
        now = time.perf_counter()
        (step,) = steps
        if self._last is not None and not step.num_prompt_tokens:
            self.seconds.step += now - self._last
            self.seconds.draft += step.draft_s
            self.seconds.tree += step.tree_s
            self.seconds.target += step.verify_s
            self.seconds.rule += step.rule_s
        self._last = now

    def on_fallback(self, schedule: str, to: str, reason: str) -> None:
        """Breakers have no part in it."""

    def on_finish(self, stats: RequestStats, reason: FinishReason) -> None:
        """The next step is another request's."""
        self._last = None

    def take(self) -> Seconds:
        """What was summed up since the last call."""
        taken, self.seconds = self.seconds, Seconds()
        return taken


@dataclass(slots=True)
class Depth:
    """One depth of the funnel."""

    offered: int = 0  # verifications with a node there
    accepted: int = 0
    ranks: Counter[int] = field(default_factory=Counter)  # of the accepted nodes; 0 is the drafter's favorite


@dataclass(slots=True)
class PairCounts:
    """One pair at one temperature. Ratios are None where there is nothing to divide by."""

    name: str
    rule: str  # that decided at this temperature
    temperature: float
    verifications: int = 0
    tokens: int = 0  # before the answer's end was cut off
    forwards: int = 0  # of drafters
    nodes: int = 0  # verified, roots included
    lossy_tokens: int = 0
    seconds: Seconds = field(default_factory=Seconds)
    funnel: list[Depth] = field(default_factory=list)  # from depth 1
    by_prompt: list[tuple[float, float]] = field(default_factory=list)  # (delta, tau) of each answer with a verification

    @property
    def tau(self) -> float | None:
        """Tokens per verification."""
        return _ratio(self.tokens, self.verifications)

    @property
    def delta(self) -> float | None:
        """Drafter forwards per verification."""
        return _ratio(self.forwards, self.verifications)

    @property
    def nodes_per_verification(self) -> float | None:
        """Rows of the target's passes."""
        return _ratio(self.nodes, self.verifications)

    def add(self, answer: Answer, seconds: Seconds) -> None:
        """Count one answer, which must have kept all its trees; `seconds` are those of its verifications."""
        records = answer.trees[1:]  # the first is the prompt's
        tokens = sum(len(record.path) + 1 for record in records)
        # Nothing is drafted beside a prompt, so all forwards belong to verifications.
        forwards = sum(count.forwards for count in answer.stats.drafters.values())
        self.verifications += len(records)
        self.tokens += tokens
        self.forwards += forwards
        self.nodes += sum(len(record.nodes) for record in records)
        self.lossy_tokens += answer.stats.num_lossy
        for name in ("step", "draft", "tree", "target", "rule"):
            setattr(self.seconds, name, getattr(self.seconds, name) + getattr(seconds, name))
        for record in records:
            self._add_tree(record)
        if records:
            self.by_prompt.append((forwards / len(records), tokens / len(records)))

    def _add_tree(self, record: TreeRecord) -> None:
        tree, verified = record.tree, set(record.nodes)
        deepest = max(tree.depth[node] for node in record.nodes)
        while len(self.funnel) < deepest:
            self.funnel.append(Depth())
        for depth in range(deepest):
            self.funnel[depth].offered += 1
        for depth, node in enumerate(record.path):
            siblings = [child for child in tree.children[tree.parent[node]].values() if child in verified]
            siblings.sort(key=lambda child: (-tree.lp[child], tree.token[child]))
            self.funnel[depth].accepted += 1
            self.funnel[depth].ranks[siblings.index(node)] += 1


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured."""

    pairs: Sequence[str]  # names of schedules
    temperatures: Sequence[float] = (0.0, 0.6, 1.0)
    max_tokens: int = 64
    seed: int = 0  # of the first prompt; every other has the next one

    def num_answers(self, num_prompts: int) -> int:
        """Answers that :func:`measure_pairs` reports of."""
        return num_prompts * len(self.pairs) * len(self.temperatures)


def measure_pairs(
    engine: Engine,
    log: StepLog,
    prompts: Sequence[tuple[int, ...]],
    plan: Plan,
    on_answer: Callable[[str], None] = lambda who: None,
) -> list[PairCounts]:
    """Let every pair answer every prompt at every temperature, on a started engine that tells `log` of its steps.

    At temperature 0 all rules that are not lossy decide alike; pairs that differ in nothing else are measured once and have
    equal counts. `on_answer` is told who has answered, ``plan.num_answers(len(prompts))`` times. Raises what asking raises.
    """
    found = {}
    for temperature in plan.temperatures:
        for name in plan.pairs:
            found[name, temperature] = PairCounts(name, _rule(engine.schedules[name], temperature), temperature)
    ask_all(engine, [_question(engine, prompts[0], plan, plan.pairs[0], 0.0, 0)])  # warms up
    log.take()
    for number, prompt in enumerate(prompts):
        for temperature in plan.temperatures:
            given: dict[object, tuple[Answer, Seconds]] = {}
            # Every other prompt in reverse order.
            for name in plan.pairs if number % 2 == 0 else reversed(plan.pairs):
                schedule = engine.schedules[name]
                key = (schedule.policy, schedule.plan, tuple(schedule.drafters.items()), _rule(schedule, temperature))
                if key not in given:
                    (answer,) = ask_all(engine, [_question(engine, prompt, plan, name, temperature, number)])
                    given[key] = answer, log.take()
                found[name, temperature].add(*given[key])
                on_answer(f"{name}, T={temperature:g}")
    return list(found.values())


def _question(
    engine: Engine, prompt: tuple[int, ...], plan: Plan, name: str, temperature: float, number: int
) -> Question:
    length = min(plan.max_tokens, max(engine.max_model_len - len(prompt), 1))
    sampling = SamplingParams(temperature=temperature, seed=plan.seed + number)
    return Question(prompt, length, sampling, name, keep_trees=length)


def _rule(schedule: Schedule, temperature: float) -> str:
    greedy = SamplingParams(temperature=temperature).greedy
    return schedule.greedy_verifier if greedy else schedule.sampling_verifier


def _ratio(part: float, whole: int) -> float | None:
    return part / whole if whole else None
