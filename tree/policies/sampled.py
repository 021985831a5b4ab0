"""Trees whose children are drawn from the drafter, for verification that weighs the target's p against the drafter's q.

Three shapes:

* :class:`Iid`: K independent paths from the root; paths that coincide share nodes (SpecInfer, 2305.09781).
* :class:`Delayed`: a trunk of L1 tokens, then K independent paths of L2 tokens (2602.16994). Drafters are nearly right
  close to the root, so branching pays further down.
* :class:`WithoutReplacement`: every node draws distinct children, as many as its depth says (Sequoia, 2402.12374).

The drafter gives rows, the policy draws: what a tree looks like is a function of rows and of the numbers that
:data:`tree.growth.Uniform` returns, so a seed reproduces it.

Traps:
    Nothing about a shape may depend on tokens of the layer that is being drawn. A node that may not be expanded (stop
    token, depth) draws nothing; that depends on earlier layers only. Tokens outside the vocabulary leave q beforehand.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from tree.draws import TreeKind, draw, draw_distinct, record_draws, usable_row
from tree.growth import Answer, Ask, Limits, Uniform, is_graft
from tree.policies.layers import check_at_least
from tree.tree import TokenTree


class SampledGrowth(ABC):
    """A tree that grows by drawing at every node of a frontier; each ask is one layer."""

    def __init__(self, kind: TreeKind, root_token: int, limits: Limits, uniform: Uniform) -> None:
        self.tree = TokenTree(root_token, kind)
        self.num_grafts = 0
        self._limits = limits
        self._uniform = uniform
        self._num_drawn: Counter[int] = Counter()  # numbers used, by depth

    def ask(self, drafter: str) -> Ask | None:
        """The rows of the frontier; None if it is empty."""
        nodes = tuple(self._frontier())
        return Ask(nodes, width=1, wants_rows=True) if nodes else None

    def attach(self, drafter: str, answer: Answer) -> None:
        """Draw at every node of the frontier that has a row; a branch without one ends."""
        drawn: dict[int, list[int]] = {}
        for node in self._frontier():
            row = usable_row(answer.rows.get(node), self._limits.vocab_size)
            if row is not None:
                size = len(self.tree)
                drawn[node] = self._draw_at(node, row, drafter)
                self.num_grafts += (len(self.tree) - size) * is_graft(self.tree, node, drafter)
        self._move_on(drawn)

    def verify_nodes(self) -> list[int]:
        """The whole tree: a drawn node must not be left out for what it is."""
        return list(range(len(self.tree)))

    @abstractmethod
    def _frontier(self) -> Sequence[int]:
        """Distinct nodes to draw at next."""

    @abstractmethod
    def _draw_at(self, node: int, row: torch.Tensor, drafter: str) -> list[int]:
        """Give `node` its children, drawn from `row` ``[vocab]``; return those that go on, one per draw."""

    @abstractmethod
    def _move_on(self, drawn: dict[int, list[int]]) -> None:
        """Set the next frontier, from the children by parent."""

    def _numbers(self, node: int, count: int) -> list[float]:
        """`count` fresh numbers for draws at `node`."""
        depth = self.tree.depth[node]
        first = self._num_drawn[depth]
        self._num_drawn[depth] += count
        return [self._uniform(depth, index) for index in range(first, first + count)]

    def _open(self, nodes: Sequence[int]) -> list[int]:
        return [node for node in nodes if self._limits.is_open(self.tree, node)]


class SampledPolicy(ABC):
    """Frozen parameters of a sampled shape; a :class:`tree.growth.Policy` whose `begin` needs random numbers too."""

    __slots__ = ()

    kind: ClassVar[TreeKind]

    @abstractmethod
    def start(self, root_token: int, limits: Limits, uniform: Uniform) -> SampledGrowth:
        """A tree of only the root."""

    def begin(
        self,
        root_token: int,
        *,
        stop_tokens: frozenset[int] = frozenset(),
        max_depth: int | None = None,
        vocab_size: int,
        uniform: Uniform | None = None,
    ) -> SampledGrowth:
        """Start a tree; see :class:`tree.growth.Policy`. Raise ValueError without `uniform`."""
        if uniform is None:
            raise ValueError("a sampled tree needs random numbers to draw with: begin(..., uniform=...)")
        return self.start(root_token, Limits(vocab_size, stop_tokens, max_depth), uniform)


@dataclass(frozen=True, slots=True)
class Delayed(SampledPolicy):
    """A trunk, then independent paths: (K, L1, L2) = (num_paths, trunk, branch). Drafter forwards: L1 + L2."""

    kind: ClassVar[TreeKind] = TreeKind.DELAYED

    num_paths: int = 3  # K
    trunk: int = 2  # L1, tokens before the paths part
    branch: int = 3  # L2, tokens of each path after that

    def __post_init__(self) -> None:
        check_at_least(1, num_paths=self.num_paths)
        check_at_least(0, trunk=self.trunk, branch=self.branch)

    @property
    def budget(self) -> int:
        """Most verified nodes per step, root included; paths that coincide leave fewer."""
        return 1 + self.trunk + self.num_paths * self.branch

    def canonical(self) -> Delayed:
        """The one name of this shape: without branches all K draw the same chain, and one path is all trunk."""
        if self.num_paths == 1 or self.branch == 0:
            return Delayed(1, self.trunk + self.branch, 0)
        return self

    def with_budget(self, budget: int) -> Delayed:
        """The same shape cut to `budget` nodes, shorter branches first; more than needed changes nothing."""
        check_at_least(1, budget=budget)
        trunk = min(self.trunk, budget - 1)
        return replace(self, trunk=trunk, branch=min(self.branch, (budget - 1 - trunk) // self.num_paths))

    def start(self, root_token: int, limits: Limits, uniform: Uniform) -> PathGrowth:
        """Only the root yet."""
        return PathGrowth(self, self.kind, root_token, limits, uniform)


@dataclass(frozen=True, slots=True)
class Iid(SampledPolicy):
    """K independent paths from the root: (num_paths, 0, length) of :class:`Delayed`."""

    kind: ClassVar[TreeKind] = TreeKind.IID

    num_paths: int = 4  # K
    length: int = 4  # tokens of a path, each one drafter forward

    def __post_init__(self) -> None:
        check_at_least(1, num_paths=self.num_paths)
        check_at_least(0, length=self.length)

    @property
    def budget(self) -> int:
        """Most verified nodes per step, root included."""
        return 1 + self.num_paths * self.length

    def with_budget(self, budget: int) -> Iid:
        """Shorter paths, and fewer if not even one layer fits; more than needed changes nothing."""
        check_at_least(1, budget=budget)
        num_paths = max(1, min(self.num_paths, budget - 1))
        return replace(self, num_paths=num_paths, length=min(self.length, (budget - 1) // num_paths))

    def start(self, root_token: int, limits: Limits, uniform: Uniform) -> PathGrowth:
        """Only the root yet."""
        return PathGrowth(Delayed(self.num_paths, 0, self.length), self.kind, root_token, limits, uniform)


class PathGrowth(SampledGrowth):
    """Paths under construction. Paths with the same head are exchangeable, so only their number is kept."""

    def __init__(self, shape: Delayed, kind: TreeKind, root_token: int, limits: Limits, uniform: Uniform) -> None:
        super().__init__(kind, root_token, limits, uniform)
        self._shape = shape.canonical()
        self._num_layers = 0
        self._heads: dict[int, int] = {}  # node -> paths that end there
        self._set_heads({0: 1})

    def _frontier(self) -> Sequence[int]:
        return list(self._heads)

    def _draw_at(self, node: int, row: torch.Tensor, drafter: str) -> list[int]:
        tokens = draw(row, self._numbers(node, self._heads[node]))
        return record_draws(self.tree, node, tokens, row, drafter)

    def _move_on(self, drawn: dict[int, list[int]]) -> None:
        self._num_layers += 1
        self._set_heads(Counter(itertools.chain.from_iterable(drawn.values())))

    def _set_heads(self, heads: dict[int, int]) -> None:
        shape, done = self._shape, self._num_layers
        copies = shape.num_paths if done == shape.trunk else 1  # where the trunk ends, its one path becomes K
        is_over = done >= shape.trunk + shape.branch
        self._heads = {} if is_over else {node: heads[node] * copies for node in self._open(list(heads))}


@dataclass(frozen=True, slots=True)
class WithoutReplacement(SampledPolicy):
    """A full tree: every node at depth d draws ``widths[d]`` distinct children (fewer if q has fewer tokens)."""

    kind: ClassVar[TreeKind] = TreeKind.WITHOUT_REPLACEMENT

    widths: tuple[int, ...] = (3, 2, 1)  # by depth; each depth is one drafter forward

    def __post_init__(self) -> None:
        check_at_least(1, **{f"widths[{depth}]": width for depth, width in enumerate(self.widths)})

    @property
    def budget(self) -> int:
        """Most verified nodes per step, root included."""
        return 1 + sum(itertools.accumulate(self.widths, lambda nodes, width: nodes * width))

    def with_budget(self, budget: int) -> WithoutReplacement:
        """The first layers that fit, the last of them narrower if need be; more than needed changes nothing."""
        check_at_least(1, budget=budget)
        widths: list[int] = []
        layer, left = 1, budget - 1
        for width in self.widths:
            width = min(width, left // layer)
            if width == 0:
                break
            widths.append(width)
            layer *= width
            left -= layer
        return replace(self, widths=tuple(widths))

    def start(self, root_token: int, limits: Limits, uniform: Uniform) -> DistinctGrowth:
        """Only the root yet."""
        return DistinctGrowth(self, root_token, limits, uniform)


class DistinctGrowth(SampledGrowth):
    """A tree of distinct siblings under construction."""

    def __init__(self, policy: WithoutReplacement, root_token: int, limits: Limits, uniform: Uniform) -> None:
        super().__init__(TreeKind.WITHOUT_REPLACEMENT, root_token, limits, uniform)
        self._widths = policy.widths
        self._layer = self._open([0])

    def _frontier(self) -> Sequence[int]:
        return [node for node in self._layer if self.tree.depth[node] < len(self._widths)]

    def _draw_at(self, node: int, row: torch.Tensor, drafter: str) -> list[int]:
        tokens = draw_distinct(row, self._numbers(node, self._widths[self.tree.depth[node]]))
        return record_draws(self.tree, node, tokens, row, drafter)

    def _move_on(self, drawn: dict[int, list[int]]) -> None:
        self._layer = self._open(list(itertools.chain.from_iterable(drawn.values())))
