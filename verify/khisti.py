"""Khisti: first choose one of the draws, then verify the chosen one alone.

Source: 2410.18234 (importance sampling of the input token, then classic verification). For two draws with laws a and b, a
rule w_ij in [0, 1] says with which probability i is chosen from the pair {i, j}; equal draws are kept. The chosen token
then has the law ::

    r(i) = a(i) b(i) + sum over j of P(i is chosen from {i, j}) m_ij,    m_ij = a(i) b(j) + b(i) a(j)

and the classic test of p against r is exact for *any* w. The best w maximizes sum min(p, r), a linear program. For k > 2 draws
the winner so far, with its law, meets the next draw, with law q.

A program over a whole vocabulary would have billions of variables. The first `RANKED` tokens by p - a b are ranked, only pairs
among the first `size` are left to the program, and all others with a ranked token are decided for the better-ranked one. Two
tokens without a rank are tossed with 1/2. The law of all these follows from tail sums. Where tossing every pair accepts more,
it is done; then r = (a + b) / 2.

The program is a flow: every pair hands its mass m_ij to i and j, and what a token has above p(i) is moved on to tokens that
miss some, along pairs that can be decided otherwise, until no such way is left. That is a maximum, and exact whatever it is.

Traps:
    The law r must be that of the rule that was really used, so it is computed from the weights.
    The program has several optima; which one is found does not matter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from tree.draws import TreeKind
from tree.tree import TokenTree
from verify.base import Noise, Rows, Verdict
from verify.ratio import Tests, excess, ratio, top_down

Floats = npt.NDArray[np.float64]

SIZE = 5
"""Tokens whose pairs the program decides; 2410.18234 finds little more to gain up to 15."""

RANKED = 64
"""Tokens with a rank; two others meet so rarely that it does not matter who wins, and ranking 49,000 tokens takes 5 ms."""

_ROUNDING = 1e-15  # of a mass


@dataclass(frozen=True, slots=True, eq=False)
class Duel:
    """How one of two draws is chosen, and the law of the chosen one."""

    law: torch.Tensor  # r, [vocab] float64
    rank: dict[int, int]  # token -> rank, 0 is the best; others have none
    weights: Floats  # [size, size], at (i, j) with i < j the probability that rank i is chosen from the pair

    def chance(self, first: int, second: int) -> float:
        """Probability that `first` is chosen from two different tokens."""
        last = len(self.rank)
        i, j = self.rank.get(first, last), self.rank.get(second, last)
        if i == j:
            return 0.5
        better, worse = min(i, j), max(i, j)
        kept = float(self.weights[better, worse]) if worse < len(self.weights) else 1.0
        return kept if i == better else 1.0 - kept


def duel(p: torch.Tensor, a: torch.Tensor, b: torch.Tensor, size: int = SIZE, ranked: int = RANKED) -> Duel:
    """The best duel for the target `p` between draws with the laws `a` and `b`; all float64 ``[vocab]``."""
    top = (p - a * b).topk(min(max(size, ranked), len(p))).indices
    p_top, a_top, b_top = (row[top].cpu().numpy() for row in (p, a, b))
    a_out, b_out = _outside(a, top), _outside(b, top)
    # What lies behind each rank, summed from the end so that small tails are not lost in the difference to 1.
    a_tail, b_tail = (np.append(row[::-1].cumsum()[::-1], 0.0)[1:] + out for row, out in ((a_top, a_out), (b_top, b_out)))
    size = min(size, len(top))
    law_top = a_top * b_top + a_top * b_tail + b_top * a_tail
    a_few, b_few = a_top[:size], b_top[:size]
    fixed = a_few * b_few + a_few * b_tail[size - 1] + b_few * a_tail[size - 1]
    meets = np.outer(a_few, b_few) + np.outer(b_few, a_few)
    weights = _flow(p_top[:size], meets, fixed)
    chosen = weights + np.tril(1.0 - weights.T, -1)  # P(i is chosen from {i, j}), 0 on the diagonal
    law_top[:size] = fixed + (chosen * meets).sum(axis=1)
    law = (a * b_out + b * a_out) / 2
    law[top] = torch.from_numpy(law_top).to(p.device)
    tossed = (a + b) / 2
    if torch.minimum(p, tossed).sum() > torch.minimum(p, law).sum():  # so it is if the drafter is nearly right
        return Duel(tossed, {}, np.zeros((0, 0)))
    return Duel(law, {token: rank for rank, token in enumerate(top.tolist())}, weights)


def _outside(row: torch.Tensor, tokens: torch.Tensor) -> float:
    """Mass of all other tokens."""
    return float(row.index_fill(0, tokens, 0.0).sum().item())


def _flow(p: Floats, meets: Floats, fixed: Floats) -> Floats:
    """Weights ``[size, size]``, above the diagonal, that maximize sum min(p, r).

    `meets` ``[size, size]`` is the mass of each pair, `fixed` ``[size]`` what r has whatever the pairs among these tokens do.
    Shortest ways first (Edmonds and Karp), so the number of ways is bounded by the number of pairs.
    """
    size = len(p)
    # Mass of the pair {i, j} that i has; at first the better-ranked one has it all.
    given: list[list[float]] = np.triu(meets, 1).tolist()
    over: list[float] = (fixed + np.triu(meets, 1).sum(axis=1) - p).tolist()
    while (way := _way(given, over)) is not None:
        pairs = list(zip(way, way[1:], strict=False))
        moved = min(over[way[0]], -over[way[-1]], *(given[i][j] for i, j in pairs))
        over[way[0]] -= moved
        over[way[-1]] += moved
        for i, j in pairs:
            given[i][j] -= moved
            given[j][i] += moved
    weights = np.zeros((size, size))
    for i in range(size):
        for j in range(i + 1, size):
            weights[i, j] = min(max(given[i][j] / meets[i, j], 0.0), 1.0) if meets[i, j] > 0.0 else 1.0
    return weights


def _way(given: Sequence[Sequence[float]], over: Sequence[float]) -> list[int] | None:
    """A shortest way from a token with too much to one with too little, along pairs that can still be decided otherwise."""
    came_from: dict[int, int | None] = {i: None for i, mass in enumerate(over) if mass > _ROUNDING}
    queue = deque(came_from)
    while queue:
        i = queue.popleft()
        if over[i] < -_ROUNDING:
            way = [i]
            while (before := came_from[way[-1]]) is not None:
                way.append(before)
            return way[::-1]
        for j, mass in enumerate(given[i]):
            if mass > _ROUNDING and j not in came_from:
                came_from[j] = i
                queue.append(j)
    return None


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

    def __call__(self, tree: TokenTree, nodes: Sequence[int], rows: Rows, noise: Noise) -> Verdict:
        """Decide from probabilities ``[len(nodes), vocab]`` and the tree's draws."""
        return top_down(self, tree, nodes, rows, noise, self.solve)
