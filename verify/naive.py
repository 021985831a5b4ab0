"""Naive: test the first draw alone, and draw the rest of p where it exceeds q.

    accept x = X_1 with probability min(1, p(x) / q(x)), else draw from norm((p - q)+)

On a chain this is classic speculative sampling (2211.17192). On a tree (NaiveTree in 2602.16994) the token drawn from the
remainder may be one of the other children, and the walk goes on there. Exact because min(p, q) + (p - q)+ = p.

The rule never asks how the later siblings came to be. So it serves trees without replacement too, and trees of chosen
siblings with one sampled child (RheoSampling, 2609.21827): there the tree's row is r, q without the chosen ones, and the
one draw came from it. A node of such a tree that has chosen children only is a node without draws, and p is sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from tree.draws import TreeKind
from tree.tree import TokenTree
from verify.base import Noise, Rows, Verdict
from verify.ratio import Tests, excess, ratio, top_down


def solve(p: torch.Tensor, q: torch.Tensor, draws: Sequence[int], tests: Tests) -> int | torch.Tensor:
    """See :data:`verify.ratio.Solver`; one test."""
    token = draws[0]
    return token if tests.accept(ratio(p, q, token)) else excess(p, q)


@dataclass(frozen=True, slots=True)
class Naive:
    """Accept or refuse the first draw of every reached node."""

    name: ClassVar[str] = "naive"
    lossless: ClassVar[bool] = True
    accepts: ClassVar[frozenset[TreeKind]] = frozenset(TreeKind) - {TreeKind.DETERMINISTIC}
    needs_chain: ClassVar[bool] = False
    reads_logits: ClassVar[bool] = False

    def __call__(self, tree: TokenTree, nodes: Sequence[int], rows: Rows, noise: Noise) -> Verdict:
        """Decide from probabilities ``[len(nodes), vocab]`` and the tree's draws."""
        return top_down(self, tree, nodes, rows, noise, solve)
