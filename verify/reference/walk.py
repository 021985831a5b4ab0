"""The rules of any tree: greedy matching, and the target-sampling walk."""

from __future__ import annotations

from collections.abc import Sequence

from tree.tree import TokenTree
from verify.base import Verdict
from verify.reference.decisions import Chooser


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


def walk_reference(tree: TokenTree, nodes: Sequence[int], rows: Sequence[Sequence[float]], choose: Chooser) -> Verdict:
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
