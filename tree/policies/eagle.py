"""EAGLE-2 and -3: expand the best K nodes of every layer, verify the best of everything that was proposed.

Sources: 2406.16858 (expand and rerank) and 2503.01840 (the same tree, another drafter), with their notation: K width, N
nodes. Every expanded node proposes its K best tokens and *all* of them enter the pool; the K best of a layer by path
score are expanded next, and at the end the N - 1 best of the whole pool are kept.

Traps:
    Being in the pool and being expanded are two things: a candidate that is not expanded may still be verified.
    Log-probabilities are <= 0, so a child never outranks its parent, but it ties with it where the drafter is sure. Depth
    is therefore the second sort key (:mod:`tree.select`); without it the best N - 1 need not form a tree.
    `depth` counts drafter forwards, which is also the depth of the deepest node. The released code's default of 7 counts
    the forwards after the first and is 8 here.
    A node outside the best N - 1 of its layer can neither be kept nor have a descendant that is. So at most N - 1 nodes
    of a layer enter the tree or are expanded, and N - 1 layers are enough: less work, the same result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from tree.policies.layers import LayerGrowth, LayerPolicy, Proposal, check_at_least
from tree.select import verify_set


@dataclass(frozen=True, slots=True)
class Eagle(LayerPolicy):
    """Expand K per layer, then rerank."""

    width: int = 10  # K: nodes expanded per layer and candidates of each
    depth: int = 8  # layers, each one drafter forward
    budget: int = 60  # N, root included

    def __post_init__(self) -> None:
        check_at_least(1, width=self.width, budget=self.budget)
        check_at_least(0, depth=self.depth)

    def with_budget(self, budget: int) -> Eagle:
        """The same expansion, cut to another N, root included."""
        return replace(self, budget=budget)

    def wanted(self, growth: LayerGrowth) -> int:
        """K candidates for `depth` layers."""
        return self._num_parents if growth.num_layers < min(self.depth, self.budget - 1) else 0

    def admitted(self, growth: LayerGrowth, pool: Iterator[Proposal]) -> Iterable[Proposal]:
        """Everything that could still be kept."""
        return islice(pool, self.budget - 1)

    def parents(self, growth: LayerGrowth, layer: Sequence[int]) -> Sequence[int]:
        """The K best of the newest layer."""
        return layer[: self._num_parents]

    def verified(self, growth: LayerGrowth) -> list[int]:
        """The best N - 1 of the pool, and the root."""
        return verify_set(growth.tree, self.budget)

    @property
    def _num_parents(self) -> int:
        return min(self.width, self.budget - 1)
