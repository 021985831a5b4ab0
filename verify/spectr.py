"""SpecTr's K-SEQ: test all draws in turn at a ratio that is lowered just enough to leave a proper remainder.

Source: 2310.15141. With k draws and rho in [1, k]::

    beta(rho) = sum min(p / rho, q)          accepting one draw
    pacc(rho) = 1 - (1 - beta)^k             accepting any of them
    accept X_i with probability min(1, p(X_i) / (rho q(X_i))), else draw from norm((p - min(p / rho, q) pacc / beta)+)

The remainder is not negative, and the rule exact, if and only if pacc <= rho beta. The smallest such rho accepts most.

Traps:
    Bisection must err upward: any rho from the best one to k is exact, none below it is.
    pacc / beta tends to k where p and q have nothing in common; the minimum it multiplies is 0 then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from tree.draws import TreeKind
from tree.tree import TokenTree
from verify.base import Noise, Rows, Verdict
from verify.ratio import Tests, ratio, top_down

_HALVINGS = 60  # of [1, k]: down to the last bits of a float64


@dataclass(frozen=True, slots=True)
class Division:
    """The divisor rho and what it implies for k draws."""

    rho: float
    beta: float  # probability of accepting one draw
    pacc: float  # probability of accepting any


def accept_any(beta: float, k: int) -> float:
    """1 - (1 - beta)^k without cancellation for small beta."""
    return 1.0 if beta >= 1.0 else -math.expm1(k * math.log1p(-beta))


def best_division(p: torch.Tensor, q: torch.Tensor, k: int) -> Division:
    """The smallest rho in [1, k], up to the last bits and never below it, with pacc(rho) <= rho beta(rho).

    `p` and `q` are float64 distributions ``[vocab]``. Only tokens with q < p < k q make beta more than a sum of two
    terms, so the bisection looks at them alone.
    """
    bends = (p > q) & (p < k * q)
    p_bent, q_bent = p[bends], q[bends]
    low = p[p <= q].sum().item()  # counts as p / rho for every rho
    high = q[(p > q) & (p >= k * q)].sum().item()  # counts as q

    def divided(rho: float) -> Division:
        bent = torch.minimum(p_bent / rho, q_bent).sum().item()
        beta = min(low / rho + high + bent, 1.0)
        return Division(rho, beta, accept_any(beta, k))

    if k == 1:
        return divided(1.0)
    below, best = 1.0, divided(float(k))
    for _ in range(_HALVINGS):
        middle = divided((below + best.rho) / 2)
        if middle.pacc <= middle.rho * middle.beta:
            best = middle
        else:
            below = middle.rho
    return best


def remainder(p: torch.Tensor, q: torch.Tensor, division: Division, k: int) -> torch.Tensor:
    """The weights ``[vocab]`` to draw from after k refusals."""
    share = division.pacc / division.beta if division.beta > 0.0 else float(k)
    return (p - torch.minimum(p / division.rho, q) * share).clamp_(min=0.0)


def solve(p: torch.Tensor, q: torch.Tensor, draws: Sequence[int], tests: Tests) -> int | torch.Tensor:
    """See :data:`verify.ratio.Solver`; one test per draw until one passes."""
    division = best_division(p, q, len(draws))
    for token in draws:
        if tests.accept(ratio(p, q, token) / division.rho):
            return token
    return remainder(p, q, division, len(draws))


@dataclass(frozen=True, slots=True)
class SpecTr:
    """Accept the first draw that passes the lowered ratio."""

    name: ClassVar[str] = "spectr"
    lossless: ClassVar[bool] = True
    accepts: ClassVar[frozenset[TreeKind]] = frozenset({TreeKind.IID, TreeKind.DELAYED})
    needs_chain: ClassVar[bool] = False
    reads_logits: ClassVar[bool] = False

    def __call__(self, tree: TokenTree, nodes: Sequence[int], rows: Rows, noise: Noise) -> Verdict:
        """Decide from probabilities ``[len(nodes), vocab]`` and the tree's draws."""
        return top_down(self, tree, nodes, rows, noise, solve)
