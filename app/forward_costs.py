"""Measuring forwards for a cost profile: every model by rows at several contexts, and the target over several sequences.

Target and drafters take turns on one sequence, as in `app.drafter_price`; then the target reads the same number of rows as
one sequence and as several. Contexts are visited in passes, so that a machine that gets slower does not make the last one
look dear.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from app.drafter_price import Plan, chain_segment, prices
from app.measure import WARM_UP, Timed, take_turns
from drafters.base import Drafter
from models.attention import Segment
from models.causal_lm import CausalLM
from models.kv_cache import RowList
from scheduler.cost import LatencyModel, Point

_TOKEN = 5  # any; time does not depend on it

Progress = Callable[[str], None]
Samples = defaultdict[tuple[str, int, int, int], list[float]]
"""Seconds by model, rows, sequences and context, the last two summed over the batch."""


@dataclass(frozen=True, slots=True)
class Effort:
    """What is measured, and for how long."""

    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    contexts: tuple[int, ...] = (64, 512)
    batches: tuple[tuple[int, int], ...] = ((4, 1), (4, 4), (16, 1), (16, 4))  # rows and sequences, of the target
    rounds: int = 5  # of each pass, warm-up not counted
    passes: int = 3  # at most
    seconds: float = 25.0  # after which no further pass begins

    def contexts_within(self, target: CausalLM, max_model_len: int) -> list[int]:
        """The contexts, as far as the models and the target's cache go: a text is there twice while it is measured."""
        room = (target.pool.num_rows - max(self.rows) - WARM_UP - self.rounds) // 2
        return sorted({max(min(context, max_model_len // 2, room), 1) for context in self.contexts})


def measure_models(
    target: CausalLM, drafters: Sequence[Drafter], max_model_len: int, max_num_seqs: int, effort: Effort, progress: Progress
) -> dict[str, LatencyModel]:
    """Latency models by name, "target" first; drafters that run no model, or gave up, are not among them.

    A point is the median over all passes. The first pass is made however long it takes. Raises OutOfRows without room.
    """
    samples: Samples = defaultdict(list)
    contexts = effort.contexts_within(target, max_model_len)
    left = [drafter for drafter in drafters if drafter.runs_model]
    start, longest = time.monotonic(), 0.0
    for number in range(effort.passes):
        begun = time.monotonic()
        if number and begun - start + longest > effort.seconds:
            break
        left = _one_pass(target, left, contexts, effort, samples, progress)
        batches = [
            (rows, sequences)
            for rows, sequences in effort.batches
            if sequences <= max_num_seqs and sequences * contexts[0] + rows <= target.pool.num_free
        ]
        for (rows, sequences), seconds in time_batches(target, batches, contexts[0], effort.rounds).items():
            samples["target", rows, sequences, sequences * contexts[0]] += seconds
        longest = max(longest, time.monotonic() - begun)
    points: defaultdict[str, list[Point]] = defaultdict(list)
    known = {"target", *(drafter.name for drafter in left)}
    for (name, rows, sequences, context), seconds in samples.items():
        if name in known:
            points[name].append(Point(rows, sequences, context, round(1000 * statistics.median(seconds), 4)))
    return {name: LatencyModel.fit(of_one) for name, of_one in points.items()}


def _one_pass(
    target: CausalLM,
    drafters: Sequence[Drafter],
    contexts: Sequence[int],
    effort: Effort,
    samples: Samples,
    progress: Progress,
) -> list[Drafter]:
    """Every context once; adds to `samples` and returns the drafters that did not give up."""
    left = list(drafters)
    for context in contexts:
        found, missing = prices(target, left, Plan(rows=effort.rows, context=context, rounds=effort.rounds))
        for name, reason in missing.items():
            progress(f"{name} gave up while it was timed ({reason}): its forwards have no price")
        left = [drafter for drafter in left if drafter.name not in missing]
        for price in found:
            samples[price.who, price.rows, 1, context] += price.seconds
    return left


@torch.inference_mode()
def time_batches(
    target: CausalLM, batches: Sequence[tuple[int, int]], context: int, rounds: int
) -> dict[tuple[int, int], list[float]]:
    """Seconds of the target's forwards over so many rows of so many sequences, which share the rows evenly, taking turns."""
    if not batches:
        return {}
    assert all(rows % sequences == 0 for rows, sequences in batches), f"uneven batches in {batches}"
    prefixes: list[RowList] = []
    scratch: list[int] = []
    try:
        for _ in range(max(sequences for _, sequences in batches)):
            prefix = RowList()
            prefixes.append(prefix)
            prefix.extend(target.pool.allocate(context))
            rows = prefix.view().tolist()
            target.forward([Segment([_TOKEN] * context, range(context), RowList().view(), rows, [])])
        scratch = target.pool.allocate(max(rows for rows, _ in batches))
        things = {}
        for count, sequences in batches:
            share = count // sequences
            segments = [
                chain_segment(prefixes[index], scratch[index * share : (index + 1) * share]) for index in range(sequences)
            ]
            things[count, sequences] = Timed(lambda segments=segments: target.forward(segments))  # type: ignore[misc]
        take_turns(list(things.values()), rounds, target.device)
    finally:
        target.pool.release(scratch)
        for prefix in prefixes:
            target.pool.release(prefix.truncate(0))
    return {batch: thing.seconds for batch, thing in things.items()}
