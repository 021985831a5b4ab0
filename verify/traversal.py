"""Traversal Verification: from the leaves up, accept a whole path or take its last node out.

Source: 2505.12398. Every node u on the way holds what is left of the two rows after it, P and Q, and a weight a (1 at the
root). The weight of a child with token t is min(1, a P(t) / Q(t)). From the first leaf on::

    accept the path to the leaf v with probability a(v); the extra token comes from P at v, and the step is over
    else take v out of its parent u:
        S = sum (a P - Q)+,  P <- norm((a P - Q)+),  a <- S / (S + 1 - a),  Q <- norm(Q without v's token)
    and go on with the next child of u, or, if there is none, with u itself as a leaf

If all is taken out, the token comes from what P is left at the root. On chains this is :mod:`verify.block`.

The final node lies below u (or is u) with probability a(u), averaged over what was drawn below u.

Traps:
    Children are distinct and in the order of their first draws. Draws with repeats are as good as draws without replacement:
    the first one outside a set is distributed as q without the set, whenever it comes. Any other order is wrong.
    A node whose children were all refused is tested with its reduced weight and emits from its reduced row.
    Tests decide about nodes that are deeper than the text that is emitted, so their numbers must not serve again in the
    next step; see :meth:`verify.base.Noise.uniforms`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from tree.draws import TreeKind
from tree.tree import TokenTree
from verify.base import Noise, Rows, Verdict
from verify.block import chance_of
from verify.ratio import EMPTY, Tests, check_call, draw_by_race, drawn_from, mass_of, normalized, ratio

_EXACT_ABOVE = 1e-3  # part of a row's mass that may be left for a difference to be exact enough


@dataclass(slots=True, eq=False)
class Visit:
    """A node on the way. Its rows are not normalized, and few are made: a pass over the vocabulary is what costs here."""

    node: int
    weight: float  # a
    p: Tensor | None  # what is left of the target's row, [vocab], times `p_mass`; None for a leaf, which is read if accepted
    q: Tensor | None  # the drafter's row as the tree keeps it; None for a leaf
    children: deque[int]  # tokens not refused yet, in the order of their first draws
    p_mass: float = 1.0
    q_mass: float = 1.0  # of what is left of `q`, which has no `refused` tokens
    refused: list[int] = field(default_factory=list)
    spare: Tensor | None = None  # what `p` was before the last refusal; overwritten by the next

    def child_weight(self, token: int) -> float:
        """The weight of the child with this token."""
        assert self.p is not None and self.q is not None
        return min(1.0, self.weight * ratio(self.p, self.q, token) * self.q_mass / self.p_mass)

    def refuse(self, token: int) -> bool:
        """Take the child with this token out; False if rounding left nothing where something must be left."""
        assert self.p is not None and self.q is not None
        self.children.remove(token)
        left, mass = self.spare, 0.0
        if self.weight > 0.0:
            left = torch.empty_like(self.p) if left is None else left
            # (a P - Q)+, times p_mass / a
            torch.sub(self.p, self.q, alpha=self.p_mass / (self.weight * self.q_mass), out=left)
            if self.refused:
                left[self.refused] = self.p[self.refused]
            mass = left.clamp_(min=0.0).sum().item() * self.weight / self.p_mass
        is_sound = mass >= EMPTY
        if is_sound:
            assert left is not None
            self.p, self.p_mass, self.spare = left, mass * self.p_mass / self.weight, self.p
        self.weight = chance_of(mass, self.weight)
        self.refused.append(token)
        whole = self.q_mass
        self.q_mass -= self.q[token].item()
        if self.q_mass < _EXACT_ABOVE * whole:  # the difference has lost digits, and may not even be positive
            rest = torch.tensor(self.refused, device=self.q.device)
            self.q_mass = self.q.index_fill(0, rest, 0.0).sum().item() or 1.0
        return is_sound


@dataclass(frozen=True, slots=True)
class Traversal:
    """Accept the first path that passes, from the leaves up."""

    name: ClassVar[str] = "traversal"
    lossless: ClassVar[bool] = True
    accepts: ClassVar[frozenset[TreeKind]] = frozenset({TreeKind.IID, TreeKind.WITHOUT_REPLACEMENT, TreeKind.DELAYED})
    needs_chain: ClassVar[bool] = False
    reads_logits: ClassVar[bool] = False

    def __call__(self, tree: TokenTree, nodes: Sequence[int], rows: Rows, noise: Noise) -> Verdict:
        """Decide from probabilities ``[len(nodes), vocab]`` and the tree's draws; a row is read when it is reached."""
        row = check_call(self, tree, nodes, rows)

        def visit(node: int, weight: float) -> Visit:
            if node not in tree.draws:
                return Visit(node, weight, None, None, deque())
            p = rows[row[node]].to(torch.float64, copy=True)
            q = drawn_from(tree, node, p)
            return Visit(node, weight, p, q, deque(dict.fromkeys(tree.draws[node])), mass_of(p), mass_of(q))

        tests: dict[int, Tests] = {}  # by depth
        path = [visit(0, 1.0)]
        num_fallbacks = 0
        while True:
            while path[-1].children:
                token = path[-1].children[0]
                path.append(visit(tree.children[path[-1].node][token], path[-1].child_weight(token)))
            depth = len(path) - 1
            if depth == 0 or tests.setdefault(depth, Tests(noise, depth)).accept(path[-1].weight):
                p = path[-1].p
                extra = draw_by_race(normalized(rows[row[path[-1].node]]) if p is None else p, noise, depth)
                return Verdict(tuple(v.node for v in path[1:]), extra, num_fallbacks=num_fallbacks)
            refused = path.pop()
            # Below the root nothing may be left and the weight is 0 then; at the root something must be.
            num_fallbacks += not path[-1].refuse(tree.token[refused.node]) and depth == 1
