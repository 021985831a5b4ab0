"""Recursive rejection: test one draw after another, each against what the refusals so far have left of p.

    accept x with probability min(1, p(x) / q(x)), else p <- norm((p - q)+) and the next draw is tested;
    after the last one p is sampled

Two rules, for two ways of drawing. With replacement (SpecInfer, 2305.09781) q stays what it is. Without replacement
(Sequoia, 2402.12374) a refused token is also taken out of q, because the next draw came from the rest; k = |V| draws then
always hold the emitted token. Exact since p_{i-1} = min(p_{i-1}, q_i) + (1 - r_i) p_i with the q_i in force at round i.

Traps:
    The draws must be tested in drawing order without replacement. With replacement any order that ignores the tokens will
    do; a random one is what 2602.16994 measures, and accepts as often.
    If q runs out, nothing more was drawn, and what is left of p is sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from tree.draws import TreeKind
from tree.tree import TokenTree
from verify.base import Noise, Rows, Verdict
from verify.ratio import EMPTY, Tests, excess, ratio, top_down


def solve(p: torch.Tensor, q: torch.Tensor, draws: Sequence[int], tests: Tests, *, shuffled: bool) -> int | torch.Tensor:
    """With replacement. One test per draw until one passes; `shuffled` uses a second number to pick each."""
    left = list(draws)
    while left:
        token = left.pop(tests.below(len(left)) if shuffled else 0)
        if tests.accept(ratio(p, q, token)):
            return token
        p, is_empty = _refused(p, q)
        if is_empty:
            break
    return p


def solve_distinct(p: torch.Tensor, q: torch.Tensor, draws: Sequence[int], tests: Tests) -> int | torch.Tensor:
    """Without replacement; one test per draw until one passes."""
    q = q.clone()
    for token in draws:
        if tests.accept(ratio(p, q, token)):
            return token
        p, is_empty = _refused(p, q)
        q[token] = 0.0
        mass = q.sum().item()
        if is_empty or mass <= 0.0:
            break
        q /= mass
    return p


def _refused(p: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """What a refusal leaves of p, and whether that is nothing but rounding."""
    left = excess(p, q)
    mass = left.sum().item()
    return (left, True) if mass < EMPTY else (left / mass, False)


@dataclass(frozen=True, slots=True)
class SpecInfer:
    """Recursive rejection of independent draws."""

    name: ClassVar[str] = "specinfer"
    lossless: ClassVar[bool] = True
    accepts: ClassVar[frozenset[TreeKind]] = frozenset({TreeKind.IID, TreeKind.DELAYED})
    needs_chain: ClassVar[bool] = False
    reads_logits: ClassVar[bool] = False

    shuffled: bool = False  # test in random order, as 2602.16994 does; else in drawing order

    def __call__(self, tree: TokenTree, nodes: Sequence[int], rows: Rows, noise: Noise) -> Verdict:
        """Decide from probabilities ``[len(nodes), vocab]`` and the tree's draws."""

        def one(p: torch.Tensor, q: torch.Tensor, draws: Sequence[int], tests: Tests) -> int | torch.Tensor:
            return solve(p, q, draws, tests, shuffled=self.shuffled)

        return top_down(self, tree, nodes, rows, noise, one)


@dataclass(frozen=True, slots=True)
class DistinctRejection:
    """Recursive rejection of draws without replacement."""

    name: ClassVar[str] = "specinfer-distinct"
    lossless: ClassVar[bool] = True
    accepts: ClassVar[frozenset[TreeKind]] = frozenset({TreeKind.WITHOUT_REPLACEMENT})
    needs_chain: ClassVar[bool] = False
    reads_logits: ClassVar[bool] = False

    def __call__(self, tree: TokenTree, nodes: Sequence[int], rows: Rows, noise: Noise) -> Verdict:
        """Decide from probabilities ``[len(nodes), vocab]`` and the tree's draws."""
        return top_down(self, tree, nodes, rows, noise, solve_distinct)
