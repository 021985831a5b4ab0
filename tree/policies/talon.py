"""TALON: a token tree grown layer by layer until the node budget is spent, gated by confidence.

Source: 2601.07353, with its notation: N node budget (root included), K width of the first layer, mu gate. The first
layer takes the K best tokens; each later layer takes every candidate whose *path* score is at least mu times the best
of the whole layer, and the layer that would overshoot N is cut to its best. The depth cap is ours and can be switched
off.

Traps:
    Admitted means expanded: there is no separate pool and no rerank, only the last layer is not expanded.
    The gate compares cumulative path scores across all parents of the layer, not probabilities per parent.
    Candidates are the whole vocabulary of every parent; the best ``N - |T|`` per parent are enough, since no more
    survive. Growth ends on budget only. In confident contexts the shape is K nodes and then a chain, N - K deep without
    a cap.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice, takewhile

from tree.policies.layers import LayerGrowth, LayerPolicy, Proposal, check_at_least
from tree.select import TIE


@dataclass(frozen=True, slots=True)
class Talon(LayerPolicy):
    """Budget-driven, confidence-gated growth."""

    budget: int = 60  # N, root included
    first_width: int = 10  # K: nodes of the first layer
    mu: float = 0.03  # gate, in (0, 1]; 1 keeps only the best candidate of a layer and exact ties
    depth_cap: int | None = 16  # most layers, i.e. most drafter forwards; None: no cap, as in the paper
    robust_layers: int = 1  # first layers that take the K best without a gate; 1 is the method, 0 gates from the start

    def __post_init__(self) -> None:
        check_at_least(1, budget=self.budget, first_width=self.first_width)
        check_at_least(0, depth_cap=self.depth_cap or 0, robust_layers=self.robust_layers)
        if not 0.0 < self.mu <= 1.0:
            raise ValueError(f"mu must be in (0, 1], got {self.mu}")

    def with_budget(self, budget: int) -> Talon:
        """The same gate with another N, root included."""
        return replace(self, budget=budget)

    def wanted(self, growth: LayerGrowth) -> int:
        """As many candidates per parent as could be admitted at all."""
        if self.depth_cap is not None and growth.num_layers >= self.depth_cap:
            return 0
        return self._most(growth)

    def admitted(self, growth: LayerGrowth, pool: Iterator[Proposal]) -> Iterable[Proposal]:
        """The K best of a robust layer; later those within the gate, as far as the budget goes."""
        best = next(pool, None)
        if best is None:
            return ()
        layer: Iterator[Proposal] = chain((best,), pool)
        if growth.num_layers >= self.robust_layers:
            threshold = best.score + math.log(self.mu) - TIE  # a candidate exactly at the gate passes
            layer = takewhile(lambda proposal: proposal.score >= threshold, layer)
        return islice(layer, self._most(growth))

    def _most(self, growth: LayerGrowth) -> int:
        """Nodes that the next layer may have at most, gate aside."""
        room = self.budget - len(growth.tree)
        return min(room, self.first_width) if growth.num_layers < self.robust_layers else room
