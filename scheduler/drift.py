"""Prices that follow the machine: a cost profile, and how far the clock has moved away from it since.

A profile is measured once; later other programs take cores, or the processor gets warm. What changes then is mostly one
factor per model, so that is what is tracked: the exponential mean of log(measured / predicted). A single pause is cut before
it enters, and the correction stays within bounds: a profile that is wrong by more than that should be measured again, not
bent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from scheduler.cost import CostProfile, Floats


@dataclass(frozen=True, slots=True)
class DriftRule:
    """How fast and how far corrections go."""

    half_life: float = 32.0  # forwards after which a measurement counts half
    limit: float = 3.0  # factor that a correction, and a single measurement against the current one, is cut to

    def __post_init__(self) -> None:
        if not (math.isfinite(self.half_life) and self.half_life > 0):
            raise ValueError(f"half_life must be positive, got {self.half_life}")
        if not (math.isfinite(self.limit) and self.limit >= 1):
            raise ValueError(f"limit must be a factor of at least 1, got {self.limit}")


class LiveCosts:
    """A profile with a correction per model. One owner writes; one number per model is all it remembers."""

    def __init__(self, profile: CostProfile, rule: DriftRule | None = None) -> None:
        self.profile = profile
        self.rule = rule or DriftRule()
        self._keep = 0.5 ** (1 / self.rule.half_life)
        self._cut = math.log(self.rule.limit)
        self._log_ratio = dict.fromkeys(profile.models, 0.0)

    def observe(self, model: str, rows: int, sequences: int, context: int, ms: float) -> None:
        """A forward took `ms`. What no clock can mean (NaN, infinite, not positive) is passed over.

        KeyError for a model that is not in the profile.
        """
        self.compare(model, self.profile.ms(model, rows, sequences=sequences, context=context), ms)

    def compare(self, model: str, predicted: float, ms: float) -> None:
        """As `observe`, for work that the profile itself, without correction, puts at `predicted` milliseconds."""
        if not (math.isfinite(ms) and ms > 0):
            return
        before = self._log_ratio[model]
        seen = math.log(ms) - math.log(predicted)
        seen = min(max(seen, before - self._cut), before + self._cut)
        mean = self._keep * before + (1 - self._keep) * seen
        self._log_ratio[model] = min(max(mean, -self._cut), self._cut)

    def drift(self, model: str) -> float:
        """Measured over predicted, lately: 1 is as profiled, 2 twice as slow; within [1 / limit, limit]."""
        return math.exp(self._log_ratio[model])

    def ms(self, model: str, rows: int, *, sequences: int = 1, context: int = 0) -> float:
        """Milliseconds of a forward, corrected."""
        return self.drift(model) * self.profile.ms(model, rows, sequences=sequences, context=context)

    def curve(self, model: str, most: int, *, sequences: int = 1, context: int = 0) -> Floats:
        """`[most]`: milliseconds of 1, 2, … `most` rows, corrected."""
        return self.drift(model) * self.profile.models[model].curve(most, sequences=sequences, context=context)
