"""What `bench.decode` measured, as tables and as JSON.

With one answer at a time, methods are compared prompt by prompt: a ratio is that of tokens per second, and its median and
percentiles are over the prompts. With several in flight a prompt has no time of its own; ratios are then those of whole
repeats.

Tokens per verification count the token that the target adds itself. Milliseconds per step are those of drafting and of the
target's passes; the passes that read the prompt count as verification, in the seconds but not in the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from app.measure import Spread, spread
from app.proof import Difference
from bench.turns import Method, Work, deciles, ratios

TRANSFORMERS = "transformers"
"""The method that is compared by its speed only."""


@dataclass(frozen=True, slots=True)
class Results:
    """All methods of one run; the first one is plain decoding."""

    methods: Sequence[Method]
    found: dict[str, list[Difference]]  # by method; none for a method whose text is not compared
    concurrency: int
    categories: Sequence[str | None]  # by prompt

    @property
    def refused(self) -> set[str]:
        """Methods that wrote something else, so that their speed means nothing."""
        return {name for name, items in self.found.items() if any(not item.is_near_tie for item in items)}

    def ratio(self, method: Method, base: Method, category: str | None = None) -> Spread | None:
        """Tokens per second relative to `base`; None if a text was wrong, or no prompt was asked of both.

        Of one category if that is given, which needs one answer at a time.
        """
        if {method.name, base.name} & self.refused:
            return None
        if self.concurrency == 1:
            by_prompt = ratios(method, base)
            samples = [x for prompt, x in by_prompt.items() if category is None or self.categories[prompt] == category]
        else:
            samples = [ours / its for ours, its in zip(method.speeds(), base.speeds(), strict=True)]
        return deciles(samples) if samples else None

    def kinds(self) -> dict[str, list[int]]:
        """Numbers of the prompts by category, in order of appearance; empty if several are answered at once."""
        kinds: dict[str, list[int]] = {}
        if self.concurrency == 1:
            for number, category in enumerate(self.categories):
                if category is not None:
                    kinds.setdefault(category, []).append(number)
        return kinds

    def other(self) -> Method | None:
        """transformers, if it took part."""
        return next((method for method in self.methods if method.name == TRANSFORMERS), None)


def table(results: Results) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Titles and lines, one per method."""
    other = results.other()
    titles = (
        *("schedule", "tokens/s", "times ar", "10-90 %"),
        *([f"times {TRANSFORMERS}"] if other else []),
        *("tokens/verification", "draft ms/step", "verify ms/step", "draft forwards/step", "text"),
    )
    return titles, [_row(results, method, other) for method in results.methods]


def _row(results: Results, method: Method, other: Method | None) -> tuple[str, ...]:
    steps = method.total("num_steps")
    forwards = sum(count.forwards for count in method.drafters().values())
    ratio = results.ratio(method, results.methods[0])
    per_step = (
        method.total("num_output_tokens"),
        1000 * method.total("draft_s"),
        1000 * method.total("verify_s"),
        forwards,
    )
    return (
        method.name,
        str(spread(method.speeds())),
        f"{ratio.median:.2f}" if ratio else "refused",
        f"{ratio.low:.2f}-{ratio.high:.2f}" if ratio else "",
        *([_cell(results.ratio(method, other))] if other else []),
        *(f"{value / steps:.2f}" if steps else "" for value in per_step),
        _text(results, method),
    )


def _text(results: Results, method: Method) -> str:
    if method.name not in results.found:
        return "not compared"
    found = results.found[method.name]
    return "DIFFERS" if method.name in results.refused else f"{len(found)} near ties" if found else "equal"


def drafter_rows(method: Method) -> list[tuple[str, ...]]:
    """What each drafter of a method did: method, drafter, drafted, accepted, forwards, forwards per step."""
    steps = max(method.total("num_steps"), 1)
    return [
        (method.name, name, str(c.drafted), str(c.accepted), str(c.forwards), f"{c.forwards / steps:.2f}")
        for name, c in method.drafters().items()
    ]


