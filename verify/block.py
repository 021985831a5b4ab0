"""Block Verification: judge a drafted chain as a whole, and keep more of it than token by token.

Source: 2403.10444. For a chain x_1..x_L drawn from q::

    w_0 = 1,  w_i = min(1, w_{i-1} p(x_i) / q(x_i))
    h_i = S_i / (S_i + 1 - w_i),  S_i = sum (w_i p - q)+ of the rows after x_i;  h_L = w_L
    tau = the largest i whose coin of probability h_i falls on accept, else 0
    extra token: from p after x_L if tau = L, else from norm((w_tau p - q)+) after x_tau

Given the chain up to x_i, tau >= i has probability w_i, so E[tau] is the sum of E_q[w_i]; no rule for chains that sees these
rows keeps more, and none that tests token by token keeps as much.

Traps:
    The coins are independent and all of them count: a refusal early in the chain does not stop a later acceptance.
    The remainder carries the weight w_tau.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from tree.draws import TreeKind
from tree.tree import TokenTree
from verify.base import Noise, Rows, Verdict
from verify.ratio import EMPTY, Tests, check_call, draw_by_race, excess, normalized, proposal, ratio


@dataclass(frozen=True, slots=True)
class Block:
    """Judge the whole chain, from its end up."""

    name: ClassVar[str] = "block"
    lossless: ClassVar[bool] = True
    accepts: ClassVar[frozenset[TreeKind]] = frozenset({TreeKind.IID, TreeKind.WITHOUT_REPLACEMENT, TreeKind.DELAYED})
    needs_chain: ClassVar[bool] = True
    reads_logits: ClassVar[bool] = False

    def __call__(self, tree: TokenTree, nodes: Sequence[int], rows: Rows, noise: Noise) -> Verdict:
        """Decide from probabilities ``[len(nodes), vocab]`` and the chain's rows. Raise ValueError for a tree that branches."""
        row = check_call(self, tree, nodes, rows)
        chain = [0]  # node of x_i at i
        while children := list(tree.children[chain[-1]].values()):
            chain += children
        weights = [1.0]  # w_i
        for above, node in zip(chain, chain[1:], strict=False):
            p = normalized(rows[row[above]])
            weights.append(min(1.0, weights[-1] * ratio(p, proposal(tree, above, p), tree.token[node])))
        last = len(chain) - 1
        for i in range(last, 0, -1):
            node = chain[i]
            p = normalized(rows[row[node]])
            if i == last:
                chance, left = weights[i], p
            else:
                left = excess(weights[i] * p, proposal(tree, node, p))
                chance = chance_of(left.sum().item(), weights[i])
            if Tests(noise, i).accept(chance):
                return Verdict(tuple(chain[1 : i + 1]), draw_by_race(left, noise, i))
        p = normalized(rows[row[0]])
        left = excess(p, proposal(tree, 0, p)) if last else p
        is_empty = left.sum().item() < EMPTY
        return Verdict((), draw_by_race(p if is_empty else left, noise, 0), num_fallbacks=int(is_empty))


def chance_of(mass: float, weight: float) -> float:
    """Probability S / (S + 1 - w) of stopping at a node of weight w whose remainder has the mass S.

    Without a remainder nothing may be emitted there: 0. At w = 1 this happens only if all that was drawn below is accepted.
    """
    return mass / (mass + 1.0 - weight) if mass >= EMPTY else 0.0
