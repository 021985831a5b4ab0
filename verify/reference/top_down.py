"""The rules that walk from the root and solve one node at a time, as in :mod:`verify.ratio`, on plain lists."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tree.tree import TokenTree
from verify.base import Verdict
from verify.ratio import EMPTY
from verify.reference.decisions import Decisions, sum_in_order

Row = Sequence[float]

Solver = Callable[[Row, Row, Sequence[int], Decisions, int], "int | list[float]"]
"""(p, q, draws, decisions, depth) -> a token, or the weights to draw one from."""

PairChance = Callable[[int, int], float]
"""(first, second) -> the probability that the first is chosen from two different tokens."""


def normal(row: Row) -> list[float]:
    """`row` divided by its sum; as it is if that is 0."""
    mass = sum_in_order(row)
    return [weight / mass for weight in row] if mass > 0 else list(row)


def excess(p: Row, q: Row) -> list[float]:
    """(p - q)+."""
    return [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]


def top_down_reference(
    tree: TokenTree,
    rows: Mapping[int, Row],
    proposals: Mapping[int, Row],
    decisions: Decisions,
    solve: Solver,
) -> Verdict:
    """Walk along what `solve` names, over the nodes that have a row in `rows`, with the draws of `tree`."""
    path: list[int] = []
    node = num_fallbacks = 0
    while True:
        p, depth = normal(rows[node]), tree.depth[node]
        found: int | list[float] = p
        if node in tree.draws:
            found = solve(p, normal(proposals[node]), tree.draws[node], decisions, depth)
        if not isinstance(found, int):
            if sum_in_order(found) < EMPTY:
                found, num_fallbacks = p, num_fallbacks + 1
            found = decisions.pick(depth, found)
        child = tree.children[node].get(found)
        if child is None or child not in rows:
            return Verdict(tuple(path), found, num_fallbacks=num_fallbacks)
        path.append(child)
        node = child


def naive(p: Row, q: Row, draws: Sequence[int], decisions: Decisions, depth: int) -> int | list[float]:
    """Test the first draw; else the rest of p."""
    x = draws[0]
    return x if decisions.accept(depth, p[x] / q[x]) else excess(p, q)


def beta(p: Row, q: Row, rho: float) -> float:
    """SpecTr's probability of accepting one draw."""
    return sum_in_order([min(a / rho, b) for a, b in zip(p, q, strict=True)])


def smallest_rho(p: Row, q: Row, k: int) -> float:
    """By bisection; the upper end, so that the remainder is not negative."""
    below, above = 1.0, float(k)
    for _ in range(100):
        rho = (below + above) / 2
        if 1 - (1 - beta(p, q, rho)) ** k <= rho * beta(p, q, rho):
            above = rho
        else:
            below = rho
    return above


def spectr(rho_of: Callable[[Row, Row, int], float] = smallest_rho) -> Solver:
    """SpecTr with the divisor that `rho_of` gives for (p, q, k)."""

    def solve(p: Row, q: Row, draws: Sequence[int], decisions: Decisions, depth: int) -> int | list[float]:
        k = len(draws)
        rho = rho_of(p, q, k)
        for x in draws:
            if decisions.accept(depth, p[x] / (rho * q[x])):
                return x
        one = beta(p, q, rho)
        share = (1 - (1 - one) ** k) / one if one > 0 else float(k)
        return [max(a - min(a / rho, b) * share, 0.0) for a, b in zip(p, q, strict=True)]

    return solve


def recursive(p: Row, q: Row, draws: Sequence[int], decisions: Decisions, depth: int) -> int | list[float]:
    """SpecInfer with replacement, in drawing order."""
    for x in draws:
        if decisions.accept(depth, p[x] / q[x]):
            return x
        p = excess(p, q)
        if sum_in_order(p) < EMPTY:
            break
        p = normal(p)
    return list(p)


def recursive_shuffled(p: Row, q: Row, draws: Sequence[int], decisions: Decisions, depth: int) -> int | list[float]:
    """SpecInfer with replacement, in random order."""
    left = list(draws)
    while left:
        x = left.pop(decisions.below(depth, len(left)))
        if decisions.accept(depth, p[x] / q[x]):
            return x
        p = excess(p, q)
        if sum_in_order(p) < EMPTY:
            break
        p = normal(p)
    return list(p)


def distinct(p: Row, q: Row, draws: Sequence[int], decisions: Decisions, depth: int) -> int | list[float]:
    """Recursive rejection without replacement."""
    for x in draws:
        if decisions.accept(depth, p[x] / q[x]):
            return x
        p = excess(p, q)
        q = normal([0.0 if token == x else weight for token, weight in enumerate(q)])
        if sum_in_order(p) < EMPTY:
            break
        p = normal(p)
        if not any(q):
            break
    return list(p)


def chosen_law(a: Row, b: Row, chance: PairChance) -> list[float]:
    """The law of the token chosen from one draw of each law."""
    law = [x * y for x, y in zip(a, b, strict=True)]
    for i in range(len(a)):
        for j in range(len(a)):
            if i != j:
                law[i] += a[i] * b[j] * chance(i, j)
                law[j] += a[i] * b[j] * (1 - chance(i, j))
    return law


def khisti(chances: Callable[[Row, Row, int], Sequence[PairChance]]) -> Solver:
    """Khisti with the duels that `chances` gives for (p, q, k): k - 1 of them, any will do."""

    def solve(p: Row, q: Row, draws: Sequence[int], decisions: Decisions, depth: int) -> int | list[float]:
        token, law = draws[0], list(q)
        for rival, chance in zip(draws[1:], chances(p, q, len(draws)), strict=True):
            law = chosen_law(law, q, chance)
            if rival != token and not decisions.accept(depth, chance(token, rival)):
                token = rival
        return token if decisions.accept(depth, p[token] / law[token]) else excess(p, law)

    return solve
