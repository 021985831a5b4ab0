"""What prices have to do with a step: they hear how large it is, size its trees, and learn what it gave and took.

Whether a drafter's call pays is asked in `engine.question`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from engine.question import Draft
from engine.sequence import Sequence
from engine.steering import Steering
from scheduler.auto_budget import AutoBudget
from scheduler.schedule import Schedule


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
    sized = auto.choose([(chosen[index], drafts[index].chances_by(auto)) for index in asking], names)
    for index, nodes in zip(asking, sized, strict=True):
        chosen[index] = nodes
        drafts[index].sized = auto.reason
    return chosen


@dataclass(frozen=True, slots=True)
class Given:
    """What a step of decoding gave one sequence, and what it did for it alone."""

    sequence: Sequence
    tokens: int
    nodes: int  # verified below its root
    own_ms: float  # of drafting and of growing its tree


def end_step(auto: AutoBudget, steering: Steering | None, given: list[Given], ms: float) -> None:
    """A step of decoding took `ms` in all: prices and breakers learn what each schedule gave and took."""
    if not any(one.nodes for one in given):
        auto.went_plainly(len(given), ms - sum(one.own_ms for one in given))
    plain_ms = auto.plain_ms
    shares = divide(given, ms, plain_ms)

    for name, (tokens, own_ms) in _by_schedule(given, shares, lambda sequence: sequence.schedule).items():
        auto.stepped(name, tokens=tokens, ms=own_ms)
    if steering is None:
        return
    for name, (tokens, own_ms) in _by_schedule(given, shares, lambda sequence: sequence.asked).items():
        steering.stepped(name, tokens=tokens, ms=own_ms, plain_ms=plain_ms)


def divide(given: SequenceOf[Given], ms: float, plain_ms: float) -> list[float]:
    """Milliseconds of a step that took `ms`, by sequence; they sum to `ms`.

    Everybody pays for its own drafting and, up to `plain_ms`, for the row that plain decoding would have forwarded. The rest
    is due to drafted nodes and paid by the node: else who asks for a large tree makes his neighbors look slow.
    """
    common = ms - sum(one.own_ms for one in given)
    row = min(plain_ms, common / len(given))
    nodes = sum(one.nodes for one in given)
    rest = common - row * len(given)
    return [one.own_ms + row + rest * (one.nodes / nodes if nodes else 1 / len(given)) for one in given]


def _by_schedule(
    given: SequenceOf[Given], shares: SequenceOf[float], schedule_of: Callable[[Sequence], Schedule]
) -> dict[str, tuple[int, float]]:
    """Tokens and milliseconds of every schedule that leaves its budget to prices.

    What somebody asked for with a number as budget, whatever it costs, says nothing of what prices make of the schedule.
    """
    sums: dict[str, tuple[int, float]] = {}
    for one, share in zip(given, shares, strict=True):
        schedule = schedule_of(one.sequence)
        if schedule.is_auto:
            tokens, ms = sums.get(schedule.name, (0, 0.0))
            sums[schedule.name] = (tokens + one.tokens, ms + share)
    return sums


def _cut(draft: Draft) -> list[int]:
    """What the policy chose."""
    start = time.perf_counter()
    nodes = draft.growth.verify_nodes()
    draft.tree_s += time.perf_counter() - start
    return nodes
