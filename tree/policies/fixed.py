"""Static trees: as many nodes per layer in every step, or always the same shape.

:class:`Fixed` is the K x D tree that TALON (2601.07353) calls static EAGLE: every parent of a layer proposes its K best
tokens, the K best of the layer by path score are kept and are the next parents. It is the expansion of
:mod:`tree.policies.eagle` without its rerank.

:class:`Template` is the tree of EAGLE-1 (2401.15077): a list of rank paths. The path (2, 0) is the best child (rank 0) of
the third-best child (rank 2) of the root. Only listed nodes are created, and only those with listed children are
expanded, so a template of depth D costs D drafter forwards with few rows.

Traps: ranks count the candidates that may become nodes, so a token that the target does not have leaves no gap. Where a
drafter has fewer candidates than a template has ranks, the missing nodes and everything below them are left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice

from tree.policies.layers import LayerGrowth, LayerPolicy, Proposal, check_at_least
from tree.select import verify_set

RankPath = tuple[int, ...]

DEFAULT_TEMPLATE: tuple[RankPath, ...] = tuple(
    tuple(int(rank) for rank in word)
    for word in "0 00 1 000 01 10 0000 2 001 010 100 00000 02 20 3 11 0001 0010 0100 1000 002 020 200 03".split()
)
"""Twenty-four nodes in five layers of 4, 7, 7, 5 and 1, the most valuable first. Ours: the nodes most likely accepted if a
node's best four children are accepted with 0.58, 0.22, 0.10 and 0.05. The released one has layers of 4, 8, 8, 3 and 2."""


@dataclass(frozen=True, slots=True)
class Fixed(LayerPolicy):
    """K nodes in each of D layers."""

    width: int = 10  # K: nodes per layer, and candidates of each
    depth: int = 6  # D: layers, each one drafter forward
    limit: int | None = None  # most verified nodes, root included; None: all ``1 + K * D``

    def __post_init__(self) -> None:
        check_at_least(1, width=self.width, limit=1 if self.limit is None else self.limit)
        check_at_least(0, depth=self.depth)

    @property
    def budget(self) -> int:
        """Verified nodes per step, root included."""
        size = 1 + self.width * self.depth
        return size if self.limit is None else min(size, self.limit)

    def with_budget(self, budget: int) -> Fixed:
        """The best nodes of the same tree; a larger budget than it has nodes changes nothing."""
        check_at_least(1, budget=budget)
        return replace(self, limit=budget)

    def wanted(self, growth: LayerGrowth) -> int:
        """K candidates for D layers, less where a small budget cannot take them."""
        return min(self.width, self.budget - 1) if growth.num_layers < min(self.depth, self.budget - 1) else 0

    def admitted(self, growth: LayerGrowth, pool: Iterator[Proposal]) -> Iterable[Proposal]:
        """The K best of the layer."""
        return islice(pool, min(self.width, self.budget - 1))

    def verified(self, growth: LayerGrowth) -> list[int]:
        """The whole tree, or its best nodes under a smaller budget."""
        return verify_set(growth.tree, self.budget)


@dataclass(frozen=True, slots=True)
class Template(LayerPolicy):
    """A tree of given rank paths, parents before children, the more valuable nodes earlier."""

    paths: tuple[RankPath, ...] = DEFAULT_TEMPLATE  # each a list of ranks from the root down; 0 is a node's best child

    def __post_init__(self) -> None:
        seen: set[RankPath] = {()}
        for path in self.paths:
            if path in seen or path[:-1] not in seen or min(path) < 0:
                raise ValueError(f"paths must be distinct ranks from 0, parents first; {path} is not in order")
            seen.add(path)

    @property
    def budget(self) -> int:
        """Verified nodes per step, root included."""
        return 1 + len(self.paths)

    def with_budget(self, budget: int) -> Template:
        """The first ``budget - 1`` paths; a larger budget than there are paths changes nothing."""
        check_at_least(1, budget=budget)
        return replace(self, paths=self.paths[: budget - 1])

    def wanted(self, growth: LayerGrowth) -> int:
        """As far down the ranks as any parent's children are listed."""
        ranks = _child_ranks(self.paths)
        return max((1 + max(ranks[growth.rank_path(node)], default=-1) for node in growth.frontier), default=0)

    def admitted(self, growth: LayerGrowth, pool: Iterator[Proposal]) -> Iterable[Proposal]:
        """The listed ones."""
        ranks = _child_ranks(self.paths)
        return (proposal for proposal in pool if proposal.rank in ranks[growth.rank_path(proposal.parent)])

    def parents(self, growth: LayerGrowth, layer: Sequence[int]) -> Sequence[int]:
        """Those with listed children."""
        ranks = _child_ranks(self.paths)
        return [node for node in layer if ranks[growth.rank_path(node)]]


@lru_cache(maxsize=64)
def _child_ranks(paths: tuple[RankPath, ...]) -> Mapping[RankPath, frozenset[int]]:
    """The ranks listed below every path of a template and below the root; empty for a leaf."""
    ranks: defaultdict[RankPath, set[int]] = defaultdict(set)
    for path in paths:
        ranks[path[:-1]].add(path[-1])
    return {path: frozenset(ranks[path]) for path in ((), *paths)}
