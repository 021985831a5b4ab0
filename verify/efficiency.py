"""How much a rule accepts, computed instead of counted: laws given the draws, and the expected length of a given tree.

For a rule that solves one node at a time (all of :mod:`verify.ratio` but Block and Traversal, and the walk), the *branching
probability* B(X, t) is the probability that it names token t when the draws are X. A node is reached with the product of
the B along its path, so a tree's expected number of emitted tokens (block efficiency, 2602.16994) is the sum of those products
over its nodes, the root included: no verification has to be sampled, only trees.

:func:`ceiling` bounds the probability that *any* rule names one of k independent draws. It is the value of a maximum flow from
lists to tokens, taken at the minimum cut (2502.18779).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from tree.tree import TokenTree
from verify.khisti import Duel, tournament
from verify.ratio import EMPTY, excess, normalized, proposal, ratio
from verify.spectr import best_division, remainder

Law = Callable[[Tensor, Tensor, Sequence[int]], Tensor]
"""(p, q, draws) -> ``[vocab]``: B(draws, t) for every t. Rows are float64 distributions ``[vocab]``; at least one draw."""


def walk_law(p: Tensor, q: Tensor, draws: Sequence[int]) -> Tensor:
    """The target-sampling walk does not look at the draws."""
    return p


def naive_law(p: Tensor, q: Tensor, draws: Sequence[int]) -> Tensor:
    """:mod:`verify.naive`: the first draw, or the rest of p."""
    return _tested(p, q, draws[0])


def spectr_law(p: Tensor, q: Tensor, draws: Sequence[int]) -> Tensor:
    """:mod:`verify.spectr`: a test per draw at the divided ratio, then the remainder."""
    division = best_division(p, q, len(draws))
    law = torch.zeros_like(p)
    refused = 1.0
    for token in draws:
        accepted = min(1.0, ratio(p, q, token) / division.rho)
        law[token] += refused * accepted
        refused *= 1.0 - accepted
    return law + refused * _remaining(remainder(p, q, division, len(draws)), p)


def specinfer_law(p: Tensor, q: Tensor, draws: Sequence[int]) -> Tensor:
    """:mod:`verify.specinfer` with replacement, in drawing order."""
    law = torch.zeros_like(p)
    refused, left = 1.0, p
    for token in draws:
        accepted = min(1.0, ratio(left, q, token))
        law[token] += refused * accepted
        refused *= 1.0 - accepted
        left = _remaining(excess(left, q), p)
    return law + refused * left


def shuffled_law(p: Tensor, q: Tensor, draws: Sequence[int]) -> Tensor:
    """:mod:`verify.specinfer` with replacement, in random order: a sum over the sets of draws still untested (2^k)."""
    k = len(draws)
    left = [p]  # by number of refusals
    for _ in draws:
        left.append(_remaining(excess(left[-1], q), p))
    law = torch.zeros_like(p)
    reached = {frozenset(range(k)): 1.0}
    for num_refused in range(k):
        fewer: dict[frozenset[int], float] = {}
        for untested, chance in reached.items():
            for index in untested:
                accepted = min(1.0, ratio(left[num_refused], q, draws[index]))
                law[draws[index]] += chance / len(untested) * accepted
                rest = untested - {index}
                fewer[rest] = fewer.get(rest, 0.0) + chance / len(untested) * (1.0 - accepted)
        reached = fewer
    return law + reached[frozenset()] * left[k]


def distinct_law(p: Tensor, q: Tensor, draws: Sequence[int]) -> Tensor:
    """:mod:`verify.specinfer` without replacement, in drawing order."""
    law = torch.zeros_like(p)
    refused, left, q = 1.0, p, q.clone()
    for token in draws:
        accepted = min(1.0, ratio(left, q, token))
        law[token] += refused * accepted
        refused *= 1.0 - accepted
        left = _remaining(excess(left, q), p)
        q[token] = 0.0
        q = q / q.sum().clamp(min=torch.finfo(q.dtype).tiny)
    return law + refused * left


def khisti_law(p: Tensor, q: Tensor, draws: Sequence[int], duels: Sequence[Duel] | None = None) -> Tensor:
    """:mod:`verify.khisti`: the law of the winner, and each winner's test. `duels`: if they are solved already."""
    if duels is None:
        duels = tournament(p, q, len(draws))
    winner = {draws[0]: 1.0}
    for duel, rival in zip(duels, draws[1:], strict=True):
        after: dict[int, float] = {}
        for token, chance in winner.items():
            kept = 1.0 if token == rival else duel.chance(token, rival)
            after[token] = after.get(token, 0.0) + chance * kept
            after[rival] = after.get(rival, 0.0) + chance * (1.0 - kept)
        winner = after
    law = duels[-1].law if duels else q
    return torch.stack([chance * _tested(p, law, token) for token, chance in winner.items() if chance > 0.0]).sum(dim=0)


