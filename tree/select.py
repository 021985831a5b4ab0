"""The one ranking of nodes, and the cut of a grown tree to the nodes that the target verifies.

Source: TreeGraft (2608.26112); the tie-break is ours. The working tree may be larger than the budget and is cut once,
at the end. Since log-probabilities are <= 0, a child never outranks its parent, and the depth as second key keeps that
true when an edge has probability 1: the best nodes form a tree. The closure below still holds for scores that are not
monotone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from tree.tree import TokenTree

SCORE_DIGITS = 9
"""Decimal places that count. Sums of the same edges in another order differ in the last bit and must still be ties."""
TIE = 10.0**-SCORE_DIGITS
"""Scores closer than this may be ties."""


def rounded(score: float) -> float:
    """`score` with only the digits that count; monotone, -inf stays -inf."""
    return round(score, SCORE_DIGITS)


def rank_key(tree: TokenTree, node: int) -> tuple[float, int, int]:
    """Sort key, best first: score descending, depth ascending, creation index ascending."""
    return -rounded(tree.score[node]), tree.depth[node], node


def top(tree: TokenTree, nodes: Iterable[int], count: int) -> list[int]:
    """The `count` best of `nodes`, best first."""
    return sorted(nodes, key=lambda node: rank_key(tree, node))[:count]


def verify_set(tree: TokenTree, budget: int, floor: float = -math.inf) -> list[int]:
    """Choose at most `budget` nodes, root included, for the target: ascending, root first, ancestor-closed.

    Nodes are taken in rank order together with their missing ancestors, and skipped if those do not fit. Unscored
    (-inf) nodes fill what is left in (depth, index) order. Nodes whose score is below `floor` are not worth a row and
    are left out even if there is room. Raise ValueError for a budget without room for the root.
    """
    if budget < 1:
        raise ValueError(f"budget must be at least 1 (the root), got {budget}")
    worthy = [node for node in range(1, len(tree)) if tree.score[node] >= floor]
    if len(worthy) < budget and len(worthy) == len(tree) - 1:
        return list(range(len(tree)))
    kept = {0}
    for node in top(tree, worthy, len(worthy)):
        missing = [node]  # empty iff an earlier, deeper node brought this one in
        while missing and missing[-1] in kept:
            missing.pop()
        while missing and tree.parent[missing[-1]] not in kept:
            missing.append(tree.parent[missing[-1]])
        if len(kept) + len(missing) <= budget:
            kept.update(missing)
        if len(kept) == budget:
            break
    return sorted(kept)
