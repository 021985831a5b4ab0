"""Which nodes of every tree are verified in this step: all that the policies chose, or as many as pay.

Whether a drafter's call pays is asked in `engine.question`.
"""

from __future__ import annotations

import time

from engine.question import Draft
from engine.sequence import Sequence
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
    return chosen


def _cut(draft: Draft) -> list[int]:
    """What the policy chose."""
    start = time.perf_counter()
    nodes = draft.growth.verify_nodes()
    draft.tree_s += time.perf_counter() - start
    return nodes
