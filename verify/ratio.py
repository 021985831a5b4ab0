"""What the rules that weigh the target's p against the drafter's q share: rows, accept tests, the walk from the root.

At a node whose children were drawn from q, a *solver* gets (p, q, the draws) and names a token such that, over the drawing
and its own decisions, the token has the law p. Every walk that emits the named token and goes on where it is a child
writes text of the target's law, whatever the lengths of the lists (SpecInfer, 2305.09781; the common form is that of
2602.16994). A leaf has no draws, and its token is drawn from p.

A solver decides by accept tests and returns a token, or the weights of what remains of p after its refusals, from which
the token is then drawn by the same race as in :mod:`verify.walk`. So a node without draws gives exactly the token that
plain decoding would give.

Traps:
    Rows are float32 and sum to 1 only roughly; both are normalized in float64, or p = q would leave a remainder.
    If p equals q up to rounding, a refusal can leave nothing. Then p is sampled, and the event is counted.
    A test at a node uses numbers of that depth in their order; :class:`Tests` hands them out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from tree.draws import TreeKind
from tree.tree import TokenTree
from verify.base import Noise, Rows, Verdict, Verifier
from verify.pairs import check_pair
from verify.walk import descend, exponentials_at, race

EMPTY = 1e-12
"""A remainder of less mass than this is rounding."""


class Tests:
    """The accept tests at one depth; each uses up one number of the noise."""

    __test__ = False  # the name means nothing to a test runner

    def __init__(self, noise: Noise, depth: int) -> None:
        self._noise = noise
        self._depth = depth
        self._numbers: list[float] = []
        self._used = 0

    def accept(self, probability: float) -> bool:
        """True with `probability`; 0 and 1 are certain."""
        return self._next() < probability

    def below(self, count: int) -> int:
        """One of ``range(count)``, all equally likely."""
        return int(self._next() * count)

    def _next(self) -> float:
        if self._used == len(self._numbers):
            self._numbers = self._noise.uniforms(self._depth, 2 * self._used + 2)
        self._used += 1
        return self._numbers[self._used - 1]


Solver = Callable[[torch.Tensor, torch.Tensor, Sequence[int], Tests], "int | torch.Tensor"]
"""(p ``[vocab]``, q ``[vocab]``, draws, tests) -> a token, or remaining weights ``[vocab]`` to draw one from.

Rows are float64 and normalized; there is at least one draw, and q is positive at every draw.
"""


def mass_of(row: torch.Tensor) -> float:
    """Sum of a float64 row ``[vocab]``. AssertionError for a row without mass or with NaN."""
    mass: float = row.sum().item()
    assert 0 < mass < math.inf, f"a row has no probability mass: it sums to {mass}"
    return mass


def normalized(row: torch.Tensor) -> torch.Tensor:
    """`row` ``[vocab]`` as a float64 distribution. AssertionError for a row without mass or with NaN."""
    p = row.double()
    return p / mass_of(p)


def proposal(tree: TokenTree, node: int, p: torch.Tensor) -> torch.Tensor:
    """The row that the draws at `node` came from, as a float64 distribution of the shape and on the device of `p`."""
    return normalized(drawn_from(tree, node, p))


def drawn_from(tree: TokenTree, node: int, p: torch.Tensor) -> torch.Tensor:
    """The same as the tree keeps it, not normalized and perhaps not a copy."""
    q = tree.proposals[node].to(p.device, torch.float64)
    if len(q) < len(p):
        return torch.nn.functional.pad(q, (0, len(p) - len(q)))
    assert not q[len(p) :].any().item(), f"q has mass on tokens that the target's {len(p)} do not include"
    return q[: len(p)]


def ratio(p: torch.Tensor, q: torch.Tensor, token: int) -> float:
    """p over q at a drawn token, which q cannot exclude."""
    weight = q[token].item()
    assert weight > 0, f"token {token} was drawn, but q gives it no probability"
    return p[token].item() / weight


def excess(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """(p - q)+, ``[vocab]``: where p has more than q."""
    return (p - q).clamp_(min=0.0)


def check_call(verifier: Verifier, tree: TokenTree, nodes: Sequence[int], rows: Rows) -> dict[int, int]:
    """Check what every ratio rule needs; return the row number of each verified node.

    Raise ValueError for a tree the rule is wrong on, AssertionError for rows that do not match, or if a drawn child was
    cut off: what is left of the draws would be no sample of q. Only a tree with one sampled child per node may lose it,
    since its draw is remembered.
    """
    assert rows.ndim == 2 and rows.shape[0] == len(nodes), f"{len(nodes)} nodes, rows {tuple(rows.shape)}"
    row = {node: i for i, node in enumerate(nodes)}
    is_chain = all(len(tree.children[node]) <= 1 for node in nodes)
    check_pair(verifier, tree.kind, is_chain=is_chain)
    if tree.kind is not TreeKind.ONE_SAMPLED:
        cut = [child for node in nodes for child in tree.children[node].values() if child not in row]
        assert not cut, f"nodes {cut} were drawn and then left out"
    return row


def top_down(
    verifier: Verifier, tree: TokenTree, nodes: Sequence[int], rows: Rows, noise: Noise, solve: Solver
) -> Verdict:
    """Walk from the root along what `solve` names. Only nodes on the way are computed, each with a few waits for a GPU."""
    check_call(verifier, tree, nodes, rows)
    num_fallbacks = 0

    def choose(i: int) -> int:
        nonlocal num_fallbacks
        node = nodes[i]
        p = weights = normalized(rows[i])
        if node in tree.draws:
            found = solve(p, proposal(tree, node, p), tree.draws[node], Tests(noise, tree.depth[node]))
            if isinstance(found, int):
                return found
            weights = found
            if weights.sum().item() < EMPTY:
                weights = p
                num_fallbacks += 1
        return draw_by_race(weights, noise, tree.depth[node])

    verdict = descend(tree, nodes, choose)
    return Verdict(verdict.path, verdict.extra, num_fallbacks=num_fallbacks)


def draw_by_race(weights: torch.Tensor, noise: Noise, depth: int) -> int:
    """A token of the law `weights` ``[vocab]`` (any positive sum), by the exponentials of an output position."""
    return int(race(weights, exponentials_at(noise, depth, weights).to(weights.device)))
