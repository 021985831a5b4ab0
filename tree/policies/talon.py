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
from dataclasses import dataclass, replace

from tree.growth import Answer, Ask, Limits, is_graft
from tree.select import TIE, rounded
from tree.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Talon:
    """Budget-driven, confidence-gated growth."""

    budget: int = 60  # N, root included
    first_width: int = 10  # K
    mu: float = 0.03  # gate, in (0, 1]; 1 keeps only the best candidate of a layer and exact ties
    depth_cap: int | None = 16  # most layers, i.e. most drafter forwards; None: no cap, as in the paper
    robust_layers: int = 1  # first layers that take the K best without a gate; 1 is the method, 0 gates from the start

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise ValueError(f"budget must be at least 1 (the root), got {self.budget}")
        if self.first_width < 1:
            raise ValueError(f"first_width must be at least 1, got {self.first_width}")
        if not 0.0 < self.mu <= 1.0:
            raise ValueError(f"mu must be in (0, 1], got {self.mu}")
        if self.depth_cap is not None and self.depth_cap < 0:
            raise ValueError(f"depth_cap must be at least 0 or None, got {self.depth_cap}")
        if self.robust_layers < 0:
            raise ValueError(f"robust_layers must be at least 0, got {self.robust_layers}")

    def with_budget(self, budget: int) -> Talon:
        """The same gate with another N, root included."""
        return replace(self, budget=budget)

    def begin(
        self,
        root_token: int,
        *,
        stop_tokens: frozenset[int] = frozenset(),
        max_depth: int | None = None,
        vocab_size: int,
    ) -> TalonGrowth:
        """Start a tree; see :class:`tree.growth.Policy`."""
        caps = [cap for cap in (max_depth, self.depth_cap) if cap is not None]
        return TalonGrowth(self, TokenTree(root_token), Limits(vocab_size, stop_tokens, min(caps, default=None)))


class TalonGrowth:
    """A TALON tree under construction. Each ask is one layer."""

    def __init__(self, policy: Talon, tree: TokenTree, limits: Limits) -> None:
        self.tree = tree
        self.num_grafts = 0
        self._policy = policy
        self._limits = limits
        self._layer = 0
        self._parents = self._open([0])

    def ask(self, drafter: str) -> Ask | None:
        """Candidates of every node of the newest layer; None once the budget is spent or the layer is closed."""
        room = self._policy.budget - len(self.tree)
        if room <= 0 or not self._parents:
            return None
        width = min(room, self._limits.vocab_size)
        if self._layer < self._policy.robust_layers:
            width = min(width, self._policy.first_width)
        return Ask(nodes=self._parents, width=width)

    def attach(self, drafter: str, answer: Answer) -> None:
        """Admit the next layer. An empty pool ends the growth."""
        tree = self.tree
        # Pool entries are (score, order, parent, token, lp). Parents are in rank order and candidates descend,
        # so `order` is the creation order that breaks ties. Zero-probability candidates never enter: nothing can accept
        # them.
        pool: list[tuple[float, int, int, int, float]] = []
        for parent in self._parents:
            candidates = answer.candidates.get(parent)
            if candidates is None:
                continue
            for token, lp in zip(candidates.tokens, candidates.lps, strict=True):
                score = tree.score[parent] + lp
                if score != -math.inf and self._limits.allows(token):
                    pool.append((score, len(pool), parent, token, lp))
        pool.sort(key=lambda entry: (-rounded(entry[0]), entry[1]))
        admitted: list[int] = []
        for _, _, parent, token, lp in pool[: self._num_admitted([entry[0] for entry in pool])]:
            self.num_grafts += is_graft(tree, parent, drafter)
            admitted.append(tree.add(parent, token, lp, drafter))
        self._layer += 1
        self._parents = self._open(admitted)

    def verify_nodes(self) -> list[int]:
        """All nodes; growth never exceeds the budget."""
        return list(range(len(self.tree)))

    def _num_admitted(self, scores: list[float]) -> int:
        """How many of the path scores of a layer's pool, best first, are admitted."""
        room = self._policy.budget - len(self.tree)
        if not scores:
            return 0
        if self._layer < self._policy.robust_layers:
            return min(room, self._policy.first_width)
        threshold = max(scores) + math.log(self._policy.mu) - TIE  # a candidate exactly at the gate passes
        return min(room, sum(score >= threshold for score in scores))

    def _open(self, nodes: list[int]) -> tuple[int, ...]:
        """Those of `nodes` that may get children."""
        return tuple(node for node in nodes if self._limits.is_open(self.tree, node))
