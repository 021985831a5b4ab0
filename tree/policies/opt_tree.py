"""OPT-Tree: the n nodes with the largest sum of path probabilities, searched layer by layer until a layer adds too little.

Source: 2406.17276, with its notation: n nodes, E the sum of the path probabilities of the n best, which is the expected
number of accepted tokens if the drafter's probabilities are the target's. Every layer expands the n best nodes of the one
before and keeps the n best of their n * n children. Path probabilities never grow downwards, so the n best of all
layers form a tree, and no other tree of as many nodes and layers has a larger E.

Traps:
    A forward has n rows here, not K. Growth stops when the newest layer raised E by `gain` (eps) or less, so that layer has
    been paid for already, and the first layer is never judged. n does not count the root; `budget` does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from heapq import nlargest
from itertools import islice

from tree.policies.layers import LayerGrowth, LayerPolicy, Proposal, check_at_least
from tree.select import verify_set
from tree.tree import TokenTree


@dataclass(frozen=True, slots=True)
class OptTree(LayerPolicy):
    """The best n-node tree of the region that is worth exploring."""

    budget: int = 60  # n + 1: the root is counted
    gain: float = 0.5  # eps: accepted tokens that a layer must add for another one to be drafted; below 0: never stops
    depth: int = 10  # most layers, each one drafter forward

    def __post_init__(self) -> None:
        check_at_least(1, budget=self.budget)
        check_at_least(0, depth=self.depth)
        if math.isnan(self.gain):
            raise ValueError("gain must be a number")

    def with_budget(self, budget: int) -> OptTree:
        """The same search for another number of nodes, root included."""
        return replace(self, budget=budget)

    def wanted(self, growth: LayerGrowth) -> int:
        """n candidates per parent, until E stops growing."""
        num_nodes = self.budget - 1
        layers = growth.num_layers
        if layers >= min(self.depth, num_nodes):
            return 0
        if layers >= 2 and self._newest_gain(growth.tree, layers) <= self.gain:
            return 0
        return num_nodes

    def admitted(self, growth: LayerGrowth, pool: Iterator[Proposal]) -> Iterable[Proposal]:
        """The n best of the layer."""
        return islice(pool, self.budget - 1)

    def verified(self, growth: LayerGrowth) -> list[int]:
        """The n best of all layers, and the root."""
        return verify_set(growth.tree, self.budget)

    def _newest_gain(self, tree: TokenTree, layers: int) -> float:
        """What the newest layer added to E."""
        older = (node for node in range(1, len(tree)) if tree.depth[node] < layers)
        return expected_accepted(tree, self.budget - 1) - expected_accepted(tree, self.budget - 1, older)


def expected_accepted(tree: TokenTree, num_nodes: int, nodes: Iterable[int] | None = None) -> float:
    """E: the sum of the `num_nodes` largest path probabilities among `nodes`, by default all below the root."""
    among = range(1, len(tree)) if nodes is None else nodes
    return math.fsum(nlargest(num_nodes, (math.exp(tree.score[node]) for node in among)))
