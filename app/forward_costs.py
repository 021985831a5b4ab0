"""Measuring forwards for a cost profile: every model by rows, at several contexts, and for several sequences at once.

Target and drafters take turns, as in `app.drafter_price`. What is varied is visited in passes, so that a machine that gets
slower does not make the last one look dear.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from app.drafter_price import Plan, prices
from app.measure import WARM_UP
from drafters.base import Drafter
from models.causal_lm import CausalLM
from scheduler.cost import LatencyModel, Point

Progress = Callable[[str], None]
Samples = defaultdict[tuple[str, int, int, int], list[float]]
"""Seconds by model, rows, sequences and context, the last two summed over the batch."""


@dataclass(frozen=True, slots=True)
class Effort:
    """What is measured, and for how long."""

    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    contexts: tuple[int, ...] = (64, 512)
    sequences: tuple[int, ...] = (4,)  # in one forward, besides one alone; at the shortest context
    shared_rows: tuple[int, ...] = (1, 2, 4)  # of each of several sequences
    rounds: int = 5  # of each pass, warm-up not counted
    passes: int = 3  # at most
    seconds: float = 25.0  # after which no further pass begins

    def plans(self, target: CausalLM, drafters: Sequence[Drafter], max_model_len: int, max_num_seqs: int) -> list[Plan]:
        """What one pass measures, as far as the models and the target's cache go."""
        # A text that is measured is there for the target, and once more for each drafter that reads the target's layers.
        num_texts = 1 + sum(drafter.runs_model and bool(drafter.layers) for drafter in drafters)
        spare = max(self.rows) + num_texts * (WARM_UP + self.rounds)
        room = (target.pool.num_rows - spare) // num_texts
        contexts = sorted({max(min(context, max_model_len // 2, room), 1) for context in self.contexts})
        alone = [Plan(rows=self.rows, context=context, rounds=self.rounds) for context in contexts]
        context = contexts[0]
        shared = [
            Plan(rows=self.shared_rows, context=context, rounds=self.rounds, sequences=count)
            for count in self.sequences
            if count <= max_num_seqs and count * (num_texts * context + spare) <= target.pool.num_rows
        ]
        return alone + shared


def measure_models(
    target: CausalLM, drafters: Sequence[Drafter], max_model_len: int, max_num_seqs: int, effort: Effort, progress: Progress
) -> dict[str, LatencyModel]:
    """Latency models by name, "target" first; drafters that run no model, or gave up, are not among them.

    A point is the lower quartile over all passes, since other programs can only add time. The first pass is made however long
    it takes. Raises OutOfRows without room.
    """
    samples: Samples = defaultdict(list)
    left = [drafter for drafter in drafters if drafter.runs_model]
    plans = effort.plans(target, left, max_model_len, max_num_seqs)
    start, longest = time.monotonic(), 0.0
    for number in range(effort.passes):
        begun = time.monotonic()
        if number and begun - start + longest > effort.seconds:
            break
        left = _one_pass(target, left, plans, samples, progress)
        longest = max(longest, time.monotonic() - begun)
    points: defaultdict[str, list[Point]] = defaultdict(list)
    known = {"target", *(drafter.name for drafter in left)}
    for (name, rows, sequences, context), seconds in samples.items():
        if name in known:
            points[name].append(Point(rows, sequences, context, round(1000 * sorted(seconds)[len(seconds) // 4], 4)))
    return {name: LatencyModel.fit(of_one) for name, of_one in points.items()}


def _one_pass(
    target: CausalLM, drafters: Sequence[Drafter], plans: Sequence[Plan], samples: Samples, progress: Progress
) -> list[Drafter]:
    """Every plan once; adds to `samples` and returns the drafters that did not give up."""
    left = list(drafters)
    for plan in plans:
        found, missing = prices(target, left, plan)
        for name, reason in missing.items():
            progress(f"{name} gave up while it was timed ({reason}): its forwards have no price")
        left = [drafter for drafter in left if drafter.name not in missing]
        for price in found:
            key = (price.who, plan.sequences * price.rows, plan.sequences, plan.sequences * plan.context)
            samples[key] += price.seconds
    return left
