"""The draft tree of one decoding step: a structure of arrays with the last verified token at its root.

Decides what a node is and which scores it carries. Leaves to others which nodes are worth adding (:mod:`tree.policies`,
:mod:`tree.graft`) or how they are drawn (:mod:`tree.draws`), which are sent to the target (:mod:`tree.select`) and which
are accepted (:mod:`verify`).

Traps: the root's token is already part of the output but has no cache row yet; an edge's log-probability belongs to the
*last* drafter that scored it, not to the one that created the node; a score is only right after
:meth:`TokenTree.refresh`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tree.draws import TreeKind, check_draws

if TYPE_CHECKING:
    import torch

ROUNDING = 1e-4
"""A log-probability up to this far above 0 is rounding of a float32 softmax and is taken as 0."""


def checked_lp(lp: float) -> float:
    """Return `lp` as a log-probability <= 0; -inf is legal. Raise ValueError for NaN and for values above rounding."""
    if not lp <= ROUNDING:  # also catches NaN
        raise ValueError(f"a log-probability must be <= 0, got {lp}")
    return min(float(lp), 0.0)


class TokenTree:
    """Nodes by index; index 0 is the root. Grows only: nodes are never removed, reordered or overwritten.

    Fields, one entry per node i:
        token: token id.
        parent: index of the parent, -1 for the root.
        depth: edges from the root.
        lp: the authoritative log-probability of ``token[i]`` at the parent's path (0 for the root); -inf is legal.
        score: sum of ``lp`` along the path from the root.
        creator: name of the drafter that proposed the node first ("target" for the root); never changes.
        scorer: name of the drafter that owns ``lp[i]``; changes by :meth:`rescore`.
        edge_lp: drafter name -> the log-probability it gave to this edge itself, whether or not it owns the edge.
        children: token -> child node.

    Of a sampled tree also, filled by :func:`tree.draws.record_draws`:
        kind: how the children came to be.
        draws: node -> tokens drawn at it, with repeats, in drawing order; nodes without draws have no entry.
        proposals: node -> the row q, ``[vocab]`` weights, that its draws came from.

    Invariants (:meth:`check` asserts them):
        all arrays have one entry per node; ``parent[i] < i`` (topological order); ``depth[i] == depth[parent[i]] + 1``;
        ``children`` and ``parent`` describe the same edges, so tokens are distinct under a parent; ``lp <= 0``, never
        NaN; ``lp[i] == edge_lp[i][scorer[i]]``; ``creator[i]`` has an entry in ``edge_lp[i]``; ``score[i] ==
        score[parent[i]] + lp[i]``; draws, rows and children belong together as the kind says.
    """

    __slots__ = (
        "children",
        "creator",
        "depth",
        "draws",
        "edge_lp",
        "kind",
        "lp",
        "parent",
        "proposals",
        "score",
        "scorer",
        "token",
    )

    def __init__(self, root_token: int, kind: TreeKind = TreeKind.DETERMINISTIC) -> None:
        """A tree of only the root, the last verified token."""
        self.kind = kind
        self.draws: dict[int, list[int]] = {}
        self.proposals: dict[int, torch.Tensor] = {}
        self.token: list[int] = [root_token]
        self.parent: list[int] = [-1]
        self.depth: list[int] = [0]
        self.lp: list[float] = [0.0]
        self.score: list[float] = [0.0]
        self.creator: list[str] = ["target"]
        self.scorer: list[str] = ["target"]
        self.edge_lp: list[dict[str, float]] = [{}]
        self.children: list[dict[int, int]] = [{}]

    def __len__(self) -> int:
        """Number of nodes, root included."""
        return len(self.token)

    def add(self, parent: int, token: int, lp: float, drafter: str) -> int:
        """Append a child and return its index. Raise ValueError for a token that is there or a bad `lp`."""
        if not 0 <= parent < len(self):
            raise ValueError(f"no node {parent} in a tree of {len(self)}")
        if token in self.children[parent]:
            raise ValueError(f"node {parent} has a child with token {token} already")
        lp = checked_lp(lp)
        node = len(self)
        self.token.append(token)
        self.parent.append(parent)
        self.depth.append(self.depth[parent] + 1)
        self.lp.append(lp)
        self.score.append(self.score[parent] + lp)
        self.creator.append(drafter)
        self.scorer.append(drafter)
        self.edge_lp.append({drafter: lp})
        self.children.append({})
        self.children[parent][token] = node
        return node

    def rescore(self, node: int, lp: float, drafter: str) -> None:
        """Make `drafter` the owner of the edge above `node`. Scores are stale until :meth:`refresh`.

        Raise ValueError for the root (it has no edge) and for a value that is not a log-probability.
        """
        if not 0 < node < len(self):
            raise ValueError(f"node {node} has no edge to rescore")
        lp = checked_lp(lp)
        self.lp[node] = lp
        self.scorer[node] = drafter
        self.edge_lp[node][drafter] = lp

    def record(self, node: int, lp: float, drafter: str) -> None:
        """Note what `drafter` thinks of the edge above `node` without making it the owner; for audit and calibration.

        Raise ValueError for the root, for the owner itself, and for a value that is not a log-probability.
        """
        if not 0 < node < len(self) or self.scorer[node] == drafter:
            raise ValueError(f"{drafter} cannot put a side value on node {node}")
        self.edge_lp[node][drafter] = checked_lp(lp)

    def refresh(self) -> None:
        """Recompute every score top-down in one pass; parents come first by construction."""
        for node in range(1, len(self)):
            self.score[node] = self.score[self.parent[node]] + self.lp[node]

    def path(self, node: int) -> list[int]:
        """Nodes from depth 1 down to `node`; empty for the root."""
        nodes: list[int] = []
        while node > 0:
            nodes.append(node)
            node = self.parent[node]
        nodes.reverse()
        return nodes

    def path_tokens(self, node: int) -> list[int]:
        """Tokens from depth 1 down to `node`; empty for the root."""
        return [self.token[i] for i in self.path(node)]

    def check(self) -> None:
        """Assert every invariant of the class docstring; for tests."""
        size = len(self)
        for name in self.__slots__:
            if name in ("draws", "kind", "proposals"):
                continue
            assert len(getattr(self, name)) == size, f"{name} has {len(getattr(self, name))} entries for {size} nodes"
        assert self.parent[0] == -1 and self.depth[0] == 0 and self.lp[0] == 0.0 and self.score[0] == 0.0, "bad root"
        assert sum(len(children) for children in self.children) == size - 1, "children and parents disagree"
        for i in range(1, size):
            above = self.parent[i]
            assert 0 <= above < i, f"node {i} precedes its parent {above}"
            assert self.depth[i] == self.depth[above] + 1, f"depth of node {i}"
            assert self.children[above].get(self.token[i]) == i, f"node {i} is not its parent's child"
            assert self.lp[i] <= 0.0, f"lp of node {i} is {self.lp[i]}"
            assert self.lp[i] == self.edge_lp[i][self.scorer[i]], f"lp of node {i} is not its scorer's"
            assert self.creator[i] in self.edge_lp[i], f"node {i} lost its creator's value"
            expected = self.score[above] + self.lp[i]
            assert self.score[i] == expected or math.isclose(self.score[i], expected, abs_tol=1e-9), (
                f"score of node {i} is {self.score[i]}, its path gives {expected}"
            )
        check_draws(self)
