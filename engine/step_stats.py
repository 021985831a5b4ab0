"""Adding counts up: one sequence's step into its request's totals, and into the totals of its schedule for observers.

A step is counted once, where it is committed. Requests and observers add up the same records, so the sums over requests and
the counters that observers keep cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.request import DrafterCount, RequestStats, StepStats

_SUMMED = (
    "num_drafts",
    "num_steps",
    "num_output_tokens",
    "num_prompt_tokens",
    "num_prefix_queries",
    "num_prefix_hits",
    "num_preemptions",
    "num_verified_nodes",
    "num_grafts",
    "draft_s",
    "verify_s",
)


def by_schedule(steps: Iterable[StepStats]) -> list[StepStats]:
    """One record per schedule, each the sum of that schedule's records."""
    totals: dict[str, StepStats] = {}
    for step in steps:
        total = totals.setdefault(step.schedule, StepStats(step.schedule))
        for name in _SUMMED:
            setattr(total, name, getattr(total, name) + getattr(step, name))
        _add_drafters(total.drafters, step.drafters)
        for drafter, count in step.drafter_steps.items():
            total.drafter_steps[drafter] = total.drafter_steps.get(drafter, 0) + count
        total.halts += step.halts
    return list(totals.values())


def add_to_request(stats: RequestStats, step: StepStats) -> None:
    """Add one sequence's step to its request's totals. Halts are not added: they are recorded where they happen."""
    stats.num_steps += step.num_steps
    stats.num_output_tokens += step.num_output_tokens
    stats.num_spec_steps += step.num_drafts
    stats.num_verified_nodes += step.num_verified_nodes
    stats.num_grafts += step.num_grafts
    stats.draft_s += step.draft_s
    stats.verify_s += step.verify_s
    _add_drafters(stats.drafters, step.drafters)
    if step.num_drafts:
        stats.drafted.append(sum(count.drafted for count in step.drafters.values()))
        stats.accepted.append(sum(count.accepted for count in step.drafters.values()))


def _add_drafters(totals: dict[str, DrafterCount], counts: dict[str, DrafterCount]) -> None:
    for name, count in counts.items():
        total = totals.setdefault(name, DrafterCount())
        total.drafted += count.drafted
        total.accepted += count.accepted
        total.forwards += count.forwards
