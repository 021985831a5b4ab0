"""Chain: one child per node, the drafter's best token each time.

The plain draft of classic speculative decoding, as a deterministic tree. `length` drafting steps give `length` nodes
below the root. Suffix chains and the termination rule of a prompt-lookup drafter belong to grafting and are not used
here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tree.growth import Answer, Ask, Limits, is_graft
from tree.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Chain:
    """Draft `length` tokens in a row (gamma in the literature); 0 drafts nothing."""

    length: int = 4

    def __post_init__(self) -> None:
        if self.length < 0:
            raise ValueError(f"length must be at least 0, got {self.length}")

    @property
    def budget(self) -> int:
        """Verified nodes per step, root included."""
        return self.length + 1

    def with_budget(self, budget: int) -> Chain:
        """A chain of at most ``budget - 1`` nodes below the root; a larger budget than needed changes nothing."""
        if budget < 1:
            raise ValueError(f"budget must be at least 1 (the root), got {budget}")
        return replace(self, length=min(self.length, budget - 1))

    def begin(
        self,
        root_token: int,
        *,
        stop_tokens: frozenset[int] = frozenset(),
        max_depth: int | None = None,
        vocab_size: int,
    ) -> ChainGrowth:
        """Start a chain; see :class:`tree.growth.Policy`."""
        return ChainGrowth(self, TokenTree(root_token), Limits(vocab_size, stop_tokens, max_depth))


class ChainGrowth:
    """A chain under construction; its last node is the tree's last node."""

    def __init__(self, policy: Chain, tree: TokenTree, limits: Limits) -> None:
        self.tree = tree
        self.num_grafts = 0
        self._policy = policy
        self._limits = limits
        self._is_done = False

    def ask(self, drafter: str) -> Ask | None:
        """The best child of the last node, from whichever drafter it is."""
        last = len(self.tree) - 1
        if self._is_done or last >= self._policy.length or not self._limits.is_open(self.tree, last):
            return None
        return Ask(nodes=(last,), width=1)

    def attach(self, drafter: str, answer: Answer) -> None:
        """Append the best candidate; a drafter without one ends the chain."""
        last = len(self.tree) - 1
        candidates = answer.candidates.get(last)
        if candidates is None or not candidates.tokens:
            self._is_done = True
            return
        token, lp = candidates.tokens[0], candidates.lps[0]
        if lp == -math.inf or not self._limits.allows(token):
            self._is_done = True
            return
        self.num_grafts += is_graft(self.tree, last, drafter)
        self.tree.add(last, token, lp, drafter)

    def verify_nodes(self) -> list[int]:
        """The whole chain; it never outgrows the budget."""
        return list(range(len(self.tree)))
