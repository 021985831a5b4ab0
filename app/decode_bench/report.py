"""What was measured of whole answers, as tables.

With one answer at a time, methods are compared prompt by prompt: a ratio is that of tokens per second, and its median and
percentiles are over the prompts. *End to end* is from the question to the last token, *decoding* from the first token on: a
long prompt takes everyone the same time to read, which hides what drafting does. With several answers in flight a prompt has
no time of its own; ratios are then those of whole repeats, end to end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from app.decode_bench.counts import Counts, counts
from app.decode_bench.methods import THEIRS, TRANSFORMERS
from app.decode_bench.turns import Method, Work, deciles, ratios
from app.measure import Spread, spread
from app.proof import Difference

Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]
"""Title, titles of the columns, lines."""


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
        """Tokens per second relative to `base`, end to end; None if a text was wrong, or no prompt was asked of both.

        Of one category if that is given, which needs one answer at a time.
        """
        if self.concurrency > 1 and not {method.name, base.name} & self.refused:
            return deciles([ours / its for ours, its in zip(method.speeds(), base.speeds(), strict=True)])
        return self._by_prompt(method, base, category, lambda work: work.speed)

    def decoding_ratio(self, method: Method, base: Method, category: str | None = None) -> Spread | None:
        """The same once the prompts are read; None with several answers at once, too."""
        return self._by_prompt(method, base, category, lambda work: work.decoding_speed)

    def _by_prompt(
        self, method: Method, base: Method, category: str | None, speed: Callable[[Work], float | None]
    ) -> Spread | None:
        if self.concurrency > 1 or {method.name, base.name} & self.refused:
            return None
        by_prompt = ratios(method, base, speed)
        samples = [x for prompt, x in by_prompt.items() if category is None or self.categories[prompt] == category]
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
        """transformers' plain generate, if it took part."""
        return next((method for method in self.methods if method.name == TRANSFORMERS), None)


def tables(results: Results) -> list[Table]:
    """All tables, the most important one first."""
    return [speed_table(results), step_table(results), *drafter_tables(results), *category_tables(results)]


def speed_table(results: Results) -> Table:
    """How fast: one line per method."""
    plain, other = results.methods[0], results.other()
    titles = (
        *("schedule", "tokens/s", "times ar, end to end", "times ar, decoding"),
        *([f"times {TRANSFORMERS}"] if other else []),
        "text",
    )
    lines = [
        (
            method.name,
            str(spread(method.speeds())),
            "refused" if method.name in results.refused else _cell(results.ratio(method, plain)),
            _cell(results.decoding_ratio(method, plain)),
            *([_cell(results.ratio(method, other))] if other else []),
            _text(results, method),
        )
        for method in results.methods
    ]
    where = "prompts" if results.concurrency == 1 else "repeats"
    return f"tokens/s: median (range) of repeats; times: median (10-90 %) of {where}", titles, lines


def step_table(results: Results) -> Table:
    """Why: what one step of a method is made of, one line per method."""
    titles = (
        *("schedule", "first token ms", "tokens/verification", "draft forwards", "rows verified"),
        *("draft ms", "verify ms", "other ms"),
    )
    lines = []
    for method in results.methods:
        found = counts(method)
        first = deciles([1000 * seconds for seconds in found.reading_s])
        per_step = (found.tau, found.delta, found.rows_per_step, found.draft_ms, found.verify_ms, found.other_ms)
        lines.append((method.name, f"{first.median:.0f} ({first.low:.0f}-{first.high:.0f})", *map(_number, per_step)))
    return "per step of decoding, the reading of the prompt left out; first token: median (10-90 %)", titles, lines


def drafter_tables(results: Results) -> list[Table]:
    """Who drafted: one line per method and drafter; no table if nobody did."""
    lines = []
    for method in results.methods:
        found = counts(method)
        for name in dict.fromkeys([*found.drafters, *found.declined]):
            lines.append((method.name, name, *_drafter_cells(found, name)))
    titles = ("schedule", "drafter", "drafted", "accepted", "share", "forwards/step", "declined/step")
    title = "drafted nodes sent to verification, accepted ones; forwards, and calls declined for their price"
    return [(title, titles, lines)] if lines else []


def fallback_lines(results: Results) -> list[str]:
    """A line for each method that a breaker stepped down: what was measured is then not that schedule alone."""
    lines = []
    for method in results.methods:
        found = counts(method)
        for name, steps in found.fallbacks.items():
            lines.append(f"{method.name}: {steps} of {found.steps} steps decoded by {name}, since it lost against ar")
    return lines


def _drafter_cells(found: Counts, name: str) -> tuple[str, ...]:
    count, declined, steps = found.drafters.get(name), found.declined.get(name, 0), max(found.steps, 1)
    if count is None:
        return ("0", "0", "-", "0.00", f"{declined / steps:.2f}")
    share = f"{count.accepted / count.drafted:.2f}" if count.drafted else "-"
    return (str(count.drafted), str(count.accepted), share, f"{count.forwards / steps:.2f}", f"{declined / steps:.2f}")


def category_tables(results: Results) -> list[Table]:
    """By category: speed end to end, speed of decoding, tokens per verification; none if no prompt has a category."""
    plain, *others = results.methods
    kinds = results.kinds()
    if not (kinds and others):
        return []
    titles = ("category (prompts)", *(method.name for method in others))

    def lines(cell: Callable[[Method, str], str]) -> list[tuple[str, ...]]:
        return [(f"{kind} ({len(kinds[kind])})", *(cell(method, kind) for method in others)) for kind in kinds]

    def end_to_end(method: Method, kind: str) -> str:
        return _cell(results.ratio(method, plain, kind))

    def decoding(method: Method, kind: str) -> str:
        return _cell(results.decoding_ratio(method, plain, kind))

    def tau(method: Method, kind: str) -> str:
        return _number(counts(method, kinds[kind]).tau)

    return [
        ("times ar by category, end to end: median over prompts (10-90 %)", titles, lines(end_to_end)),
        ("times ar by category, decoding: median over prompts (10-90 %)", titles, lines(decoding)),
        ("tokens per verification by category", titles, lines(tau)),
    ]


def _text(results: Results, method: Method) -> str:
    if method.name in THEIRS:
        return "not compared"
    found = results.found[method.name]
    return "DIFFERS" if method.name in results.refused else f"{len(found)} near ties" if found else "equal"


def _cell(ratio: Spread | None) -> str:
    return str(ratio) if ratio is not None else "-"


def _number(value: float | None) -> str:
    return f"{value:.2f}" if value is not None else "-"
