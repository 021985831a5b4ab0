"""AdaptiveSpec's shape policy: deep and narrow while the drafter is sure and right, shallow and wide while it is not.

Source: 2609.02897. Three knobs per step, a triple (drafter forwards, branching, verified nodes with the root), lie on the
line between (3, 4, 4) at confidence 0 and (7, 1, 8) at confidence 1. Confidence is the draft confidence score
``p_draft(top 1) * RAR`` over a constant d, clipped to [0, 1]; RAR, the rolling acceptance rate, is an exponential moving
average that weighs the new step by 0.3. Five steps in a row without an accepted token trip a breaker, which brings the
starting shape back. Within its shape a tree grows and is cut as in :mod:`tree.policies.eagle`.

What the source leaves open is ours: knobs round half up; RAR starts at 1 and takes in ``accepted / layers drafted``; top 1
is the best child of the root, read off the step's first forward; the first accepted token resets the breaker.

Where the state lives. RAR and the breaker belong to one *sequence*, while policies are frozen and shared. So the history is
a frozen value inside the policy, and what is learned is a new policy::

    growth = policy.begin(...)                                # the tree of this step
    policy = policy.after(num_accepted, max(growth.tree.depth))

Whoever runs the sequence keeps the latter beside it and starts the next step from there, in the order of the steps; a
sequence that is started over goes on with its policy or begins anew with the schedule's, as it likes. Nothing else is
shared, so sequences cannot disturb each other. The other half of the confidence, p(top 1), is known only within the step;
the growth reads it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, islice

from tree.policies.eagle import Eagle
from tree.policies.layers import LayerGrowth, LayerPolicy, Proposal, check_at_least


@dataclass(frozen=True, slots=True)
class Shape:
    """One triple. ValueError for one that no tree can have."""

    steps: int  # drafter forwards, i.e. layers
    width: int  # candidates per node and nodes expanded per layer; 1 is a chain
    nodes: int  # verified, root included

    def __post_init__(self) -> None:
        check_at_least(1, steps=self.steps, width=self.width, nodes=self.nodes)
        drafted = self.width + (self.steps - 1) * self.width**2
        if self.nodes > 1 + drafted or (self.width == 1 and self.nodes != 1 + self.steps):
            raise ValueError(f"nodes do not fit {self}: 1 + {drafted} are drafted, and a chain is verified whole")

    @property
    def eagle(self) -> Eagle:
        """The growth rules of this shape."""
        return Eagle(width=self.width, depth=self.steps, budget=self.nodes)


@dataclass(frozen=True, slots=True)
class ShapeHistory:
    """What one sequence has learned from its steps so far."""

    rolling: float = 1.0  # RAR, in [0, 1]
    zero_run: int = 0  # steps without an accepted token since the last one with

    def after(self, accepted: int, layers: int, weight: float) -> ShapeHistory:
        """The history after a step that accepted `accepted` tokens of at most `layers`.

        A step that drafted nothing teaches nothing. Raise ValueError unless ``0 <= accepted <= layers``.
        """
        if not 0 <= accepted <= layers:
            raise ValueError(f"accepted must be between 0 and the {layers} layers drafted, got {accepted}")
        if layers == 0:
            return self
        rolling = (1.0 - weight) * self.rolling + weight * accepted / layers
        return ShapeHistory(rolling, 0 if accepted else self.zero_run + 1)


@dataclass(frozen=True, slots=True)
class AdaptiveShape(LayerPolicy):
    """A shape per step, from the drafter's confidence and the sequence's history."""

    unsure: Shape = Shape(3, 4, 4)  # at confidence 0; also the starting shape that the breaker brings back
    sure: Shape = Shape(7, 1, 8)  # at confidence 1
    divisor: float = 0.5  # d: the draft confidence score that counts as certainty
    weight: float = 0.3  # of the newest step in RAR, in (0, 1]
    patience: int = 5  # steps without an accepted token that trip the breaker
    limit: int | None = None  # most verified nodes, root included; None: as many as the shapes have
    history: ShapeHistory = field(default_factory=ShapeHistory)  # where a sequence begins; kept by whoever runs it

    def __post_init__(self) -> None:
        check_at_least(1, patience=self.patience, limit=1 if self.limit is None else self.limit)
        if not self.divisor > 0.0:
            raise ValueError(f"divisor must be above 0, got {self.divisor}")
        if not 0.0 < self.weight <= 1.0:
            raise ValueError(f"weight must be in (0, 1], got {self.weight}")
        reachable_shapes(self.unsure, self.sure)  # refuses end points with an impossible shape between them

    @property
    def budget(self) -> int:
        """Verified nodes per step, root included, in the largest shape."""
        size = max(self.unsure.nodes, self.sure.nodes)
        return size if self.limit is None else min(size, self.limit)

    @property
    def is_tripped(self) -> bool:
        """True while the breaker holds the starting shape."""
        return self.history.zero_run >= self.patience

    def with_budget(self, budget: int) -> AdaptiveShape:
        """The same shapes, each cut to `budget` nodes; a larger budget than they have nodes changes nothing."""
        check_at_least(1, budget=budget)
        return replace(self, limit=budget)

    def after(self, accepted: int, layers: int) -> AdaptiveShape:
        """The policy for the sequence's next step.

        Args:
            accepted: drafted tokens accepted in this step, without the token that the target adds.
            layers: depth of this step's draft tree, whatever was cut from it.

        Raises ValueError unless ``0 <= accepted <= layers``.
        """
        return replace(self, history=self.history.after(accepted, layers, self.weight))

    def shape(self, p_top: float) -> Shape:
        """The shape of a step whose drafter gives its best first token the probability `p_top`."""
        if self.is_tripped:
            return self.unsure
        confidence = min(max(p_top * self.history.rolling / self.divisor, 0.0), 1.0)
        return shape_between(self.unsure, self.sure, confidence)

    def wanted(self, growth: LayerGrowth) -> int:
        """At first as many as the widest shape takes, since the shape is not known yet; then what the shape says."""
        if growth.num_layers:
            return self._rules(growth).wanted(growth)
        return min(max(self.unsure.width, self.sure.width), self.budget - 1)

    def admitted(self, growth: LayerGrowth, pool: Iterator[Proposal]) -> Iterable[Proposal]:
        """What the shape admits; the first layer is as narrow as the shape is."""
        if growth.num_layers:
            return self._rules(growth).admitted(growth, pool)
        best = next(pool, None)
        if best is None:
            return ()
        shape = self.shape(math.exp(min(best.lp, 0.0)))
        return self._cut(shape).admitted(growth, islice(chain((best,), pool), shape.width))

    def parents(self, growth: LayerGrowth, layer: Sequence[int]) -> Sequence[int]:
        """The nodes that the shape expands."""
        return self._rules(growth).parents(growth, layer)

    def verified(self, growth: LayerGrowth) -> list[int]:
        """The nodes that the shape verifies."""
        return self._rules(growth).verified(growth)

    def _rules(self, growth: LayerGrowth) -> Eagle:
        """The rules of a growth whose first layer is there. Its best node is the first one."""
        return self._cut(self.shape(math.exp(growth.tree.lp[1]) if len(growth.tree) > 1 else 0.0))

    def _cut(self, shape: Shape) -> Eagle:
        return shape.eagle.with_budget(min(shape.nodes, self.budget))


def shape_between(unsure: Shape, sure: Shape, confidence: float) -> Shape:
    """The shape at `confidence` in [0, 1] on the line between two; every knob is rounded, halves up."""

    def knob(low: int, high: int) -> int:
        return math.floor(low + (high - low) * confidence + 0.5)

    return Shape(knob(unsure.steps, sure.steps), knob(unsure.width, sure.width), knob(unsure.nodes, sure.nodes))


@lru_cache(maxsize=64)
def reachable_shapes(unsure: Shape, sure: Shape) -> tuple[Shape, ...]:
    """Every shape between two, by growing confidence: what an engine with fixed graphs has to capture.

    Raises ValueError if one of them is impossible.
    """
    spans = [(unsure.steps, sure.steps), (unsure.width, sure.width), (unsure.nodes, sure.nodes)]
    # A knob changes where it is halfway between two whole numbers; between two changes nothing does.
    changes = {0.0, 1.0}
    for low, high in spans:
        changes.update((k + 0.5) / abs(high - low) for k in range(abs(high - low)))
    ordered = sorted(changes)
    middles = [(a + b) / 2 for a, b in zip(ordered, ordered[1:], strict=False)]
    return tuple(dict.fromkeys(shape_between(unsure, sure, g) for g in sorted([*ordered, *middles])))
