"""The decision rules once more, slow and obvious, with every random decision handed out.

A rule here gets a *chooser*: asked with the depth and the weights of the alternatives, it returns the index of one. A
chooser that races exponentials gives the same verdicts as the production rules, element by element. :func:`outcomes`
instead tries every decision and yields every outcome with its probability, so that tests compare laws exactly and never
by sampling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from tree.tree import TokenTree
from verify.base import Verdict

Chooser = Callable[[int, Sequence[float]], int]
"""(depth, weights of the alternatives) -> index of the chosen one; weights need not sum to 1."""

Outcome = TypeVar("Outcome")


def greedy_reference(tree: TokenTree, nodes: Sequence[int], rows: Sequence[Sequence[float]]) -> Verdict:
    """Greedy matching on ``rows[i][token]``, the target's logits at ``nodes[i]``."""
    kept = set(nodes)
    path: list[int] = []
    node = 0
    while True:
        row = rows[list(nodes).index(node)]
        token = min(t for t in range(len(row)) if row[t] == max(row))
        child = tree.children[node].get(token)
        if child not in kept or child is None:
            return Verdict(tuple(path), token)
        path.append(child)
        node = child


def walk_reference(
    tree: TokenTree, nodes: Sequence[int], rows: Sequence[Sequence[float]], choose: Chooser
) -> Verdict:
    """Target-sampling walk on ``rows[i][token]``, the target's probabilities at ``nodes[i]``."""
    kept = set(nodes)
    path: list[int] = []
    node = 0
    while True:
        token = choose(tree.depth[node], rows[list(nodes).index(node)])
        child = tree.children[node].get(token)
        if child not in kept or child is None:
            return Verdict(tuple(path), token)
        path.append(child)
        node = child


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
