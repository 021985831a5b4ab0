"""Prune, then graft: retrieved tokens fill the slots that a confident drafter leaves free.

Source: 2605.20104 (Graft), of which we know the mechanism and not the details. A model drafts a tree by any policy of its
own; branches that have become improbable are pruned, which frees a part of the verification budget; then, once, a
retrieval drafter (prompt lookup) proposes continuations of what is left, and the best of them take the free slots. The
verified size stays within the budget of the model's tree alone. Unlike :mod:`tree.graft` it has no turns and no rescoring:
the model has spoken when retrieval begins.

Details of ours:
    Pruned is a node whose path probability is below `min_probability`. It is not expanded either, which saves drafter rows.
    Retrieval is asked about the best nodes that are left, the root among them, and its chains are grafted whole.
    The free slots go to the best retrieved nodes by path probability: the model's for the part of the path that it drafted,
    the retriever's own below. Slots that retrieval cannot fill stay empty; pruned nodes do not come back by themselves.

Traps:
    Pruning comes first and is final: no node that survived it gives way to a retrieved one, however probable.
    A retrieved token that is in the tree already is the same node. If it had been pruned it competes like any other
    retrieved node, with the model's score.
    The plan must end with the retriever's turn (a word such as ``MMMMS``), which also ends the model's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tree.draws import TreeKind
from tree.growth import Answer, Ask, Candidates, Growth, Limits, Policy, StartsTrees, is_graft
from tree.select import top
from tree.tree import TokenTree


@dataclass(frozen=True, slots=True)
class PruneGraft(StartsTrees):
    """A model's tree, pruned, with retrieved tokens in the free slots."""

    base: Policy  # how the model's tree grows; its budget is the whole budget
    min_probability: float = 0.03  # of a path; 0 prunes nothing, and only slots that the base left are filled
    frontier: int = 10  # nodes that retrieval is asked about
    width: int = 4  # candidates of each
    retriever: str = "ngram"  # name of the drafter that retrieves; every other drafter grows the base tree

    def __post_init__(self) -> None:
        for name in ("frontier", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0.0 <= self.min_probability <= 1.0:
            raise ValueError(f"min_probability must be between 0 and 1, got {self.min_probability}")

    @property
    def budget(self) -> int:
        """Verified nodes per step, root included."""
        return self.base.budget

    def with_budget(self, budget: int) -> PruneGraft:
        """The same with another budget of the base."""
        return replace(self, base=self.base.with_budget(budget))

    def start(self, root_token: int, limits: Limits) -> PruneGraftGrowth:
        """A tree of only the root. ValueError for a base that samples its tree."""
        base = self.base.begin(
            root_token, stop_tokens=limits.stop_tokens, max_depth=limits.max_depth, vocab_size=limits.vocab_size
        )
        if base.tree.kind is not TreeKind.DETERMINISTIC:
            raise ValueError("a sampled tree must not be pruned by score: verification would no longer be lossless")
        return PruneGraftGrowth(self, base, limits)


class PruneGraftGrowth:
    """A tree in two phases: the base policy's growth, then one retrieval into the same tree."""

    def __init__(self, policy: PruneGraft, base: Growth, limits: Limits) -> None:
        self.tree: TokenTree = base.tree
        self.num_grafts = 0
        self.kept: list[int] | None = None  # the pruned tree; None while the model drafts
        self.retrieved: list[int] = []  # nodes that fill free slots
        self._policy = policy
        self._base = base
        self._limits = limits
        floor = policy.min_probability
        self._floor = math.log(floor) if floor > 0.0 else -math.inf

    def ask(self, drafter: str) -> Ask | None:
        """The base's question without pruned nodes; the retriever's, if a slot is free, once."""
        if self.kept is not None:
            return None
        if drafter == self._policy.retriever:
            return self._ask_retriever()
        ask = self._base.ask(drafter)
        if ask is None:
            return None
        nodes = tuple(node for node in ask.nodes if self._survives(node))
        return replace(ask, nodes=nodes) if nodes else None

    def attach(self, drafter: str, answer: Answer) -> None:
        """Grow the base tree, or prune it and fill the free slots."""
        if drafter != self._policy.retriever:
            self._base.attach(drafter, answer)
            self.num_grafts = self._base.num_grafts
            return
        assert self.kept is None, "retrieval happens once"
        self.kept = self._pruned()
        found: set[int] = set()
        for node in self._frontier(self.kept):
            self._graft(node, answer.candidates.get(node), drafter, found)
        # Scores never grow downwards and depth breaks ties, so the best are closed under ancestors that were found.
        self.retrieved = top(self.tree, found.difference(self.kept), self._policy.budget - len(self.kept))

    def verify_nodes(self) -> list[int]:
        """What survived pruning and what was retrieved for it."""
        return sorted([*self._pruned(), *self.retrieved] if self.kept is None else [*self.kept, *self.retrieved])

    def _ask_retriever(self) -> Ask | None:
        kept = self._pruned()
        nodes = self._frontier(kept)
        if len(kept) >= self._policy.budget or not nodes:
            return None
        return Ask(nodes=tuple(nodes), width=min(self._policy.width, self._limits.vocab_size))

    def _graft(self, node: int, candidates: Candidates | None, drafter: str, found: set[int]) -> None:
        """Hang the candidates of `node` and their chains into the tree; what they run over joins `found`."""
        if candidates is None:
            return
        for i, head in enumerate(zip(candidates.tokens, candidates.lps, strict=True)):
            above = node
            for token, lp in (head, *(candidates.suffixes[i] if candidates.suffixes else ())):
                if not (self._limits.is_open(self.tree, above) and self._limits.allows(token)) or lp == -math.inf:
                    break
                child = self.tree.children[above].get(token)
                if child is None:
                    self.num_grafts += is_graft(self.tree, above, drafter)
                    child = self.tree.add(above, token, lp, drafter)
                elif self.tree.scorer[child] != drafter:
                    self.tree.record(child, lp, drafter)
                found.add(child)
                above = child

    def _survives(self, node: int) -> bool:
        return self.tree.score[node] >= self._floor

    def _pruned(self) -> list[int]:
        """The base's final cut without improbable nodes; still closed under ancestors, which are never less probable."""
        return [node for node in self._base.verify_nodes() if self._survives(node)]

    def _frontier(self, kept: Sequence[int]) -> list[int]:
        """The nodes that retrieval is asked about, best first."""
        return top(self.tree, [node for node in kept if self._limits.is_open(self.tree, node)], self._policy.frontier)
