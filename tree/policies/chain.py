"""Chain: one child per node, the drafter's best token each time.

The plain draft of classic speculative decoding, as a deterministic tree. `length` drafting steps give `length` nodes
below the root.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

from tree.policies.layers import LayerGrowth, LayerPolicy, Proposal, check_at_least


@dataclass(frozen=True, slots=True)
class Chain(LayerPolicy):
    """Draft `length` tokens in a row (gamma in the literature); 0 drafts nothing."""

    length: int = 4  # tokens, each one drafter forward

    def __post_init__(self) -> None:
        check_at_least(0, length=self.length)

    @property
    def budget(self) -> int:
        """Verified nodes per step, root included."""
        return self.length + 1

    def with_budget(self, budget: int) -> Chain:
        """A chain of at most ``budget - 1`` nodes below the root; a larger budget than needed changes nothing."""
        check_at_least(1, budget=budget)
        return replace(self, length=min(self.length, budget - 1))

    def wanted(self, growth: LayerGrowth) -> int:
        """One candidate until the chain is long enough."""
        return 1 if growth.num_layers < self.length else 0

    def admitted(self, growth: LayerGrowth, pool: Iterator[Proposal]) -> Iterable[Proposal]:
        """The best."""
        return islice(pool, 1)
