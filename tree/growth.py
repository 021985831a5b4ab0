"""How a tree grows: what a policy asks of a drafter and what the drafter answers.

A :class:`Policy` is a frozen set of parameters; :meth:`Policy.begin` opens a :class:`Growth`, the mutable state of one
tree in one decoding step. The engine alternates ``ask`` and ``attach`` with whichever drafter the schedule chose, until
``ask`` returns None, and then takes ``verify_nodes``. Policies know no drafter and drafters know no policy; they meet
in the three small records below.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from tree.tree import TokenTree

if TYPE_CHECKING:
    import torch

Uniform = Callable[[int, int], float]
"""(depth of the parent, index of the draw among all of that depth) -> a number in [0, 1) to draw with.

Independent numbers for different arguments, for different decoding steps, and of everything that verification uses.
"""


@dataclass(frozen=True, slots=True)
class Ask:
    """What a drafter should do next for one tree."""

    nodes: tuple[int, ...]  # nodes whose children are wanted, distinct, at least one
    width: int  # candidates per node, at least 1
    rescore: bool = False  # also give the drafter's own log-prob for every child of a node it has looked at
    wants_rows: bool = False  # also give the distribution that children of `nodes` will be drawn from

    def tops(self, tree: TokenTree) -> list[Ask]:
        """The question about the topmost nodes only, down to each depth in turn; last the whole question."""
        depths = sorted({tree.depth[node] for node in self.nodes})
        return [replace(self, nodes=tuple(v for v in self.nodes if tree.depth[v] <= deepest)) for deepest in depths]

    def within_one_forward(self, tree: TokenTree, num_forwards: Callable[[Ask], int]) -> Ask:
        """The largest of `tops` that takes a drafter one forward at most, by `num_forwards`; else the smallest."""
        first, *more = self.tops(tree)
        return next((one for one in reversed(more) if num_forwards(one) <= 1), first)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Proposed children of ONE node: lp descending, then token id ascending; tokens distinct. May be empty."""

    tokens: tuple[int, ...] = ()
    lps: tuple[float, ...] = ()  # one per token, <= 0, -inf legal (sorts last)
    # Per candidate the (token, lp) chain below it, possibly empty. Only drafters that find whole continuations fill it.
    suffixes: tuple[tuple[tuple[int, float], ...], ...] = ()
    terminal: bool = False  # the children of this node do not enter the next frontier


@dataclass(frozen=True, slots=True)
class Answer:
    """A drafter's reply to one :class:`Ask`."""

    candidates: dict[int, Candidates]  # by node; one that was asked about and is missing was not considered
    rescored: dict[int, float]  # node u -> the drafter's log-prob of token(u) at parent(u); only when Ask.rescore
    # By node asked, the drafter's distribution [vocab] of the next token, processed as the drafter samples (temperature
    # and so on), float32 or float64, on any device; only when Ask.wants_rows. The policy draws from it and the tree keeps
    # it, so nobody may write to it any more. A drafter without a distribution leaves it out, and nothing is drawn.
    rows: Mapping[int, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Limits:
    """What ends a branch in one decoding step, whatever the policy."""

    vocab_size: int  # only tokens below it enter a tree; a padded drafter may propose others, which are dropped
    stop_tokens: frozenset[int] = frozenset()  # kept, never expanded; the root is always expanded
    max_depth: int | None = None  # deepest node allowed; None: no cap

    def allows(self, token: int) -> bool:
        """True if `token` may become a node."""
        return 0 <= token < self.vocab_size

    def is_open(self, tree: TokenTree, node: int) -> bool:
        """True if `node` may get children."""
        if self.max_depth is not None and tree.depth[node] >= self.max_depth:
            return False
        return node == 0 or tree.token[node] not in self.stop_tokens


def is_graft(tree: TokenTree, parent: int, drafter: str) -> bool:
    """True if a child that `drafter` attaches under `parent` joins two drafters' work. The root belongs to none."""
    return parent != 0 and tree.creator[parent] != drafter


class Growth(Protocol):
    """One tree's growth in one decoding step."""

    tree: TokenTree
    num_grafts: int  # nodes attached by a drafter under a node created by another one

    def ask(self, drafter: str) -> Ask | None:
        """What the named drafter should do next; None when nothing is left to do (budget, steps, depth, empty pool)."""

    def attach(self, drafter: str, answer: Answer) -> None:
        """Put the answer to the last :meth:`ask` of `drafter` into the tree."""

    def verify_nodes(self) -> list[int]:
        """The final cut: nodes for the target, ascending, root first, ancestor-closed."""


class StartsTrees(ABC):
    """A policy whose trees begin with nothing but their root and their limits."""

    __slots__ = ()

    def begin(
        self,
        root_token: int,
        *,
        stop_tokens: frozenset[int] = frozenset(),
        max_depth: int | None = None,
        vocab_size: int,
    ) -> Growth:
        """Start a tree; see :class:`Policy`."""
        return self.start(root_token, Limits(vocab_size, stop_tokens, max_depth))

    @abstractmethod
    def start(self, root_token: int, limits: Limits) -> Growth:
        """A tree of only the root."""


class Policy(Protocol):
    """Frozen parameters of a way to grow trees."""

    @property
    def budget(self) -> int:
        """Verified nodes per step, root included; at least 1."""

    def begin(
        self,
        root_token: int,
        *,
        stop_tokens: frozenset[int] = frozenset(),
        max_depth: int | None = None,
        vocab_size: int,
    ) -> Growth:
        """Start a tree. Nodes whose token is in `stop_tokens` are kept but never expanded; `max_depth` caps node depth.

        `max_depth` None is no cap and 0 leaves only the root. `vocab_size` is the number of tokens a drafter may
        propose.
        """

    def with_budget(self, budget: int) -> Policy:
        """The same policy with another budget, root included."""
