"""Greedy matching (temperature 0): accept the longest path that the target itself would have written.

Lossless on every tree: a child is accepted only if it *is* the target's best token, never because it is some likely
child. The output equals plain greedy decoding token for token, given equal logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from tree.draws import TreeKind
from tree.tree import TokenTree
from verify.base import Noise, Rows, Verdict
from verify.walk import descend


@dataclass(frozen=True, slots=True)
class Greedy:
    """Follow the target's argmax; the lowest id wins a tie."""

    name: ClassVar[str] = "greedy"
    lossless: ClassVar[bool] = True
    accepts: ClassVar[frozenset[TreeKind]] = frozenset(TreeKind)
    needs_chain: ClassVar[bool] = False
    reads_logits: ClassVar[bool] = True

    def __call__(self, tree: TokenTree, nodes: Sequence[int], rows: Rows, noise: Noise) -> Verdict:
        """Decide from logits ``[len(nodes), vocab]`` (any monotone function of them will do); `noise` is not used."""
        assert isinstance(rows, torch.Tensor), "logits are looked at all together"
        assert rows.ndim == 2 and rows.shape[0] == len(nodes), f"{len(nodes)} nodes, rows {tuple(rows.shape)}"
        best: list[int] = rows.argmax(dim=-1).tolist()  # argmax returns the first of equal maxima
        return descend(tree, nodes, best.__getitem__)