LAWS: dict[str, Law] = {
    "walk": walk_law,
    "naive": naive_law,
    "specinfer": specinfer_law,
    "specinfer-distinct": distinct_law,
    "spectr": spectr_law,
    "khisti": khisti_law,
}
"""By the name of the rule; rules that judge whole paths have no branching probabilities."""


def acceptance(law: Tensor, draws: Sequence[int]) -> float:
    """Probability that a rule with the law ``[vocab]`` given `draws` names one of them."""
    return law[list(set(draws))].sum().item()


def expected_tokens(tree: TokenTree, nodes: Sequence[int], rows: Tensor, law: Law, *, max_depth: int | None = None) -> float:
    """Expected number of tokens that one step emits with this tree, the extra one included; at least 1.

    Args:
        nodes: verified nodes, as for a verifier; with `max_depth` only those up to that depth count.
        rows: ``[len(nodes), vocab]`` the target's probabilities.
        law: branching probabilities of the rule, e.g. from :data:`LAWS`. At nodes without draws the target is sampled.
    """
    assert rows.shape[0] == len(nodes), f"{len(nodes)} nodes, rows {tuple(rows.shape)}"
    row = {node: i for i, node in enumerate(nodes) if max_depth is None or tree.depth[node] <= max_depth}
    value: dict[int, float] = {}  # of the subtree, given that its root is reached
    for node in reversed(list(row)):
        value[node] = 1.0
        children = {token: child for token, child in tree.children[node].items() if child in row}
        if children:
            p = normalized(rows[row[node]])
            branching = law(p, proposal(tree, node, p), tree.draws[node]) if node in tree.draws else p
            chances: list[float] = branching[list(children)].tolist()
            value[node] += sum(b * value[child] for b, child in zip(chances, children.values(), strict=True))
    return value[0]


def tokens_by_depth(tree: TokenTree, rows: Tensor, law: Law, deepest: int) -> list[float]:
    """Expected tokens of a step for every depth at which the tree could have been cut: entry d is that of its nodes down to d.

    Equal to :func:`expected_tokens` with `max_depth` d, of all nodes, at the price of one pass: each node adds the probability
    that it is reached.

    Args:
        rows: ``[nodes, vocab]`` the target's probabilities, in creation order.
        deepest: number of the last entry; beyond the tree's own depth nothing is added.
    """
    assert rows.shape[0] == len(tree), f"{len(tree)} nodes, rows {tuple(rows.shape)}"
    reached, gained = [1.0] + [0.0] * (len(tree) - 1), [0.0] * (deepest + 1)
    for node in range(len(tree)):  # parents come first
        if tree.depth[node] <= deepest:
            gained[tree.depth[node]] += reached[node]
        children = tree.children[node]
        if not children or reached[node] == 0.0:
            continue
        p = normalized(rows[node])
        branching = law(p, proposal(tree, node, p), tree.draws[node]) if node in tree.draws else p
        chances: list[float] = branching[list(children)].tolist()
        for chance, child in zip(chances, children.values(), strict=True):
            reached[child] = reached[node] * chance
    return list(accumulate(gained))


def ceiling(p: Tensor, q: Tensor, k: int) -> float:
    """Most that any rule can accept of k independent draws: 1 + min over token sets S of p(S) - q(S)^k.

    Since the power is convex, the best set holds the tokens of the smallest p / q, so only ``vocab`` sets are compared.
    `p` and `q` are float64 distributions ``[vocab]``.
    """
    drawn = q > 0
    p, q = p[drawn], q[drawn]
    order = (p / q).argsort()
    return 1.0 + min(0.0, (p[order].cumsum(0) - q[order].cumsum(0).clamp(max=1.0) ** k).min().item())


def _tested(p: Tensor, q: Tensor, token: int) -> Tensor:
    """The law of the classic test of one token drawn from q."""
    accepted = min(1.0, ratio(p, q, token))
    law = (1.0 - accepted) * _remaining(excess(p, q), p)
    law[token] += accepted
    return law


def _remaining(weights: Tensor, p: Tensor) -> Tensor:
    """`weights` as a distribution; p if rounding left nothing."""
    mass = weights.sum()
    return p.clone() if mass.item() < EMPTY else weights / mass
