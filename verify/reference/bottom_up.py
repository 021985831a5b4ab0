"""The rules that judge whole paths from the leaves up, on plain lists."""

from __future__ import annotations

from collections.abc import Mapping

from tree.tree import TokenTree
from verify.base import Verdict
from verify.ratio import EMPTY
from verify.reference.decisions import Decisions, sum_in_order
from verify.reference.top_down import Row, excess, normal


def block_reference(
    tree: TokenTree,
    rows: Mapping[int, Row],
    proposals: Mapping[int, Row],
    decisions: Decisions,
    *,
    is_weighted: bool = True,
) -> Verdict:
    """Block Verification of the chain from the root; all coins are thrown. `is_weighted` False: wrong, for tests."""
    chain = [0]
    while tree.children[chain[-1]]:
        (child,) = tree.children[chain[-1]].values()
        chain.append(child)
    last = len(chain) - 1
    p = [normal(rows[node]) for node in chain]
    q = [normal(proposals[node]) for node in chain[:-1]]
    w = [1.0]
    for i in range(1, last + 1):
        x = tree.token[chain[i]]
        w.append(min(1.0, w[i - 1] * (p[i - 1][x] / q[i - 1][x])))
    tau = 0
    for i in range(1, last + 1):
        if i == last:
            h = w[last]
        else:
            s = sum_in_order(excess([w[i] * a for a in p[i]], q[i]))
            h = s / (s + 1 - w[i]) if s >= EMPTY else 0.0
        if decisions.accept(i, h):
            tau = i
    if tau == last:
        return Verdict(tuple(chain[1:]), decisions.pick(last, p[last]))
    weights = excess([(w[tau] if is_weighted else 1.0) * a for a in p[tau]], q[tau])
    is_empty = sum_in_order(weights) < EMPTY
    extra = decisions.pick(tau, p[tau] if is_empty else weights)
    return Verdict(tuple(chain[1 : tau + 1]), extra, num_fallbacks=int(is_empty))


def traversal_reference(
    tree: TokenTree,
    rows: Mapping[int, Row],
    proposals: Mapping[int, Row],
    decisions: Decisions,
    *,
    is_stale: bool = False,
) -> Verdict:
    """Traversal Verification, recursively. `is_stale` True: the extra token from an unreduced row, wrong, for tests."""
    num_fallbacks = 0

    def below(node: int, weight: float) -> Verdict | None:
        """The verdict, if the final node is below `node` or is `node`."""
        nonlocal num_fallbacks
        p = normal(rows[node])
        q = normal(proposals[node]) if node in tree.draws else []
        for token in dict.fromkeys(tree.draws.get(node, ())):
            verdict = below(tree.children[node][token], min(1.0, weight * (p[token] / q[token])))
            if verdict is not None:
                return verdict
            left = excess([weight * a for a in p], q)
            s = sum_in_order(left)
            if s >= EMPTY:
                p, weight = normal(left), s / (s + 1 - weight)
            else:
                num_fallbacks += node == 0
                weight = 0.0
            q = normal([0.0 if t == token else b for t, b in enumerate(q)])
        if node == 0 or decisions.accept(tree.depth[node], weight):
            extra = decisions.pick(tree.depth[node], rows[node] if is_stale else p)
            return Verdict(tuple(tree.path(node)), extra, num_fallbacks=num_fallbacks)
        return None

    verdict = below(0, 1.0)
    assert verdict is not None
    return verdict
