"""Delayed trees whose shape a trained selector picks anew at every step (NDE, 2602.16994), as a tree policy.

The selector's features are those that a server knows without a further pass of the drafter (`SERVED`): the entropy of the
target at the token before the root, which the last verification left behind; the drafter's entropy at the root, from the first
drafting pass, which every shape but the empty one begins with; context, temperature, top-p and both prices. The source also
looks at the drafter at the token before the root; a head that goes on from the target's hidden states would have to be asked
for that.

The shape may depend on the drafter's row at the root, as nothing has been drawn from it by then: what is drawn is distributed
as if the shape had been fixed, and the rules stay exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from scheduler.selector import SCALARS, Selector
from tree.draws import TreeKind, usable_row
from tree.growth import Answer, Limits, Uniform
from tree.policies.layers import check_at_least
from tree.policies.sampled import Delayed, PathGrowth, SampledPolicy

SERVED: tuple[str, ...] = (
    "target_entropy",
    "root_entropy",
    "log_context",
    "temperature",
    "top_p",
    "log_draft_ms",
    "log_target_ms",
)
"""The features that are known while serving, of `SCALARS`."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known before a step. None: not known, and taken to be as usual in training."""

    target_entropy: float | None = None  # nats, of the distribution that the root was drawn from
    context: int | None = None  # tokens of the text
    temperature: float | None = None
    top_p: float | None = None
    draft_ms: float | None = None  # of a one-row call at this context
    target_ms: float | None = None

    def features(self, root_entropy: float, usual: torch.Tensor) -> tuple[float, ...]:
        """A row for the selector; `usual` ``[scalars]`` fills what is not known."""
        known = {
            "target_entropy": self.target_entropy,
            "root_entropy": root_entropy,
            "log_context": None if self.context is None else math.log1p(self.context),
            "temperature": self.temperature,
            "top_p": self.top_p,
            "log_draft_ms": None if self.draft_ms is None else math.log(self.draft_ms),
            "log_target_ms": None if self.target_ms is None else math.log(self.target_ms),
        }
        values = (known.get(name) for name in SCALARS)
        return tuple(mean if value is None else value for value, mean in zip(values, usual.tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class Selected(SampledPolicy):
    """A shape per step, of at most `limit` nodes, root included."""

    kind: ClassVar[TreeKind] = TreeKind.DELAYED

    selector: Selector
    limit: int = 41
    facts: Facts = Facts()  # whoever runs a sequence keeps them up to date

    def __post_init__(self) -> None:
        check_at_least(1, limit=self.limit)

    @property
    def budget(self) -> int:
        """Most verified nodes per step, root included."""
        return self.limit

    def with_budget(self, budget: int) -> Selected:
        """The same selector among shapes of at most `budget` nodes."""
        return replace(self, limit=budget)

    def shape(self, row: torch.Tensor) -> Delayed:
        """The shape of a step with the drafter's `row` ``[vocab]`` at the root, weights >= 0 with some mass."""
        entropy = float(torch.special.entr(row / row.sum()).sum())
        features = self.facts.features(entropy, self.selector.center)
        return self.selector.select(features, budget=self.limit)

    def start(self, root_token: int, limits: Limits, uniform: Uniform) -> SelectedGrowth:
        """Only the root yet, and no shape."""
        return SelectedGrowth(self, root_token, limits, uniform)


class SelectedGrowth(PathGrowth):
    """Paths whose number and length are chosen when the drafter has looked at the root."""

    def __init__(self, policy: Selected, root_token: int, limits: Limits, uniform: Uniform) -> None:
        # Until then as if one token were to be drawn: that asks for the row.
        super().__init__(Delayed(1, min(1, policy.limit - 1), 0), policy.kind, root_token, limits, uniform)
        self._policy = policy
        self._is_chosen = False

    def attach(self, drafter: str, answer: Answer) -> None:
        """Choose the shape with the first answer; then draw as ever."""
        row = None if self._is_chosen else usable_row(answer.rows.get(0), self._limits.vocab_size)
        if row is not None:
            self._is_chosen = True
            self._shape = self._policy.shape(row)
            self._set_heads({0: 1})
        super().attach(drafter, answer)
