"""Khisti: first choose one of the draws, then verify the chosen one alone.

Source: 2410.18234 (importance sampling of the input token, then classic verification). For two draws with laws a and b, a
rule w_ij in [0, 1] says with which probability i is chosen from the pair {i, j}; equal draws are kept. The chosen token
then has the law ::

    r(i) = a(i) b(i) + sum over j of P(i is chosen from {i, j}) m_ij,    m_ij = a(i) b(j) + b(i) a(j)

and the classic test of p against r is exact for *any* w. The best w maximizes sum min(p, r), a linear program. For k > 2 draws
the winner so far, with its law, meets the next draw, with law q.

A program over a whole vocabulary would have billions of variables. Tokens are ranked by p - a b, only pairs among the first
`size` are left to the program, and all others are decided for the better-ranked token, whose r then follows from tail sums.

Traps:
    The law r must be that of the rule that was really used. Where the solver fails all pairs are tossed with 1/2, and
    r = (a + b) / 2 goes with that, not a.
    The program has several optima. Results on another version of the solver may differ in the tokens, not in their law.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from tree.draws import TreeKind
from tree.tree import TokenTree
from verify.base import Noise, Verdict
from verify.ratio import Tests, excess, ratio, top_down

Floats = npt.NDArray[np.float64]

SIZE = 5
"""Tokens whose pairs the program decides; 2410.18234 finds little more to gain up to 15."""


@dataclass(frozen=True, slots=True, eq=False)
class Duel:
    """How one of two draws is chosen, and the law of the chosen one."""

    law: torch.Tensor  # r, [vocab] float64
    rank: torch.Tensor | None  # [vocab], 0 is the best; None: every pair is tossed
    weights: Floats  # [size, size], at (i, j) with i < j the probability that rank i is chosen from the pair

    def chance(self, first: int, second: int) -> float:
        """Probability that `first` is chosen from two different tokens."""
        if self.rank is None:
            return 0.5
        i, j = int(self.rank[first]), int(self.rank[second])
        better, worse = min(i, j), max(i, j)
        kept = float(self.weights[better, worse]) if worse < len(self.weights) else 1.0
        return kept if i == better else 1.0 - kept


def duel(p: torch.Tensor, a: torch.Tensor, b: torch.Tensor, size: int = SIZE) -> Duel:
    """The best duel for the target `p` between draws with the laws `a` and `b`; all float64 ``[vocab]``."""
    order = (p - a * b).argsort(descending=True, stable=True)
    top = order[:size]
    p_top, a_top, b_top = (row[top].cpu().numpy() for row in (p, a, b))
    # What lies behind each rank, summed from the end so that small tails are not lost in the difference to 1.
    a_tail, b_tail = (_after(row[order]) for row in (a, b))
    fixed = (a_top * b_top) + a_top * float(b_tail[len(top) - 1]) + b_top * float(a_tail[len(top) - 1])
    weights = _program(p_top, a_top, b_top, fixed)
    if weights is None:
        return Duel((a + b) / 2, None, np.zeros((0, 0)))
    meets = np.outer(a_top, b_top) + np.outer(b_top, a_top)
    law = torch.empty_like(p)
    law[order] = a[order] * b[order] + a[order] * b_tail + b[order] * a_tail
    chosen = weights + np.tril(1.0 - weights.T, -1)  # P(i is chosen from {i, j}), 0 on the diagonal
    law[top] = torch.from_numpy(fixed + (chosen * meets).sum(axis=1)).to(p.device)
    return Duel(law, order.argsort(), weights)


def _after(row: torch.Tensor) -> torch.Tensor:
    """At i the sum of ``row[i + 1:]``."""
    sums = row.flip(0).cumsum(0).flip(0)
    return torch.cat([sums[1:], sums.new_zeros(1)])


def _program(p: Floats, a: Floats, b: Floats, fixed: Floats) -> Floats | None:
    """Weights ``[size, size]``, above the diagonal, that maximize sum min(p, r); None if the solver fails.

    `fixed` ``[size]`` is what r has whatever the pairs among these tokens do.
    """
    # Here and not at the top: no other rule needs it, and without it the service starts faster.
    from scipy.optimize import linprog  # type: ignore[import-untyped]

    size = len(p)
    pairs = list(itertools.combinations(range(size), 2))
    if not pairs:
        return np.zeros((size, size))
    # Variables: one w per pair, then t_i <= min(p_i, r_i), of which the sum is maximized.
    flow = np.zeros((size, len(pairs)))  # r_i as a linear function of w
    least = fixed.copy()  # its constant part
    for column, (i, j) in enumerate(pairs):
        meet = a[i] * b[j] + b[i] * a[j]
        flow[i, column] += meet
        flow[j, column] -= meet
        least[j] += meet
    found = linprog(
        np.concatenate([np.zeros(len(pairs)), -np.ones(size)]),
        A_ub=np.hstack([-flow, np.eye(size)]),
        b_ub=least,
        bounds=[(0.0, 1.0)] * len(pairs) + [(0.0, float(most)) for most in p],
        method="highs",
    )
    if not found.success:
        return None
    weights = np.zeros((size, size))
    for column, (i, j) in enumerate(pairs):
        weights[i, j] = min(max(float(found.x[column]), 0.0), 1.0)
    return weights


def tournament(p: torch.Tensor, q: torch.Tensor, k: int, size: int = SIZE) -> list[Duel]:
    """The k - 1 duels of k draws from `q`: the winner so far against the next."""
    duels: list[Duel] = []
    law = q
    for _ in range(k - 1):
        duels.append(duel(p, law, q, size))
        law = duels[-1].law
    return duels


@dataclass(frozen=True, slots=True)
class Khisti:
    """Choose among the draws by a linear program, then verify the chosen one."""

    name: ClassVar[str] = "khisti"
    lossless: ClassVar[bool] = True
    accepts: ClassVar[frozenset[TreeKind]] = frozenset({TreeKind.IID, TreeKind.DELAYED})
    needs_chain: ClassVar[bool] = False
    reads_logits: ClassVar[bool] = False

    size: int = SIZE  # tokens whose pairs the program decides; the vocabulary's size or more: the full program

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size must be at least 1, got {self.size}")

    def solve(self, p: torch.Tensor, q: torch.Tensor, draws: Sequence[int], tests: Tests) -> int | torch.Tensor:
        """See :data:`verify.ratio.Solver`; one test per duel of different tokens, and one for the chosen token."""
        duels = tournament(p, q, len(draws), self.size)
        token = draws[0]
        for step, rival in zip(duels, draws[1:], strict=True):
            if rival != token and not tests.accept(step.chance(token, rival)):
                token = rival
        law = duels[-1].law if duels else q
        return token if tests.accept(ratio(p, law, token)) else excess(p, law)

    def __call__(self, tree: TokenTree, nodes: Sequence[int], rows: torch.Tensor, noise: Noise) -> Verdict:
        """Decide from probabilities ``[len(nodes), vocab]`` and the tree's draws."""
        return top_down(self, tree, nodes, rows, noise, self.solve)
