"""Confidence sequences: intervals that hold at all times at once, so that looking, and stopping when one likes, is allowed.

An ordinary 95 % interval is right at one time fixed in advance. Looked at after every request it excludes the truth sooner or
later. Here the mixture boundary of Robbins is used, in the asymptotic form for means of any distribution with a finite
variance (Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas, arXiv 2103.06476, theorem 2.2): with t observations of standard
deviation s, a mean is known to within

    s * sqrt(2 (t r + 1) / (t**2 r) * log(sqrt(t r + 1) / alpha))

at all t together, where r only says at which t the sequence is tightest. *Asymptotic*: the first few dozen observations are
not covered, see :data:`MIN_UNITS`.

For the difference of two arms the boundaries' supermartingales, one per arm and each in its arm's own time, are multiplied; the
product is again one (in each step only one factor moves). The pairs of means that it does not rule out are an ellipse, and
its shadow on the difference is the interval. That costs about a quarter more requests than a rule for equal shares fixed in
advance, and in return holds when weights change while it runs, because of what was seen or not: under a bandit and a guard too.

All functions take floats or arrays of one shape.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

MIN_UNITS = 30  # independent units of an arm below which nothing is concluded from it
BEST_AT = 300  # observations of an arm at which its sequence is tightest


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean as far as it is known."""

    mean: Any
    variance: Any  # of the mean, not of one observation
    count: Any  # as many independent observations as would give that variance


def radius(estimate: Estimate, alpha: float) -> Any:
    """Half the width of the interval of one mean; the chance that any of them misses is `alpha`."""
    tight = _tightness(alpha) * estimate.count
    return np.sqrt(estimate.variance * (1 + 1 / tight) * (2 * math.log(1 / alpha) + np.log1p(tight)))


def difference_radius(one: Estimate, other: Estimate, alpha: float) -> Any:
    """Half the width of the interval of ``one.mean - other.mean``, for arms whose shares may depend on what was seen."""
    tight_one, tight_other = (_tightness(alpha) * estimate.count for estimate in (one, other))
    spread = one.variance * (1 + 1 / tight_one) + other.variance * (1 + 1 / tight_other)
    return np.sqrt(spread * (2 * math.log(1 / alpha) + np.log1p(tight_one) + np.log1p(tight_other)))


def _tightness(alpha: float) -> float:
    """The mixture's variance that makes a sequence tightest at about `BEST_AT` observations (2103.06476, appendix)."""
    return (2 * math.log(1 / alpha) + math.log(1 + 2 * math.log(1 / alpha))) / BEST_AT
