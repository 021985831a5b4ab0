"""What a decision rule is: it walks a verified tree and says which nodes are accepted and what follows.

One step emits the accepted path plus exactly one extra token from the target, so even an empty tree makes progress.
A rule sees trees, target rows and random numbers only; it knows no model and no request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tree.draws import TreeKind
from tree.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one verification: ``len(path) + 1`` tokens are emitted."""

    path: tuple[int, ...]  # accepted nodes, root excluded, top down
    extra: int  # the one token the target adds after the path
    promoted: tuple[int, ...] = ()  # of the path: nodes that a lossless rule would have refused; none under lossless rules
    num_fallbacks: int = 0  # remainders that rounding left without mass, so that the target was sampled instead

    @property
    def promotions(self) -> int:
        """Tokens accepted against the target's choice."""
        return len(self.promoted)


class Noise(Protocol):
    """The random numbers of the output positions that one tree covers.

    Numbers of different depths, and the three kinds at one depth, are independent of each other and of all drafting
    randomness. They belong to the depth, not to a node: asking twice with one depth gives the same numbers.
    """

    def uniform(self, depth: int) -> float:
        """A number in [0, 1) for the output position at `depth`."""

    def exponentials(self, depth: int, size: int) -> torch.Tensor:
        """``[size]`` float32 standard exponentials (positive, finite) on the CPU, one per token."""

    def uniforms(self, depth: int, size: int) -> list[float]:
        """`size` independent numbers in [0, 1) for accept tests at `depth`; a longer list starts with the shorter one.

        Unlike the others, these belong to the decoding step: the next step has new ones, even for positions that this
        tree reached too. A rule that decides bottom-up refuses nodes below the text that it emits; if the next step
        decided by the same numbers, they would not be independent of the text before it.
        """


class Rows(Protocol):
    """The target's rows ``[nodes, vocab]``: a tensor, or anything that makes a row when it is asked for it."""

    @property
    def shape(self) -> torch.Size: ...
    @property
    def ndim(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    def __getitem__(self, index: int, /) -> torch.Tensor: ...


class Verifier(Protocol):
    """A decision rule."""

    @property
    def name(self) -> str:
        """The rule's name in :data:`verify.VERIFIERS`."""

    @property
    def lossless(self) -> bool:
        """True if the law of the emitted text is exactly the target's, for every kind of tree in `accepts`."""

    @property
    def accepts(self) -> frozenset[TreeKind]:
        """The kinds of trees that the rule is right for; :func:`verify.pairs.check_pair` says why not the others."""

    @property
    def needs_chain(self) -> bool:
        """True if the rule is defined on chains only: no node with two children."""

    @property
    def reads_logits(self) -> bool:
        """True for rules of temperature 0, whose rows are logits; the others read probabilities."""

    def __call__(self, tree: TokenTree, nodes: Sequence[int], rows: Rows, noise: Noise) -> Verdict:
        """Decide for the subset `nodes` of `tree` (ascending, root first, ancestor-closed).

        Args:
            rows: ``[len(nodes), vocab]`` target rows, row i at node ``nodes[i]``; logits for the greedy rule,
                probabilities (after temperature, top-k, top-p) for the others. Any device, any float type. Rules of logits
                need them as one tensor.
            noise: the random numbers of the output positions at the tree's depths.
        """
