"""What is remembered of an arm: sums, from which every figure of a report follows.

Requests that share a key are not independent: one user asks for code all day, another for verse. What was assigned at random
is the key, so the key is the unit of the statistics. The variance of a mean is taken over units,

    V = K / (K - 1) * sum over units k of (S_k - n_k m)**2 / n**2,

with n_k requests and the sum S_k in unit k, n and m over all K units (the cluster-robust variance of a ratio), and never
taken below the one that independent requests would have. Treating requests as independent instead finds winners in A/A tests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from app.experiments.outcome import Outcome
from app.experiments.sequences import Estimate

MAX_UNITS = 200_000  # keys remembered per arm; requests of further keys count as units of their own


@dataclass(slots=True)
class Moments:
    """Sums over the observations of one quantity, and over the units they belong to."""

    num: int = 0
    total: float = 0.0
    squares: float = 0.0
    num_units: int = 0
    unit_squares: float = 0.0  # sum of S_k**2
    unit_products: float = 0.0  # sum of n_k S_k
    unit_counts: float = 0.0  # sum of n_k**2

    def add(self, value: float, num_before: int = 0, sum_before: float = 0.0) -> None:
        """One observation, of a unit that had `num_before` with the sum `sum_before`."""
        self.num += 1
        self.total += value
        self.squares += value * value
        self.num_units += num_before == 0
        self.unit_squares += value * (2 * sum_before + value)
        self.unit_products += sum_before + value * (num_before + 1)
        self.unit_counts += 2 * num_before + 1

    @property
    def mean(self) -> float:
        """Of the observations; at least one is needed."""
        return self.total / self.num

    @property
    def effective_units(self) -> float:
        """Units, discounted where a few of them hold most of the observations."""
        return self.num**2 / self.unit_counts if self.num else 0.0

    @property
    def estimate(self) -> Estimate | None:
        """The mean with its variance over units; None with fewer than two units."""
        if self.num_units < 2:
            return None
        mean = self.mean
        single = max(self.squares - self.num * mean * mean, 0.0) / (self.num - 1)
        between = self.unit_squares - 2 * mean * self.unit_products + mean * mean * self.unit_counts
        clustered = between * self.num_units / (self.num_units - 1) / self.num**2
        variance = max(clustered, single / self.num, 1e-18)
        return Estimate(mean, variance, min(max(single / variance, 1.0), float(self.num)))


@dataclass(slots=True)
class UnitSums:
    """What one key's requests add up to in one arm."""

    num_rates: int = 0
    log_rates: float = 0.0
    num_waits: int = 0
    log_waits: float = 0.0
    num_taus: int = 0
    log_taus: float = 0.0


@dataclass(slots=True)
class ArmTally:
    """All that is known of one arm. Logarithms are natural, of tokens per second, of seconds, of tokens per step."""

    num_requests: int = 0  # ended, however
    num_aborted: int = 0  # the caller went away
    num_failed: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_steps: int = 0  # target passes that emitted for these requests
    num_forwards: int = 0  # of drafters, for these requests
    draft_s: float = 0.0
    verify_s: float = 0.0
    log_rate: Moments = field(default_factory=Moments)
    log_wait: Moments = field(default_factory=Moments)  # until the first token
    log_tau: Moments = field(default_factory=Moments)
    units: dict[str, UnitSums] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        """Count one request."""
        self.num_requests += 1
        self.num_aborted += outcome.reason == "abort"
        self.num_failed += outcome.reason == "error"
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(outcome, name))
        unit = UnitSums()  # a request without a key is a unit of its own
        if outcome.unit and (outcome.unit in self.units or len(self.units) < MAX_UNITS):
            unit = self.units.setdefault(outcome.unit, unit)
        if outcome.rate is not None:
            value = math.log(outcome.rate)
            self.log_rate.add(value, unit.num_rates, unit.log_rates)
            unit.num_rates, unit.log_rates = unit.num_rates + 1, unit.log_rates + value
        if outcome.wait_s is not None:
            value = math.log(outcome.wait_s)
            self.log_wait.add(value, unit.num_waits, unit.log_waits)
            unit.num_waits, unit.log_waits = unit.num_waits + 1, unit.log_waits + value
        if outcome.tau:
            value = math.log(outcome.tau)
            self.log_tau.add(value, unit.num_taus, unit.log_taus)
            unit.num_taus, unit.log_taus = unit.num_taus + 1, unit.log_taus + value

    def sums(self) -> dict[str, Any]:
        """All but the units, as JSON values."""
        plain = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in _PARTS}
        return {**plain, **{name: asdict(getattr(self, name)) for name in _MOMENTS}}


def from_sums(data: Mapping[str, Any]) -> ArmTally:
    """The tally, without its units, that :meth:`ArmTally.sums` wrote."""
    return ArmTally(**{**data, **{name: Moments(**data[name]) for name in _MOMENTS}})


_SUMMED = ("num_prompt_tokens", "num_output_tokens", "num_steps", "num_forwards", "draft_s", "verify_s")
_MOMENTS = ("log_rate", "log_wait", "log_tau")
_PARTS = (*_MOMENTS, "units")
