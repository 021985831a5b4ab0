"""Who decides: choosers, which try every alternative or replay the numbers of a production rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

from verify.base import Noise

Chooser = Callable[[int, Sequence[float]], int]
"""(depth, weights of the alternatives) -> index of the chosen one; weights need not sum to 1."""

Outcome = TypeVar("Outcome")


def choose_by(exponentials: Callable[[int], Sequence[float]]) -> Chooser:
    """The chooser that races ``exponentials(depth)``, one per alternative; never picks a weight of 0."""

    def choose(depth: int, weights: Sequence[float]) -> int:
        winner, best = -1, math.inf
        for index, (weight, exponential) in enumerate(zip(weights, exponentials(depth), strict=True)):
            if weight > 0 and exponential / weight < best:
                winner, best = index, exponential / weight
        assert winner >= 0, "all weights are 0"
        return winner

    return choose


def sum_in_order(weights: Sequence[float]) -> float:
    """Plain left-to-right sum; newer Pythons compensate rounding in `sum` and would differ in the last bit."""
    total = 0.0
    for weight in weights:
        total += weight
    return total


def outcomes(rule: Callable[[Chooser], Outcome]) -> Iterator[tuple[float, Outcome]]:
    """Run `rule` along every sequence of decisions with positive probability; yield (probability, what it returned).

    `rule` must decide only through its chooser. Weights are normalized, so the probabilities sum to 1.
    """
    open_prefixes: list[list[int]] = [[]]
    while open_prefixes:
        prefix = open_prefixes.pop()
        taken: list[int] = []
        probability = 1.0

        def choose(depth: int, weights: Sequence[float], prefix: list[int] = prefix, taken: list[int] = taken) -> int:
            nonlocal probability
            possible = [index for index, weight in enumerate(weights) if weight > 0]
            if len(taken) < len(prefix):
                pick = prefix[len(taken)]
            else:  # a new decision: take the first alternative now and leave the others for later
                pick = possible[0]
                open_prefixes.extend([*taken, other] for other in possible[1:])
            taken.append(pick)
            probability *= weights[pick] / sum_in_order(weights)
            return pick

        outcome = rule(choose)
        yield probability, outcome


class Decisions(Protocol):
    """The decisions of a ratio rule, of three kinds, since production uses other numbers for tests than for tokens."""

    def accept(self, depth: int, probability: float) -> bool:
        """An accept test at `depth`."""

    def below(self, depth: int, count: int) -> int:
        """One of ``range(count)``, all equally likely."""

    def pick(self, depth: int, weights: Sequence[float]) -> int:
        """A token of the law `weights`, which need not sum to 1."""


class Chosen:
    """Every decision by one chooser; under :func:`outcomes`, every decision both ways."""

    def __init__(self, choose: Chooser) -> None:
        self._choose = choose

    def accept(self, depth: int, probability: float) -> bool:
        """See :class:`Decisions`."""
        probability = min(probability, 1.0)
        return self._choose(depth, [1.0 - probability, probability]) == 1

    def below(self, depth: int, count: int) -> int:
        """See :class:`Decisions`."""
        return self._choose(depth, [1.0] * count)

    def pick(self, depth: int, weights: Sequence[float]) -> int:
        """See :class:`Decisions`."""
        return self._choose(depth, weights)


class Replayed:
    """The decisions that a production rule takes with the same noise."""

    def __init__(self, noise: Noise) -> None:
        self._noise = noise
        self._used: dict[int, int] = {}  # tests so far, by depth

    def accept(self, depth: int, probability: float) -> bool:
        """See :class:`Decisions`."""
        return self._number(depth) < probability

    def below(self, depth: int, count: int) -> int:
        """See :class:`Decisions`."""
        return int(self._number(depth) * count)

    def pick(self, depth: int, weights: Sequence[float]) -> int:
        """See :class:`Decisions`."""
        return choose_by(lambda depth: self._noise.exponentials(depth, len(weights)).tolist())(depth, weights)

    def _number(self, depth: int) -> float:
        used = self._used[depth] = self._used.get(depth, 0) + 1
        return self._noise.uniforms(depth, used)[-1]
