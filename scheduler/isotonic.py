"""The closest non-decreasing sequence: pool adjacent violators.

What must rise with rows (milliseconds) or with a score (the chance of being accepted) rises on average only when measured.
Neighbors in the wrong order are replaced by their weighted mean until none are left; that is the least-squares fit.
"""

from __future__ import annotations

from collections.abc import Sequence


def non_decreasing(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The non-decreasing sequence with the smallest weighted squared distance to `values`; `weights` are positive.

    As many numbers as came in, between the smallest and the largest of them.
    """
    assert len(values) == len(weights), f"{len(values)} values, {len(weights)} weights"
    blocks: list[tuple[float, float, int]] = []  # mean, weight, how many
    for value, weight in zip(values, weights, strict=True):
        mean, mass, count = float(value), float(weight), 1
        while blocks and blocks[-1][0] > mean:
            before, before_mass, before_count = blocks.pop()
            # A step from the lower mean: it cannot leave the interval between the two, as a quotient of sums may by rounding.
            mean += (before - mean) * (before_mass / (mass + before_mass))
            mass, count = mass + before_mass, count + before_count
        blocks.append((mean, mass, count))
    return [mean for mean, _, count in blocks for _ in range(count)]
