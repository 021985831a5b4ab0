"""What calling the medium drafter was worth, from decoding steps that were played out in every way.

A step of D drafting steps can go 2^D ways, one word over S and M each. If all are logged (at temperature 0 that needs no
forward of the target: an accepted length is read off the known text), any scheduler can be replayed exactly, and its value at a
decision is known without noise but for prices, which come from a cost profile and not from single measurements.

    margin = tokens(call, then as the scheduler goes on) - tokens(skip, then ...) - rate * (ms(call, ...) - ms(skip, ...))

`rate` is the tokens per millisecond of the run (Dinkelbach): a scheduler that has the largest sum of tokens - rate * ms at the
rate that it achieves has the largest rate of all.

Layout. Words are numbered as binary numbers, S = 0 and M = 1, first letter highest. What was drafted before a decision is a
prefix of a word; prefixes of length k stand at 2^k - 1 and up, in the same order. So arrays are `[steps, 2^D]` over words and
`[steps, 2^D - 1]` over prefixes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Calls = NDArray[np.bool_]
"""`[steps, prefixes]`: whether the medium is called after each prefix."""


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """Decoding steps with all their outcomes."""

    groups: NDArray[np.intp]  # [steps]: the prompt that each belongs to; steps of a prompt are not independent
    tokens: Floats  # [steps, words]: emitted, the target's own one included
    ms: Floats  # [steps, words]
    rows: Floats  # [steps, prefixes, signals]
    plain_ms: Floats  # [steps]: of a step that drafts nothing and emits one token

    def __post_init__(self) -> None:
        count, words = self.tokens.shape
        if words < 2 or words & (words - 1):
            raise ValueError(f"tokens must have 2^D words, got {words}")
        if self.ms.shape != (count, words) or self.rows.shape[:2] != (count, words - 1) or len(self.groups) != count:
            raise ValueError(f"tokens {self.tokens.shape}, ms {self.ms.shape}, rows {self.rows.shape} do not belong together")
        if self.plain_ms.shape != (count,):
            raise ValueError(f"plain_ms must be [{count}], got {self.plain_ms.shape}")

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def depth(self) -> int:
        """D, the letters of a word."""
        return int(self.tokens.shape[1]).bit_length() - 1

    def take(self, chosen: NDArray[np.bool_]) -> Self:
        """The steps where `chosen` `[steps]` is True."""
        return type(self)(
            self.groups[chosen], self.tokens[chosen], self.ms[chosen], self.rows[chosen], self.plain_ms[chosen]
        )


@dataclass(frozen=True, slots=True)
class Totals:
    """What a way to schedule would have made of all steps."""

    steps: int
    tokens: float
    ms: float
    calls: float  # of the medium

    @property
    def rate(self) -> float:
        """Tokens per millisecond."""
        return self.tokens / self.ms

    def value(self, rate: float) -> float:
        """Tokens beyond what `rate` brings in the same time."""
        return self.tokens - rate * self.ms


def prefix_index(letters: str) -> int:
    """Where a prefix of a word stands among the prefixes."""
    return (1 << len(letters)) - 1 + word_index(letters)


def word_index(letters: str) -> int:
    """Where a word stands among the words of its length."""
    return int(letters.replace("S", "0").replace("M", "1") or "0", 2)


def words_of(depth: int) -> list[str]:
    """All words of a length, in order."""
    return [format(index, f"0{depth}b").replace("0", "S").replace("1", "M") for index in range(1 << depth)]


def outcomes(calls: Calls) -> NDArray[np.intp]:
    """`[steps]`: the word that decisions lead to."""
    at = np.zeros(len(calls), dtype=np.intp)
    steps = np.arange(len(calls))
    for length in range((calls.shape[1] + 1).bit_length() - 1):
        at = 2 * at + calls[steps, (1 << length) - 1 + at]
    return at


def limited(calls: Calls, max_calls: int) -> Calls:
    """The same decisions, with no call after a prefix that holds `max_calls` already."""
    before = np.array([index.bit_count() - 1 for index in range(1, calls.shape[1] + 1)])  # letters M of each prefix
    return calls & (before < max_calls)


def totals(steps: Steps, words: NDArray[np.intp]) -> Totals:
    """What comes of taking word `words[i]` in step i."""
    each = np.arange(len(steps))
    calls = np.array([index.bit_count() for index in range(steps.tokens.shape[1])])
    tokens, ms = steps.tokens[each, words], steps.ms[each, words]
    return Totals(len(steps), float(tokens.sum()), float(ms.sum()), float(calls[words].sum()))


def always(steps: Steps, letter: str) -> Totals:
    """One drafter in every drafting step: the end points of all scheduling."""
    return totals(steps, np.full(len(steps), word_index(letter * steps.depth)))


def plain(steps: Steps) -> Totals:
    """Nothing drafted."""
    return Totals(len(steps), float(len(steps)), float(steps.plain_ms.sum()), 0.0)


def oracle(steps: Steps) -> Totals:
    """The best that any scheduler could make of these steps: the largest rate over all choices of a word per step."""
    best = max((always(steps, "S"), always(steps, "M")), key=lambda total: total.rate)
    for _ in range(50):  # Dinkelbach rises strictly until it is optimal; it takes a handful of rounds
        found = totals(steps, np.argmax(steps.tokens - best.rate * steps.ms, axis=1))
        if not found.rate > best.rate * (1 + 1e-12):
            break
        best = found
    return best


def margins(steps: Steps, calls: Calls, rate: float) -> Floats:
    """`[steps, prefixes]`: value of calling over skipping at each decision, if what comes after it goes as `calls` says."""
    result = np.empty(calls.shape)
    value = steps.tokens - rate * steps.ms
    for length in reversed(range(steps.depth)):
        here = slice((1 << length) - 1, (1 << (length + 1)) - 1)
        skip, call = value[:, 0::2], value[:, 1::2]
        result[:, here] = call - skip
        value = np.where(calls[:, here], call, skip)
    return result


def reached(calls: Calls) -> NDArray[np.bool_]:
    """`[steps, prefixes]`: the decisions that a scheduler comes to, or would after one other decision of its own."""
    at = np.zeros((len(calls), 1), dtype=np.intp)
    result = np.zeros(calls.shape, dtype=np.bool_)
    each = np.arange(len(calls))[:, None]
    # Column 0 follows the scheduler; a further column per length takes the other letter there and follows it from then on.
    for length in range((calls.shape[1] + 1).bit_length() - 1):
        prefix = (1 << length) - 1 + at
        result[each, prefix] = True
        taken = 2 * at + calls[each, prefix]
        at = np.concatenate([taken, taken[:, :1] ^ 1], axis=1)
    return result


@dataclass(frozen=True, slots=True)
class ValueModel:
    """A linear guess of the margin: mean + sum(weight * (signal - mean of the signal) / its deviation)."""

    weights: Floats  # [signals], of standardized signals
    center: Floats  # [signals]
    scale: Floats  # [signals]
    mean: float

    def predict(self, rows: Floats) -> Floats:
        """`[...]` margins for rows `[..., signals]`."""
        guess: Floats = ((rows - self.center) / self.scale) @ self.weights + self.mean
        return guess


def fit_value(rows: Floats, margin: Floats, ridge: float = 1.0) -> ValueModel:
    """Ridge regression of `margin` `[n]` on `rows` `[n, signals]`; `ridge` counts as so many pseudo-samples."""
    center, scale = rows.mean(axis=0), rows.std(axis=0)
    scale = np.where(scale > 1e-9, scale, 1.0)  # a signal that never changes tells nothing
    standard = (rows - center) / scale
    gram = standard.T @ standard + ridge * np.eye(rows.shape[1])
    mean = float(margin.mean())
    return ValueModel(np.linalg.solve(gram, standard.T @ (margin - mean)), center, scale, mean)


def rate_of(steps: Steps, decide: Callable[[Floats], Calls], max_calls: int) -> Totals:
    """What a rule makes of the steps."""
    return totals(steps, outcomes(limited(decide(steps.rows), max_calls)))


def folds(groups: NDArray[np.intp], count: int) -> list[NDArray[np.bool_]]:
    """Held-out masks `[steps]`: every group is in one of them, and in one only; fewer than `count` with fewer groups."""
    names: Sequence[int] = np.unique(groups).tolist()
    number = {name: index for index, name in enumerate(names)}
    fold = np.array([number[group] for group in groups.tolist()]) % min(count, len(names))
    return [fold == index for index in range(min(count, len(names)))]
