"""LOSSY. The margin rule: at a mismatch follow a drafted token that the target likes nearly as much as its own.

Source: AdaptiveSpec (2609.02897), stated for chains and temperature 0; the rule on trees is ours. At a node whose best token
is no child, the child c that the target likes best is promoted if p(c) >= kappa max p. Later rows were computed given c, so
nothing is recomputed. Each promotion costs at most -log kappa nats of the target's log-probability. kappa above 1 promotes
nothing and is greedy decoding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from tree.draws import TreeKind
from tree.tree import TokenTree
from verify.base import Noise, Rows, Verdict


@dataclass(frozen=True, slots=True)
class Margin:
    """Greedy matching that forgives close seconds."""

    name: ClassVar[str] = "margin"
    lossless: ClassVar[bool] = False
    accepts: ClassVar[frozenset[TreeKind]] = frozenset(TreeKind)
    needs_chain: ClassVar[bool] = False
    reads_logits: ClassVar[bool] = True

    kappa: float = 0.2  # least p(child) / max p, at least 0
    max_promotions: int | None = None  # per step; None: no limit

    def __post_init__(self) -> None:
        if not self.kappa >= 0.0:
            raise ValueError(f"kappa must be at least 0, got {self.kappa}")
        if self.max_promotions is not None and self.max_promotions < 0:
            raise ValueError(f"max_promotions must be at least 0 or None, got {self.max_promotions}")

    def __call__(self, tree: TokenTree, nodes: Sequence[int], rows: Rows, noise: Noise) -> Verdict:
        """Decide from logits ``[len(nodes), vocab]`` at temperature 1; `noise` is not used."""
        assert isinstance(rows, torch.Tensor), "logits are looked at all together"
        assert rows.ndim == 2 and rows.shape[0] == len(nodes), f"{len(nodes)} nodes, rows {tuple(rows.shape)}"
        row = {node: i for i, node in enumerate(nodes)}
        least = math.log(self.kappa) if self.kappa > 0.0 else -math.inf
        best: list[int] = rows.argmax(dim=-1).tolist()
        path: list[int] = []
        promoted: list[int] = []
        node = 0
        while True:
            i, token = row[node], best[row[node]]
            child = tree.children[node].get(token)
            if child is None or child not in row:
                second = self._second(tree, node, row, rows[i], rows[i, token].item() + least)
                if second is None or len(promoted) == self.max_promotions:
                    return Verdict(tuple(path), token, tuple(promoted))
                promoted.append(second)
                child = second
            path.append(child)
            node = child

    @staticmethod
    def _second(tree: TokenTree, node: int, row: dict[int, int], logits: torch.Tensor, least: float) -> int | None:
        """The verified child with the highest logit, the lowest id on ties, if that is at least `least` and possible."""
        there = sorted(token for token, child in tree.children[node].items() if child in row)
        if not there:
            return None
        values: list[float] = logits[there].tolist()
        highest = max(values)
        if highest == -math.inf or highest < least:
            return None
        return tree.children[node][there[values.index(highest)]]
