"""Adding counts up: one sequence's step into its request's totals, and into the totals of its schedule and arm for observers.

A step is counted once, where it is committed. Requests and observers add up the same records, so the sums over requests and
the counters that observers keep cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.request import DrafterCount, RequestStats, StepStats, add_up

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
    "num_lossy",
    "num_accepted_squared",
    "draft_s",
    "tree_s",
    "verify_s",
    "rule_s",
    "other_s",
)


def by_schedule(steps: Iterable[StepStats]) -> list[StepStats]:
    """One record per schedule and arm, each the sum of their records."""
    totals: dict[tuple[str, str], StepStats] = {}
    for step in steps:
        total = totals.setdefault((step.schedule, step.arm), StepStats(step.schedule, arm=step.arm))
        for name in _SUMMED:
            setattr(total, name, getattr(total, name) + getattr(step, name))
        _add_drafters(total.drafters, step.drafters)
        _add_counts(total.drafter_steps, step.drafter_steps)
        _add_counts(total.declined, step.declined)
        _add_counts(total.sized, step.sized)
        add_up(total.depths, step.depths)
        total.token_gaps += step.token_gaps
        total.halts += step.halts
    return list(totals.values())


def close_step(records: Iterable[tuple[RequestStats, StepStats]], wall_s: float, now_s: float) -> None:
    """Complete the records of one engine step, each beside the totals of its request, and add them to those.

    Of the `wall_s` seconds that the step took, what no record has a name for is shared equally. Tokens of one block reach
    the reader together, at `now_s` (monotonic): each counts as if they had come one by one since the block before, and those
    that come with the very first token as if they had taken no time.
    """
    pairs = list(records)
    named_s = sum(step.draft_s + step.tree_s + step.verify_s + step.rule_s for _, step in pairs)
    for stats, step in pairs:
        step.other_s = (wall_s - named_s) / len(pairs)
        count = step.num_output_tokens
        if count and stats.first_token_s == 0.0:
            stats.first_token_s = stats.last_token_s = now_s
            step.token_gaps = [(0.0, count - 1)]
        elif count:
            step.token_gaps = [((now_s - stats.last_token_s) / count, count)]
            stats.last_token_s = now_s
        add_to_request(stats, step)


def add_to_request(stats: RequestStats, step: StepStats) -> None:
    """Add one sequence's step to its request's totals. Halts are not added: they are recorded where they happen."""
    stats.num_steps += step.num_steps
    stats.num_output_tokens += step.num_output_tokens
    stats.num_spec_steps += step.num_drafts
    stats.num_verified_nodes += step.num_verified_nodes
    stats.num_grafts += step.num_grafts
    stats.num_lossy += step.num_lossy
    stats.draft_s += step.draft_s
    stats.tree_s += step.tree_s
    stats.verify_s += step.verify_s
    stats.rule_s += step.rule_s
    stats.other_s += step.other_s
    if step.num_prompt_tokens:
        stats.prompt_verify_s += step.verify_s
    _add_drafters(stats.drafters, step.drafters)
    _add_counts(stats.declined, step.declined)
    if step.num_drafts:
        stats.drafted.append(sum(count.drafted for count in step.drafters.values()))
        stats.accepted.append(sum(count.accepted for count in step.drafters.values()))


def _add_counts(totals: dict[str, int], counts: dict[str, int]) -> None:
    for name, count in counts.items():
        totals[name] = totals.get(name, 0) + count


def _add_drafters(totals: dict[str, DrafterCount], counts: dict[str, DrafterCount]) -> None:
    for name, count in counts.items():
        totals.setdefault(name, DrafterCount()).add(count)