def category_tables(results: Results) -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    """Title, column titles and lines of the tables by category; none if no prompt has one."""
    kinds = results.kinds()
    if not kinds:
        return []
    plain, *others = results.methods
    speed = [
        (f"{kind} ({len(prompts)})", *(_cell(results.ratio(method, plain, kind)) for method in others))
        for kind, prompts in kinds.items()
    ]
    drafting = [method for method in others if method.name != TRANSFORMERS]
    tokens = [
        (f"{kind} ({len(prompts)})", *(_optional(_tokens_per_step(method, prompts)) for method in drafting))
        for kind, prompts in kinds.items()
    ]
    tables = []
    if others:
        titles = ("category (prompts)", *(method.name for method in others))
        tables.append(("times ar by category: median over prompts (10-90 %)", titles, speed))
    if drafting:
        titles = ("category (prompts)", *(method.name for method in drafting))
        tables.append(("tokens per verification by category", titles, tokens))
    return tables


def as_json(results: Results, method: Method) -> dict[str, Any]:
    """Raw samples and counts of one method, over all repeats."""
    plain, other = results.methods[0], results.other()
    totals = ("num_steps", "num_output_tokens", "num_accepted", "num_verified_nodes", "num_grafts", "draft_s", "verify_s")
    times_ar, seconds, draft_s = results.ratio(method, plain), sum(method.seconds()), method.total("draft_s")
    # What is left of the time if drafting took none: no drafter could do better with these trees.
    limit = times_ar.median * seconds / max(seconds - draft_s, 1e-9) if times_ar and draft_s else None
    return {
        "name": method.name,
        "seconds": method.seconds(),
        "tokens": method.tokens(),
        "times_ar": _spread_json(times_ar),
        "times_ar_if_drafts_were_free": limit,
        "times_transformers": _spread_json(results.ratio(method, other)) if other else None,
        "categories": {
            kind: {
                "times_ar": _spread_json(results.ratio(method, plain, kind)),
                "times_transformers": _spread_json(results.ratio(method, other, kind)) if other else None,
                "tokens_per_verification": _tokens_per_step(method, prompts),
            }
            for kind, prompts in results.kinds().items()
        },
        **{name: method.total(name) if name.endswith("_s") else int(method.total(name)) for name in totals},
        "drafters": {name: asdict(count) for name, count in method.drafters().items()},
        "is_text_compared": method.name in results.found,
        "differences": [{**asdict(item), "is_near_tie": item.is_near_tie} for item in results.found.get(method.name, ())],
        "questions": _per_question(method, len(results.categories)) if results.concurrency == 1 else None,
    }


def _per_question(method: Method, num_prompts: int) -> dict[str, list[list[Any]]]:
    """By measure, per repeat, one number per prompt; None for a prompt that it was not asked, or that it does not count."""
    arrays: dict[str, list[list[Any]]] = {}
    for works in method.works:
        rows = [_numbers(work) if (work := works.get(number)) is not None else {} for number in range(num_prompts)]
        for name in ("seconds", "tokens", "num_steps", "prompt_s", "draft_s", "verify_s"):
            arrays.setdefault(name, []).append([row.get(name) for row in rows])
    return arrays


def _numbers(work: Work) -> dict[str, float]:
    """Of one answer; `prompt_s` are the seconds until its first token."""
    numbers: dict[str, float] = {"seconds": round(work.seconds, 6), "tokens": work.num_tokens}
    for stats in work.stats:
        numbers |= {
            "num_steps": stats.num_steps,
            "prompt_s": round(stats.first_token_s - stats.admitted_s, 6),
            "draft_s": round(stats.draft_s, 6),
            "verify_s": round(stats.verify_s, 6),
        }
    return numbers


def _tokens_per_step(method: Method, prompts: Sequence[int]) -> float | None:
    counted = method.stats(prompts)
    steps = sum(stats.num_steps for stats in counted)
    return sum(stats.num_output_tokens for stats in counted) / steps if steps else None


def _cell(ratio: Spread | None) -> str:
    return str(ratio) if ratio is not None else "-"


def _optional(value: float | None) -> str:
    return f"{value:.2f}" if value is not None else "-"


def _spread_json(ratio: Spread | None) -> dict[str, float] | None:
    return asdict(ratio) if ratio is not None else None
