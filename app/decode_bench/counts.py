"""What explains a method's speed: how much a pass of the target yields, what is drafted for it, where the time goes.

All of it is of decoding: the pass that reads a prompt to its end writes the first token whatever was drafted, so it is counted
neither as a verification nor in the tokens. In the usual notation a step takes `delta` forwards of drafters and one
verification, and writes `tau` tokens, the target's own among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from app.decode_bench.turns import Method
from engine.request import DrafterCount


@dataclass(slots=True)
class Counts:
    """Sums over answers. A method that counts nothing but its blocks of tokens has steps, tokens and reading times only."""

    steps: int = 0  # passes of the target that wrote tokens, without those that read the prompt
    tokens: int = 0  # that these wrote
    reading_s: list[float] = field(default_factory=list)  # per answer: seconds until its first tokens
    has_details: bool = False  # the fields below are known
    rows: int = 0  # verified by those passes, roots included
    draft_s: float = 0.0
    verify_s: float = 0.0
    other_s: float | None = 0.0  # what is left of the decoding; None if answers overlapped
    drafters: dict[str, DrafterCount] = field(default_factory=dict)
    declined: dict[str, int] = field(default_factory=dict)
    fallbacks: dict[str, int] = field(default_factory=dict)  # schedule that stood in because this one lost -> steps

    @property
    def tau(self) -> float | None:
        """Tokens per verification."""
        return self._per_step(self.tokens)

    @property
    def delta(self) -> float | None:
        """Forwards of drafters per verification."""
        return self._detail(sum(count.forwards for count in self.drafters.values()))

    @property
    def rows_per_step(self) -> float | None:
        """Rows per verification, the root included."""
        return self._detail(self.rows)

    @property
    def draft_ms(self) -> float | None:
        """Milliseconds of drafting per step."""
        return self._detail(1000 * self.draft_s)

    @property
    def verify_ms(self) -> float | None:
        """Milliseconds of the target's forwards per step."""
        return self._detail(1000 * self.verify_s)

    @property
    def other_ms(self) -> float | None:
        """Milliseconds of everything else per step: growing trees, deciding, committing, text, the way to the asker."""
        return None if self.other_s is None else self._detail(1000 * self.other_s)

    def _detail(self, total: float) -> float | None:
        return self._per_step(total) if self.has_details else None

    def _per_step(self, total: float) -> float | None:
        return total / self.steps if self.steps else None


def counts(method: Method, groups: Sequence[int] | None = None) -> Counts:
    """Sums over the answers to `groups` (None: all), over all repeats."""
    sums = Counts()
    for work in method.chosen(groups):
        sums.steps += sum(pace.num_blocks - 1 for pace in work.paces)
        sums.tokens += work.num_tokens - sum(pace.num_first for pace in work.paces)
        sums.reading_s += [pace.first_s for pace in work.paces]
        for stats in work.stats:
            sums.has_details = True
            sums.rows += stats.num_verified_nodes - 1  # the pass that read the prompt verified its root
            sums.draft_s += stats.draft_s
            sums.verify_s += stats.verify_s - stats.prompt_verify_s
            for name, count in stats.drafters.items():
                sums.drafters.setdefault(name, DrafterCount()).add(count)
            for totals, known in ((sums.declined, stats.declined), (sums.fallbacks, stats.fallbacks)):
                for name, times in known.items():
                    totals[name] = totals.get(name, 0) + times
        if len(work.paces) > 1:
            sums.other_s = None
        elif sums.other_s is not None and work.stats:
            (stats,) = work.stats
            used = work.paces[0].first_s + stats.draft_s + stats.verify_s - stats.prompt_verify_s
            sums.other_s += max(work.seconds - used, 0.0)
    return sums
