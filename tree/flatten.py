"""From a set of tree nodes to what a forward pass needs: parents, positions and who may see whom.

Rows are flattened in index order, so parents come before children. Siblings share a position; positions come from
depths, never from the row number. A node sees the whole verified prefix, its ancestors and itself, nothing else in the
tree.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tree.tree import TokenTree


def subset_parents(tree: TokenTree, nodes: Sequence[int]) -> list[int]:
    """Parents of `nodes` as indices into `nodes`, -1 for the root.

    `nodes` must be ascending, start at the root and be ancestor-closed; AssertionError otherwise, because a missing
    parent must never turn into some neighbor.
    """
    assert len(nodes) > 0 and nodes[0] == 0, "a subset starts at the root"
    row = {node: i for i, node in enumerate(nodes)}
    assert all(a < b for a, b in zip(nodes, nodes[1:], strict=False)), "nodes are not strictly ascending"
    parents = [-1]
    for node in nodes[1:]:
        above = row.get(tree.parent[node])
        assert above is not None, f"node {node} is kept without its parent {tree.parent[node]}"
        parents.append(above)
    return parents


def ancestor_mask(parents: Sequence[int]) -> torch.Tensor:
    """Bool ``[M, M]`` on the CPU: True at (i, j) if j is an ancestor of i or i itself.

    `parents` has M entries re-indexed inside the subset, ``parents[0] == -1`` and ``parents[i] < i``.
    """
    lines: list[list[int]] = []  # per row the columns it sees
    for i, above in enumerate(parents):
        assert (above == -1) if i == 0 else (0 <= above < i), f"row {i} has parent {above}"
        lines.append([*lines[above], i] if i else [i])
    return _mask(lines, len(lines))


def positions(tree: TokenTree, nodes: Sequence[int], prefix_len: int) -> list[int]:
    """Position ids: `prefix_len` (tokens already in the cache, the root not among them) plus the depth."""
    return [prefix_len + tree.depth[node] for node in nodes]


def visible(tree: TokenTree, new: Sequence[int], slots: Sequence[int]) -> torch.Tensor:
    """Bool ``[len(new), len(slots)]`` on the CPU: True where the slot's node is the new node or an ancestor of it.

    `slots` are the nodes that have a cache row, in row order, `new` among them. Nodes are distinct.
    """
    column = {node: j for j, node in enumerate(slots)}
    assert len(column) == len(slots), "a node has two cache rows"
    lines = [[column[above] for above in (0, *tree.path(node)) if above in column] for node in new]
    return _mask(lines, len(slots))


def _mask(lines: Sequence[Sequence[int]], width: int) -> torch.Tensor:
    """Bool ``[len(lines), width]`` that is True at the listed columns of each row; one indexing operation."""
    mask = torch.zeros(len(lines), width, dtype=torch.bool)
    rows = [i for i, line in enumerate(lines) for _ in line]
    columns = [j for line in lines for j in line]
    mask[torch.tensor(rows, dtype=torch.long), torch.tensor(columns, dtype=torch.long)] = True
    return mask
