"""Chosen siblings plus one sampled child: a tree by rank that is not blind above temperature 0.

At every expanded node the best ``width - 1`` tokens of q become children without any randomness, and one more is drawn
from what they leave of q, r = norm(q without them) (RheoSampling, 2609.21827). Verification weighs p against r for the
sampled child and takes the others when the target draws them (:mod:`verify.naive`). The acceptance probability of a node
is p(A) + sum of min(p, r) outside A, the most that any rule can reach with these candidates.

Trap: the tree is cut by score, and whether a sampled child survives must not depend on which token was drawn. So it is
ranked by a number that is the same for all of them, min(max q, mass of r's tokens in q), and that number is what its ``lp``
holds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from tree.draws import TreeKind, best_tokens, draw, record_draws, without
from tree.growth import Limits, Uniform
from tree.policies.layers import check_at_least
from tree.policies.sampled import SampledGrowth, SampledPolicy
from tree.select import top, verify_set


@dataclass(frozen=True, slots=True)
class OneSampled(SampledPolicy):
    """The best children by rank and one sampled child per expanded node; cut to the budget by score."""

    kind: ClassVar[TreeKind] = TreeKind.ONE_SAMPLED

    width: int = 3  # children per expanded node, the sampled one included
    frontier: int = 4  # nodes expanded per layer
    depth: int = 4  # layers, i.e. drafter forwards
    budget: int = 24  # verified nodes, root included

    def __post_init__(self) -> None:
        check_at_least(1, width=self.width, frontier=self.frontier, budget=self.budget)
        check_at_least(0, depth=self.depth)

    def with_budget(self, budget: int) -> OneSampled:
        """The same growth, cut to another budget."""
        return replace(self, budget=budget)

    def start(self, root_token: int, limits: Limits, uniform: Uniform) -> RankedGrowth:
        """Only the root yet."""
        return RankedGrowth(self, root_token, limits, uniform)


class RankedGrowth(SampledGrowth):
    """A tree with one sampled child per expanded node under construction."""

    def __init__(self, policy: OneSampled, root_token: int, limits: Limits, uniform: Uniform) -> None:
        super().__init__(policy.kind, root_token, limits, uniform)
        self._policy = policy
        self._expanded = self._open([0]) if policy.budget > 1 and policy.depth > 0 else []

    def _frontier(self) -> Sequence[int]:
        return self._expanded

    def _draw_at(self, node: int, row: torch.Tensor, drafter: str) -> list[int]:
        total = row.double().sum().item()
        chosen = best_tokens(row, self._policy.width - 1)
        rest = without(row, chosen)
        children = [
            self.tree.add(node, token, math.log(weight / total), drafter)
            for token, weight in zip(chosen, row[chosen].double().tolist(), strict=True)
        ]
        tail = rest.double().sum().item()
        if tail > 0.0:
            # The score of the sampled child must not tell which token it is: min(best q, what A leaves).
            proxy = math.log(min(row.max().item(), tail) / total)
            (token,) = draw(rest, self._numbers(node, 1))
            children.append(self.tree.add(node, token, proxy, drafter))
            record_draws(self.tree, node, [token], rest, drafter)
        return children

    def _move_on(self, drawn: dict[int, list[int]]) -> None:
        new = [
            node
            for node in self._open(list(itertools.chain.from_iterable(drawn.values())))
            if self.tree.depth[node] < self._policy.depth
        ]
        self._expanded = top(self.tree, new, self._policy.frontier)

    def verify_nodes(self) -> list[int]:
        """The best nodes by score; a sampled child among them or not, whatever its token."""
        return verify_set(self.tree, self._policy.budget)
