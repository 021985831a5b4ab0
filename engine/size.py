"""What prices have to do with a step: they hear how large it is, size its trees, and learn what it gave and took.

Whether a drafter's call pays is asked in `engine.question`.
"""

from __future__ import annotations

import time

from engine.question import Draft
from engine.sequence import Sequence
from engine.steering import Steering
from scheduler.auto_budget import AutoBudget


def begin_step(auto: AutoBudget, prefills: list[tuple[Sequence, int]], decoding: list[Sequence]) -> None:
    """Tell `auto` what is forwarded in any case, before anything is drafted."""
    everyone = [*decoding, *(sequence for sequence, _ in prefills)]
    auto.begin(
        sequences=len(everyone),
        context=sum(len(sequence.rows) for sequence in everyone),
        base_rows=sum(sequence.num_pending for sequence in decoding) + sum(count for _, count in prefills),
    )


def choose_nodes(drafts: list[Draft], auto: AutoBudget | None) -> list[list[int]]:
    """The nodes to verify, per draft, ascending, root first.

    Schedules that leave it to `auto` share what pays; a fixed budget is verified whatever it costs.
    """
    chosen = [_cut(draft) for draft in drafts]
    if auto is None:
        return chosen
    asking = [index for index, draft in enumerate(drafts) if draft.sequence.schedule.is_auto and len(chosen[index]) > 1]
    if not asking:
        return chosen
    auto.add_rows(sum(len(nodes) - 1 for index, nodes in enumerate(chosen) if index not in asking))
    names = {drafts[index].sequence.schedule.name for index in asking}
    sized = auto.choose([(drafts[index].growth.tree, chosen[index], drafts[index].sequence.record) for index in asking], names)
    for index, nodes in zip(asking, sized, strict=True):
        chosen[index] = nodes
        drafts[index].sized = auto.reason
    return chosen


def end_step(auto: AutoBudget, steering: Steering | None, given: list[tuple[Sequence, int]], ms: float) -> None:
    """A step of decoding gave each sequence so many tokens, and took `ms` in all: prices and breakers learn from it."""
    auto.stepped((sequence.schedule.name for sequence, _ in given), tokens=sum(count for _, count in given), ms=ms)
    if steering is None:
        return
    for asked in {sequence.asked.name for sequence, _ in given}:
        own = [count for sequence, count in given if sequence.asked.name == asked and sequence.asked.is_auto]
        if own:
            steering.stepped(asked, tokens=sum(own), ms=ms * len(own) / len(given), plain_ms=auto.plain_ms)


def _cut(draft: Draft) -> list[int]:
    """What the policy chose."""
    start = time.perf_counter()
    nodes = draft.growth.verify_nodes()
    draft.tree_s += time.perf_counter() - start
    return nodes
