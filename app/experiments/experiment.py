"""What an experiment is: arms with weights, and the changes it can go through.

Values are frozen; a change is a new value, which is written to disk first and takes effect by one assignment. So nobody
ever sees half a change.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from engine.request import RequestError

MAX_ARMS = 8
MAX_BUDGET = 511  # nodes per step, root included: what a request may ask for too
PLAIN = "ar"
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,39}")


class State(StrEnum):
    """Where an experiment is in its life; only a running one gets requests."""

    RUNNING = "running"
    STOPPED = "stopped"
    PROMOTED = "promoted"  # ended, and the schedule of one arm was made the server's default


class Mode(StrEnum):
    """Who sets the weights."""

    FIXED = "fixed"  # people
    BANDIT = "bandit"  # Thompson sampling on tokens per second


@dataclass(frozen=True, slots=True)
class Arm:
    """One side of an experiment."""

    name: str
    schedule: str
    budget: int | None = None  # verified nodes per step, root included; None: the schedule's own
    weight: float = 1.0  # share of the requests, relative to the other arms' weights
    stopped: bool = False  # by the guard, for good


def arm_label(experiment: str, arm: str) -> str:
    """Experiment and arm in one word; neither name holds a slash."""
    return f"{experiment}/{arm}"


@dataclass(frozen=True, slots=True)
class Experiment:
    """Arms, the rules they are judged by, and how far it has come. Times are Unix seconds."""

    name: str
    arms: tuple[Arm, ...]
    control: str  # the arm that the others are compared with
    salt: str  # hexadecimal; with the name it decides who gets which arm
    created_s: float
    mode: Mode = Mode.FIXED
    alpha: float = 0.05  # chance of any wrong statement about differences, however often one looks
    guard: float | None = 0.05  # an arm surely that much slower than the control is stopped; None: no guard
    floor: float = 0.05  # least share of an arm under a bandit
    sticky: bool = True  # the same key gets the same arm
    state: State = State.RUNNING
    ended_s: float | None = None
    winner: str | None = None
    promoted: str | None = None

    def arm(self, name: str, *, param: str = "arm") -> Arm:
        """The arm of that name; RequestError if there is none."""
        for arm in self.arms:
            if arm.name == name:
                return arm
        names = ", ".join(arm.name for arm in self.arms)
        raise RequestError(f"{param}: experiment {self.name!r} has no arm {name[:40]!r}; it has {names}", param=param)

    @property
    def shares(self) -> dict[str, float]:
        """Expected share of the requests by arm; sums to 1."""
        total = sum(arm.weight for arm in self.arms)
        return {arm.name: arm.weight / total for arm in self.arms}

    @property
    def in_play(self) -> tuple[Arm, ...]:
        """The arms that the guard has not stopped."""
        return tuple(arm for arm in self.arms if not arm.stopped)

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON values; :func:`from_json` reads it back."""
        return asdict(self)


def from_json(data: Mapping[str, Any]) -> Experiment:
    """The experiment that :meth:`Experiment.to_json` wrote."""
    arms = tuple(Arm(**arm) for arm in data["arms"])
    return Experiment(**{**data, "arms": arms, "mode": Mode(data["mode"]), "state": State(data["state"])})


def check(experiment: Experiment, schedules: Mapping[str, object], lossy: Collection[str] = ()) -> None:
    """RequestError, naming the parameter, for an experiment that could not be run on these schedules, or might change texts."""
    _check_name(experiment.name, "name")
    arms = experiment.arms
    if not 2 <= len(arms) <= MAX_ARMS:
        raise RequestError(f"arms: an experiment has 2 to {MAX_ARMS} arms, not {len(arms)}", param="arms")
    names = [arm.name for arm in arms]
    for index, arm in enumerate(arms):
        here = f"arms[{index}]"
        _check_name(arm.name, f"{here}.name")
        if names.index(arm.name) != index:
            raise RequestError(f"{here}.name: there are two arms {arm.name!r}", param=f"{here}.name")
        if arm.schedule not in schedules:
            message = f"{here}.schedule: there is no schedule {arm.schedule[:40]!r}; there are {', '.join(sorted(schedules))}"
            raise RequestError(message, param=f"{here}.schedule")
        if arm.schedule in lossy:
            message = f"{here}.schedule: {arm.schedule} may change the text, which an experiment must not do"
            raise RequestError(message, param=f"{here}.schedule")
        largest = 1 if arm.schedule == PLAIN else MAX_BUDGET
        if arm.budget is not None and not 1 <= arm.budget <= largest:
            message = f"{here}.budget: {arm.schedule} takes a budget of 1 to {largest}, not {arm.budget}"
            raise RequestError(message, param=f"{here}.budget")
    _check_weights({arm.name: arm.weight for arm in arms})
    experiment.arm(experiment.control, param="control")
    if not 0 < experiment.alpha <= 0.5:
        raise RequestError(f"alpha: must be above 0 and at most 0.5, not {experiment.alpha}", param="alpha")
    if experiment.guard is not None and not 0 <= experiment.guard < 1:
        raise RequestError(f"guard: must be at least 0 and below 1, not {experiment.guard}", param="guard")
    if not 0 <= experiment.floor <= 1 / len(arms):
        message = f"floor: must be between 0 and 1/{len(arms)}, one arm's share, not {experiment.floor}"
        raise RequestError(message, param="floor")


def with_weights(experiment: Experiment, weights: Mapping[str, float]) -> Experiment:
    """The experiment with these arms' weights changed; the others keep theirs. RequestError for what makes no sense."""
    for name, weight in weights.items():
        if experiment.arm(name, param="weights").stopped and weight:
            raise RequestError(f"weights: arm {name!r} was stopped by the guard; its weight stays 0", param="weights")
    arms = tuple(replace(arm, weight=float(weights.get(arm.name, arm.weight))) for arm in experiment.arms)
    _check_weights({arm.name: arm.weight for arm in arms})
    return replace(experiment, arms=arms)


def without_arm(experiment: Experiment, name: str) -> Experiment:
    """The experiment with one arm stopped; if nothing else had weight, the control takes all."""
    arms = tuple(replace(arm, weight=0.0, stopped=True) if arm.name == name else arm for arm in experiment.arms)
    if not any(arm.weight for arm in arms):
        arms = tuple(replace(arm, weight=1.0) if arm.name == experiment.control else arm for arm in arms)
    return replace(experiment, arms=arms)


def ended(experiment: Experiment, at_s: float, promoted: str | None = None) -> Experiment:
    """The experiment after its end; `promoted` is the arm that became the default."""
    return replace(
        experiment,
        state=State.STOPPED if promoted is None else State.PROMOTED,
        ended_s=experiment.ended_s or at_s,
        promoted=promoted,
    )


def _check_name(name: str, param: str) -> None:
    if not _NAME.fullmatch(name):
        message = f"{param}: must be 1 to 40 of a-z, 0-9, '.', '_' and '-', beginning with a letter or digit"
        raise RequestError(message, param=param)


def _check_weights(weights: Mapping[str, float]) -> None:
    for name, weight in weights.items():
        if not (math.isfinite(weight) and (weight == 0 or 1e-6 <= weight <= 1e6)):
            message = f"weights: the weight of {name!r} must be 0, or between 0.000001 and 1000000, not {weight}"
            raise RequestError(message, param="weights")
    if not any(weights.values()):
        raise RequestError("weights: at least one arm needs a weight above 0", param="weights")
