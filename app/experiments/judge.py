"""What may be concluded: differences between arms, the winner, and which arm the guard stops.

Arms are compared by the mean logarithm of a request's tokens per second, so a difference of 0.1 is about ten per cent. With k
arms there are k (k - 1) / 2 pairs, and each gets that share of alpha: the chance that any statement made in the life of the
experiment is wrong is alpha in all.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import log
from typing import Any

from app.experiments.experiment import Arm, Experiment, without_arm
from app.experiments.sequences import MIN_UNITS, difference_radius, radius
from app.experiments.tally import ArmTally, Moments


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and the bounds that hold at all times at once."""

    estimate: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to an experiment; `detail` holds JSON values."""

    what: str
    detail: dict[str, Any] = field(default_factory=dict)
    at_s: float = field(default_factory=time.time)  # Unix time


def mean_interval(moments: Moments, alpha: float) -> Interval | None:
    """The interval of one arm's mean, alone; None before there are two units."""
    known = moments.estimate
    if known is None:
        return None
    half = float(radius(known, alpha))
    return Interval(known.mean, known.mean - half, known.mean + half)


def difference(experiment: Experiment, tallies: Mapping[str, ArmTally], one: str, other: str) -> Interval | None:
    """The interval of the difference `one` - `other` in log tokens per second; None before there are two units of each."""
    first, second = tallies[one].log_rate.estimate, tallies[other].log_rate.estimate
    if first is None or second is None:
        return None
    half = float(difference_radius(first, second, pair_alpha(experiment.alpha, len(experiment.arms))))
    return Interval(first.mean - second.mean, first.mean - second.mean - half, first.mean - second.mean + half)


def pair_alpha(alpha: float, num_arms: int) -> float:
    """Each pair's share of alpha."""
    return alpha / (num_arms * (num_arms - 1) / 2)


def is_ready(tally: ArmTally) -> bool:
    """Whether there are enough independent units to conclude anything; see `sequences`."""
    return tally.log_rate.effective_units >= MIN_UNITS


def review(experiment: Experiment, tallies: Mapping[str, ArmTally]) -> tuple[Experiment, list[Event]]:
    """The experiment after the guard and the search for a winner have looked, and what they did."""
    events: list[Event] = []
    for arm in experiment.in_play:
        found = _surely(experiment, tallies, arm.name, experiment.control)
        if _loses(experiment, arm, found):
            assert found is not None, "an arm loses by an interval"
            experiment = without_arm(experiment, arm.name)
            events.append(Event("stopped_by_guard", {"arm": arm.name, "against": experiment.control, **_figures(found)}))
    if experiment.winner is None and (name := _winner(experiment, tallies)) is not None:
        experiment = replace(experiment, winner=name)
        total = sum(tally.num_requests for tally in tallies.values())
        events.append(Event("winner", {"arm": name, "num_requests": total}))
    return experiment, events


def _surely(experiment: Experiment, tallies: Mapping[str, ArmTally], one: str, other: str) -> Interval | None:
    """The difference, once both arms are ready."""
    if one == other or not (is_ready(tallies[one]) and is_ready(tallies[other])):
        return None
    return difference(experiment, tallies, one, other)


def _loses(experiment: Experiment, arm: Arm, found: Interval | None) -> bool:
    return experiment.guard is not None and found is not None and found.high < log(1 - experiment.guard)


def _winner(experiment: Experiment, tallies: Mapping[str, ArmTally]) -> str | None:
    """The arm that is surely faster than every other one in play. The guard's victims have lost already."""
    for arm in experiment.in_play:
        others = [other.name for other in experiment.in_play if other.name != arm.name]
        found = [_surely(experiment, tallies, arm.name, other) for other in others]
        if all(one is not None and one.low > 0 for one in found):
            return arm.name
    return None


def _figures(found: Interval) -> dict[str, float]:
    return {"log_difference": found.estimate, "low": found.low, "high": found.high}

