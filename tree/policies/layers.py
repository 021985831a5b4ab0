"""The layer loop that every single-drafter policy shares: ask about the newest layer, admit the next one, repeat.

A :class:`LayerPolicy` is a set of frozen parameters and four pure rules: how many candidates a parent should give, which
of them join the tree, which new nodes are asked about next, and which nodes are verified. :class:`LayerGrowth` owns the
only mutable state. Whoever drafts may change from layer to layer. Suffix chains and the termination rule of a
prompt-lookup drafter belong to grafting and are not used here.

Traps:
    Proposals come best first across all parents: path score descending, then the parents' order, then the order within
    a parent. Nodes are created in that order, so the creation index breaks later ties the same way. The stream is lazy;
    it relies on candidates being sorted, and a rule should take what it needs and leave the rest.
    Candidates of probability zero never enter: nothing can accept them.
"""

from __future__ import annotations

import heapq
import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tree.growth import Answer, Ask, Limits, StartsTrees, is_graft
from tree.select import rounded
from tree.tree import TokenTree


class Proposal(NamedTuple):
    """A candidate for the next layer."""

    parent: int  # node
    token: int
    lp: float  # of the edge
    score: float  # of the path, log-probability
    order: int  # position of the parent in the question
    rank: int  # among the parent's candidates that may become nodes, 0 is the best


class LayerPolicy(StartsTrees):
    """The rules of one policy. All are pure: they look at the growth and change nothing."""

    __slots__ = ()

    @property
    @abstractmethod
    def budget(self) -> int:
        """Verified nodes per step, root included."""

    @abstractmethod
    def wanted(self, growth: LayerGrowth) -> int:
        """Candidates that every parent of the next layer should give; 0 ends the growth."""

    @abstractmethod
    def admitted(self, growth: LayerGrowth, pool: Iterator[Proposal]) -> Iterable[Proposal]:
        """The proposals that become nodes, in `pool` order, which is best first."""

    def parents(self, growth: LayerGrowth, layer: Sequence[int]) -> Sequence[int]:
        """Those of the newest `layer`, best first, that are asked about next; all of them unless a policy says otherwise."""
        return layer

    def verified(self, growth: LayerGrowth) -> list[int]:
        """The final cut, see :meth:`tree.growth.Growth.verify_nodes`; the whole tree unless a policy says otherwise."""
        return list(range(len(growth.tree)))

    def start(self, root_token: int, limits: Limits) -> LayerGrowth:
        """A tree of only the root."""
        return LayerGrowth(self, TokenTree(root_token), limits)


class LayerGrowth:
    """A tree that grows by whole layers. Each ask is one layer; an answer without a usable candidate ends the growth."""

    def __init__(self, policy: LayerPolicy, tree: TokenTree, limits: Limits) -> None:
        self.tree = tree
        self.num_grafts = 0
        self.num_layers = 0  # attached so far
        self.ranks = [0]  # per node its rank among its parent's candidates; the root's means nothing
        self._policy = policy
        self._limits = limits
        self.frontier = self._open([0])  # the nodes whose children form the next layer

    def ask(self, drafter: str) -> Ask | None:
        """Candidates of every node of the frontier; None once the policy has had enough or every branch is closed."""
        if not self.frontier:
            return None
        width = min(self._policy.wanted(self), self._limits.vocab_size)
        return Ask(nodes=self.frontier, width=width) if width > 0 else None

    def attach(self, drafter: str, answer: Answer) -> None:
        """Create the admitted nodes and move the frontier to them."""
        layer: list[int] = []
        for proposal in self._policy.admitted(self, self._pool(answer)):
            self.num_grafts += is_graft(self.tree, proposal.parent, drafter)
            layer.append(self.tree.add(proposal.parent, proposal.token, proposal.lp, drafter))
            self.ranks.append(proposal.rank)
        self.num_layers += 1
        self.frontier = self._open(self._policy.parents(self, layer))

    def verify_nodes(self) -> list[int]:
        """The policy's final cut: ascending, root first, ancestor-closed."""
        return self._policy.verified(self)

    def rank_path(self, node: int) -> tuple[int, ...]:
        """Ranks from depth 1 down to `node`; empty for the root."""
        return tuple(self.ranks[above] for above in self.tree.path(node))

    def _pool(self, answer: Answer) -> Iterator[Proposal]:
        """Every usable candidate, best first; only those that are taken are computed."""
        streams = (self._usable(order, parent, answer) for order, parent in enumerate(self.frontier))
        return heapq.merge(*streams, key=lambda proposal: (-rounded(proposal.score), proposal.order, proposal.rank))

    def _usable(self, order: int, parent: int, answer: Answer) -> Iterator[Proposal]:
        """The candidates of one parent that may become nodes, best first."""
        candidates = answer.candidates.get(parent)
        if candidates is None:
            return
        above, rank = self.tree.score[parent], 0
        for token, lp in zip(candidates.tokens, candidates.lps, strict=True):
            if lp != -math.inf and self._limits.allows(token):
                yield Proposal(parent, token, lp, above + min(lp, 0.0), order, rank)
                rank += 1

    def _open(self, nodes: Iterable[int]) -> tuple[int, ...]:
        """Those of `nodes` that may get children."""
        return tuple(node for node in nodes if self._limits.is_open(self.tree, node))


def check_at_least(least: int, **values: int) -> None:
    """ValueError, naming the parameter, for a value below `least`."""
    for name, value in values.items():
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
