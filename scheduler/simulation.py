"""Logged steps replayed under the prices of any machine: what each way to schedule would make of them.

Tokens are counted from the trace, milliseconds modeled by a cost profile; a step is priced as if it had the machine alone.
Value guidance is judged on prompts that its rule was not fitted to. The oracle knows the outcome of every word beforehand: no
scheduler of these trees can be faster.

Trap: the trees are those of the traced drafters. A profile of a larger target says what they would be worth at its prices, not
how often larger models agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from scheduler.cost import CostProfile
from scheduler.rule import Rule
from scheduler.rule_fit import RuleFit, cross_fitted
from scheduler.traces import Trace, priced
from scheduler.value import Steps, Totals, always, oracle, plain, rate_of

PLAIN, SMALL, MEDIUM, GUIDED, ORACLE = "ar", "always small", "always medium", "value-guided", "oracle"


@dataclass(frozen=True, slots=True)
class Simulation:
    """Totals by schedule."""

    totals: Mapping[str, Totals]

    @property
    def gain(self) -> float:
        """How much faster value guidance is than the better of both end points: 0.1 is a tenth."""
        return self.totals[GUIDED].rate / self._best_end - 1.0

    @property
    def possible(self) -> float:
        """The same of the oracle."""
        return self.totals[ORACLE].rate / self._best_end - 1.0

    @property
    def _best_end(self) -> float:
        return max(self.totals[SMALL].rate, self.totals[MEDIUM].rate)


def simulate(
    trace: Trace, profile: CostProfile, *, budget: int | None = None, rule: Rule | None = None, options: RuleFit | None = None
) -> Simulation:
    """The steps of a trace under a profile. With `rule` that rule is replayed instead of fitted ones.

    ValueError for a profile that lacks a model, and for a trace of one prompt without `rule`.
    """
    return compare(priced(trace, profile, budget=budget), rule, options)


def compare(steps: Steps, rule: Rule | None = None, options: RuleFit | None = None) -> Simulation:
    """The same of priced steps."""
    if rule is None and len(np.unique(steps.groups)) < 2:
        raise ValueError("value guidance is judged on prompts it was not fitted to, and there is only one prompt")
    guided = cross_fitted(steps, options) if rule is None else rate_of(steps, rule.decide_all, rule.max_calls)
    return Simulation(
        {
            PLAIN: plain(steps),
            SMALL: always(steps, "S"),
            MEDIUM: always(steps, "M"),
            GUIDED: guided,
            ORACLE: oracle(steps),
        }
    )
