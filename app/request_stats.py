"""The numbers of a finished request as the API shows them.

``speculative_decoding`` has the names of vLLM's object, which load tools read: *accepted* leaves out the token the
target adds itself, mean acceptance length includes it, and a step counts only if it verified drafted nodes. In a tree
*draft tokens* are the nodes sent to verification, most of which are alternatives to each other, so the rate is lower
than a chain's at the same speed. ``graft`` holds what that shape has no place for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.request import DrafterCount, RequestStats


def usage(num_prompt_tokens: int, num_output_tokens: int, num_cached_tokens: int) -> dict[str, Any]:
    """The ``usage`` object; output tokens are those delivered, an end token included, cached ones are part of the prompt's."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }


def answer_metrics(stats: Sequence[RequestStats], budget: int) -> dict[str, Any]:
    """The ``metrics`` object of one answer: sums over its engine requests, which share schedule and ``budget``."""
    return {"speculative_decoding": _speculative_decoding(stats, budget), "graft": _graft(stats, budget)}


def _speculative_decoding(stats: Sequence[RequestStats], budget: int) -> dict[str, Any]:
    accepted = [count for one in stats for count in one.accepted]
    drafted = [count for one in stats for count in one.drafted]
    num_spec_tokens = max([budget - 1, *drafted])
    by_length: dict[int, list[int]] = {}
    for length, kept in zip(drafted, accepted, strict=True):
        by_length.setdefault(length, [0] * (length + 1))[kept] += 1
    return {
        "mean_acceptance_length": 1 + sum(accepted) / len(accepted) if accepted else None,
        "draft_acceptance_rate": sum(accepted) / sum(drafted) if sum(drafted) else None,
        "acceptance_histogram": [accepted.count(kept) for kept in range(num_spec_tokens + 1)],
        "acceptance_histogram_by_draft_length": {str(length): by_length[length] for length in sorted(by_length)},
        "num_spec_steps": sum(one.num_spec_steps for one in stats),
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": sum(drafted),
        "num_spec_tokens": num_spec_tokens,
        "per_step_accepted": accepted,
        "per_step_drafted": drafted,
    }


def _graft(stats: Sequence[RequestStats], budget: int) -> dict[str, Any]:
    drafters: dict[str, DrafterCount] = {}
    halts: dict[str, str] = {}
    fallbacks: dict[str, int] = {}
    declined: dict[str, int] = {}
    for one in stats:
        halts.update(one.halts)
        for name, steps in one.fallbacks.items():
            fallbacks[name] = fallbacks.get(name, 0) + steps
        for name, times in one.declined.items():
            declined[name] = declined.get(name, 0) + times
        for name, count in one.drafters.items():
            drafters.setdefault(name, DrafterCount()).add(count)
    experiment, _, arm = stats[0].arm.partition("/")
    return {
        "schedule": stats[0].schedule,
        "experiment": experiment or None,
        "arm": arm or None,
        "budget": budget,
        "auto": stats[0].is_auto,  # the budget was the most, and prices decided
        "lossy": any(one.is_lossy for one in stats),
        "num_lossy_tokens": sum(one.num_lossy for one in stats),
        "drafters": {
            name: {
                "drafted": count.drafted,
                "accepted": count.accepted,
                "accepted_per_position": count.accepted_at,
                "forwards": count.forwards,
                "calls": count.calls,
                "skipped_steps": count.skips,
                "draft_ms": round(1000 * count.draft_s, 3),
            }
            for name, count in drafters.items()
        },
        "declined": declined,  # drafter -> calls that would not have been worth their price
        "num_grafts": sum(one.num_grafts for one in stats),
        "num_verified_nodes": sum(one.num_verified_nodes for one in stats),
        "num_steps": sum(one.num_steps for one in stats),
        "num_preemptions": sum(one.num_preemptions for one in stats),
        "draft_ms": round(1000 * sum(one.draft_s for one in stats), 3),
        "tree_ms": round(1000 * sum(one.tree_s for one in stats), 3),
        "verify_ms": round(1000 * sum(one.verify_s for one in stats), 3),
        "rule_ms": round(1000 * sum(one.rule_s for one in stats), 3),
        "other_ms": round(1000 * sum(one.other_s for one in stats), 3),
        "halts": halts,
        "fallbacks": fallbacks,  # schedule that stood in for the one asked for -> steps
        "trimmed": sum(one.num_trimmed for one in stats),
    }
