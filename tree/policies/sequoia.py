"""Sequoia: the static tree that is best if acceptance depends on a candidate's rank alone, found by dynamic programming.

Source: 2402.12374. Let p_k be the probability that a node's child of rank k is accepted, given that the node is; it is
measured offline for a drafter, a target and a verifier. A tree then emits F = sum over its nodes, the root counting 1, of
the product of p along the path. With n nodes in at most L levels (root included in both), y nodes going to the child of
rank k, ::

    F(n, L)    = 1 + G(1, n - 1, L - 1)
    G(k, m, L) = max over y in 1..m of  p_k F(y, L) + G(k + 1, m - y, L),   G(k, 0, L) = 0

and the arg-max rebuilds the tree. The plan is made once per (p, n, L) and replayed as a template of rank paths
(:class:`tree.policies.fixed.Template`): which tokens fill it is the drafter's business in every step.

Traps:
    Acceptances of siblings exclude each other, so the p_k sum to at most 1. Ranks start at 0 in code, at 1 above.
    F of exactly n nodes may not exist (more nodes than the ranks can hold) or be no better than that of fewer nodes, where
    the rest has p_k = 0. The plan is then the smaller tree: rows of the target's forward are not free.
    The paper drafts by sampling without replacement. Here children are the drafter's best tokens, which is lossless with
    the target-sampling walk only; p must be measured with that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tree.growth import Limits, StartsTrees
from tree.policies.fixed import RankPath, Template
from tree.policies.layers import LayerGrowth, check_at_least

GUESSED_ACCEPTANCE = (0.6, 0.15, 0.07, 0.04, 0.03, 0.02, 0.015, 0.01)
"""A guess for a drafter of the target's own family, to start from until its own ranks have been counted."""

_NOTHING_WON = 1e-12
"""F that differs by less is equal."""


@dataclass(frozen=True, slots=True)
class Sequoia(StartsTrees):
    """The best static tree for an acceptance-by-rank vector."""

    acceptance: tuple[float, ...] = GUESSED_ACCEPTANCE  # p by rank, best candidate first
    size: int = 60  # most nodes, root included
    depth: int = 10  # of the deepest node, i.e. most drafter forwards; L - 1

    def __post_init__(self) -> None:
        check_at_least(1, size=self.size)
        check_at_least(0, depth=self.depth)
        if not all(0.0 <= p <= 1.0 for p in self.acceptance) or math.fsum(self.acceptance) > 1.0 + 1e-9:
            raise ValueError(f"acceptance must be probabilities that sum to at most 1, got {self.acceptance}")

    @property
    def budget(self) -> int:
        """Verified nodes per step, root included; below `size` if more nodes would win nothing."""
        return 1 + len(self.paths)

    @property
    def paths(self) -> tuple[RankPath, ...]:
        """The plan: rank paths, parents first, the more valuable nodes earlier."""
        return _plan(self.acceptance, self.size, self.depth)

    def with_budget(self, budget: int) -> Sequoia:
        """The plan for another number of nodes, root included; not a part of this one."""
        return replace(self, size=budget)

    def start(self, root_token: int, limits: Limits) -> LayerGrowth:
        """A tree of only the root, that follows the plan's template."""
        return Template(self.paths).start(root_token, limits)


def expected_tokens(acceptance: tuple[float, ...], paths: Iterable[RankPath]) -> float:
    """F: tokens emitted per step by the tree of `paths`, the one that the target adds included."""
    return 1.0 + math.fsum(_value(acceptance, path) for path in paths)


def fastest(acceptance: tuple[float, ...], *, draft_s: float, verify_s: Mapping[int, float], max_depth: int = 10) -> Sequoia:
    """The plan with the least time per emitted token on one machine: the paper's hardware-aware choice of n and L.

    Args:
        acceptance: p by rank.
        draft_s: seconds of one drafter forward; a tree of depth D costs D of them.
        verify_s: measured seconds of verification by number of nodes, root included. Only these sizes are considered; with
            size 1 among them, plain decoding is.
        max_depth: the deepest tree considered.

    Raises ValueError for an empty `verify_s` or a size below 1.
    """
    if not verify_s:
        raise ValueError("verify_s must hold at least one measured size")
    check_at_least(1, size=min(verify_s))

    def time_per_token(plan: Sequoia) -> float:
        depth = max(map(len, plan.paths), default=0)
        return (depth * draft_s + verify_s[plan.size]) / expected_tokens(acceptance, plan.paths)

    plans = [Sequoia(acceptance, size, depth) for size in sorted(verify_s) for depth in range(max_depth + 1)]
    return min(plans, key=time_per_token)


def _value(acceptance: tuple[float, ...], path: RankPath) -> float:
    """The probability that the node at `path` is accepted."""
    return math.prod(acceptance[rank] for rank in path)


@lru_cache(maxsize=256)
def _plan(acceptance: tuple[float, ...], size: int, depth: int) -> tuple[RankPath, ...]:
    """The best tree of at most `size` nodes and `depth` levels below the root, as sorted rank paths."""
    levels = min(depth + 1, size)
    # Requests come with budgets of their own; tables for powers of two serve all of them.
    best, choice = _table(acceptance, 1 << (size - 1).bit_length(), levels)
    values = best[levels, 1 : size + 1]
    num_nodes = 1 + int(np.argmax(values >= values.max() - _NOTHING_WON))
    paths: list[RankPath] = []
    trees: list[tuple[RankPath, int, int]] = [((), num_nodes, levels)]  # root of a subtree, its nodes, its levels
    while trees:
        path, nodes, height = trees.pop()
        left, rank = nodes - 1, 0
        while left:
            share = int(choice[height - 1, rank, left])
            paths.append((*path, rank))
            trees.append(((*path, rank), share, height - 1))
            left, rank = left - share, rank + 1
    return tuple(sorted(paths, key=lambda path: (-_value(acceptance, path), len(path), path)))


@lru_cache(maxsize=8)
def _table(acceptance: tuple[float, ...], num_nodes: int, num_levels: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """F by ``[level, nodes]`` and the y that attains G by ``[level, rank, nodes below]``; index 0 of levels and F is unused.

    Impossible trees have F = -inf.
    """
    num_ranks = len(acceptance)
    best = np.full((num_levels + 1, num_nodes + 1), -np.inf)
    choice = np.zeros((num_levels + 1, num_ranks, num_nodes), dtype=np.int64)
    best[1:, 1] = 1.0
    for level in range(1, num_levels):
        rest = np.full(num_nodes, -np.inf)  # G of the ranks after the current one, by nodes
        rest[0] = 0.0
        for rank in reversed(range(num_ranks)):
            child = np.full(num_nodes, -np.inf)
            possible = np.isfinite(best[level, :num_nodes])
            child[possible] = acceptance[rank] * best[level, :num_nodes][possible]
            with_rank = rest.copy()
            for m in range(1, num_nodes):
                total = child[1 : m + 1] + rest[m - 1 :: -1]
                y = int(np.argmax(total))
                with_rank[m], choice[level, rank, m] = total[y], y + 1
            rest = with_rank
        best[level + 1, 2:] = 1.0 + rest[1:]
    return best, choice
