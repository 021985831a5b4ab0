"""What was measured of whole answers, as JSON: raw samples, counts, and the figures of the tables."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from app.decode_bench.counts import Counts, counts
from app.decode_bench.report import Results
from app.decode_bench.turns import Method, Work
from app.measure import Spread

_TOTALS = ("num_steps", "num_output_tokens", "num_accepted", "num_verified_nodes", "num_grafts", "draft_s", "verify_s")
_PER_QUESTION = ("seconds", "first_s", "tokens", "num_first", "num_blocks", "draft_s", "verify_s", "prompt_verify_s")


def as_json(results: Results, method: Method) -> dict[str, Any]:
    """One method, over all repeats."""
    plain, other = results.methods[0], results.other()
    times_ar, seconds, draft_s = results.ratio(method, plain), sum(method.seconds()), method.total("draft_s")
    # What is left of the time if drafting took none: no drafter could do better with these trees.
    limit = times_ar.median * seconds / max(seconds - draft_s, 1e-9) if times_ar and draft_s else None
    found = counts(method)
    return {
        "name": method.name,
        "seconds": method.seconds(),
        "tokens": method.tokens(),
        "times_ar": _spread_json(times_ar),
        "times_ar_decoding": _spread_json(results.decoding_ratio(method, plain)),
        "times_ar_if_drafts_were_free": limit,
        "times_transformers": _spread_json(results.ratio(method, other)) if other else None,
        "per_step": _per_step(found),
        "categories": {
            kind: {
                "times_ar": _spread_json(results.ratio(method, plain, kind)),
                "times_ar_decoding": _spread_json(results.decoding_ratio(method, plain, kind)),
                "times_transformers": _spread_json(results.ratio(method, other, kind)) if other else None,
                "per_step": _per_step(counts(method, prompts)),
            }
            for kind, prompts in results.kinds().items()
        },
        **{name: method.total(name) if name.endswith("_s") else int(method.total(name)) for name in _TOTALS},
        "drafters": {name: asdict(count) for name, count in found.drafters.items()},
        "declined": found.declined,
        "fallbacks": found.fallbacks,
        "is_text_compared": method.name in results.found,
        "differences": [{**asdict(item), "is_near_tie": item.is_near_tie} for item in results.found.get(method.name, ())],
        "questions": _per_question(method, len(results.categories)) if results.concurrency == 1 else None,
    }


def _per_step(found: Counts) -> dict[str, float | None]:
    """The figures of a step of decoding."""
    return {
        "steps": found.steps,
        "tau": found.tau,
        "delta": found.delta,
        "rows": found.rows_per_step,
        "draft_ms": found.draft_ms,
        "verify_ms": found.verify_ms,
        "other_ms": found.other_ms,
    }


def _per_question(method: Method, num_prompts: int) -> dict[str, list[list[Any]]]:
    """By measure, per repeat, one number per prompt; None for a prompt that it was not asked, or that it does not count."""
    arrays: dict[str, list[list[Any]]] = {name: [] for name in _PER_QUESTION}
    for works in method.works:
        rows = [_numbers(work) if (work := works.get(number)) is not None else {} for number in range(num_prompts)]
        for name, array in arrays.items():
            array.append([row.get(name) for row in rows])
    return arrays


def _numbers(work: Work) -> dict[str, float]:
    """Of one answer."""
    (pace,) = work.paces
    numbers: dict[str, float] = {"seconds": round(work.seconds, 6), "tokens": work.num_tokens, **asdict(pace)}
    for stats in work.stats:
        numbers |= {name: round(getattr(stats, name), 6) for name in ("draft_s", "verify_s", "prompt_verify_s")}
    return numbers | {"first_s": round(pace.first_s, 6)}


def _spread_json(ratio: Spread | None) -> dict[str, float] | None:
    return asdict(ratio) if ratio is not None else None
