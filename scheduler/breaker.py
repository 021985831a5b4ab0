"""Stepping down from a schedule that loses against plain decoding, and trying it again later.

A *ladder* is a tuple of schedule names, dearest first, plain decoding last. Every step is fed in as the tokens that it emitted,
the seconds that it took, and the price of plain decoding, in seconds per token at this moment (a measured one-row forward, or a
cost profile's). Over a window of steps the schedule's *speed* is ::

    sum(tokens * plain) / sum(seconds)          1: as fast as plain decoding, 2: twice as fast

One that is slower than that steps down. Two things keep noise from moving it: the loss must exceed a margin, and the mean
loss per step must exceed `certainty` standard errors of the window. A large loss is seen after `least` steps, a small one after
many.

Going up again. A rung that failed is tried again after `first_wait` steps, and after each further failure after `factor` times
as many, at most `longest_wait`. The trial lasts `trial` steps and is passed only if the rung gained the margin over plain
decoding *and* over what the rung below gave before: between losing and gaining the margin nothing moves (hysteresis). A failed
trial is one more failure. For every full window that a rung holds, one of its failures is forgotten.

Traps:
    Steps that share a forward with others' (prefill, other sequences) must be fed with their share of the seconds, and with the
    plain price at the same load.
    The price of plain decoding decides everything. It has to be measured under the load of now, not once at start.
    One step that took long because the machine paused counts at most as `pause` plain steps for each of its tokens.

    breaker = Breaker(ladder(schedules["treegraft"], schedules))
    breaker.current                                         # the schedule of the next step
    change = breaker.observe(tokens, seconds, plain_s)      # None, or what moved and why
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scheduler.registry import PLAIN
from scheduler.schedule import Schedule

LOST, FAILED, PASSED, RETRY = "slower than plain decoding", "trial failed", "trial passed", "trial"
"""Why something moved; bounded, for metric labels."""

_CHEAPER = ("small", "ngram", PLAIN)


@dataclass(frozen=True, slots=True)
class BreakerRule:
    """When a schedule steps down and when it is tried again. Counts are decoding steps."""

    window: int = 64  # newest steps that are judged
    least: int = 12  # steps below which nothing is judged
    margin: float = 0.05  # share of plain decoding's speed that a loss, or a gain in a trial, must exceed
    certainty: float = 2.5  # standard errors that the mean loss must exceed
    trial: int = 24  # steps of a trial
    first_wait: int = 64  # steps before the first trial
    factor: float = 2.0  # by which the wait grows with every failure
    longest_wait: int = 4096
    pause: float = 8.0  # plain steps per token that a step counts at most

    def __post_init__(self) -> None:
        for name in ("window", "least", "trial", "first_wait", "longest_wait"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.least > self.window or self.trial > self.window:
            raise ValueError(f"least = {self.least} and trial = {self.trial} must fit into window = {self.window}")
        if self.longest_wait < self.first_wait:
            raise ValueError(f"longest_wait = {self.longest_wait} must be at least first_wait = {self.first_wait}")
        if not 0.0 <= self.margin < 1.0:
            raise ValueError(f"margin must be in [0, 1), got {self.margin}")
        for name, low in (("certainty", 0.0), ("factor", 1.0), ("pause", 1.0)):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= low):
                raise ValueError(f"{name} must be finite and at least {low:g}, got {getattr(self, name)}")

    def wait(self, failures: int) -> int:
        """Steps before a rung that failed so often, at least once, is tried again."""
        # The power of a large number of failures does not fit a float.
        growth = min((failures - 1) * math.log(self.factor), math.log(self.longest_wait))
        return min(round(self.first_wait * math.exp(growth)), self.longest_wait)


@dataclass(frozen=True, slots=True)
class Change:
    """The breaker moved."""

    step: int  # observed steps so far
    before: str  # names of schedules
    after: str
    reason: str  # LOST, FAILED, PASSED (then before == after) or RETRY
    detail: str  # for people: the numbers behind it


@dataclass(frozen=True, slots=True)
class BreakerState:
    """What a breaker shows of itself."""

    current: str
    in_trial: bool
    steps: int  # observed in all
    speed: float | None  # of the window, relative to plain decoding; None on an empty one
    failures: Mapping[str, int]  # by rung, that are not forgotten
    retry_in: Mapping[str, int]  # steps until a rung above the current one may be tried again


class Breaker:
    """The state of one ladder: of a server, a kind of request or a sequence, as its owner likes. One owner writes."""

    def __init__(self, rungs: Sequence[str], rule: BreakerRule | None = None) -> None:
        """Begin on the first rung. ValueError for no rungs, or for one that is there twice."""
        if not rungs or len(set(rungs)) != len(rungs):
            raise ValueError(f"rungs must be distinct names, dearest first, got {tuple(rungs)}")
        self.rungs = tuple(rungs)
        self.rule = rule or BreakerRule()
        self._at = 0
        self._steps = 0
        self._trial_left: int | None = None
        self._held = 0  # steps on this rung since it failed last or since its trial
        self._below: float | None = None  # speed of the rung below when the trial began
        self._window: deque[tuple[float, float]] = deque(maxlen=self.rule.window)  # seconds of plain decoding, own seconds
        self._failures = dict.fromkeys(self.rungs, 0)
        self._due = dict.fromkeys(self.rungs, 0)

    @property
    def current(self) -> str:
        """The schedule of the next step."""
        return self.rungs[self._at]

    @property
    def speed(self) -> float | None:
        """Of the current rung over its window, relative to plain decoding; None before its first step."""
        own = sum(seconds for _, seconds in self._window)
        return sum(plain for plain, _ in self._window) / own if own else None

    @property
    def state(self) -> BreakerState:
        """For metrics and an admin route."""
        waiting = {rung: max(self._due[rung] - self._steps, 0) for rung in self.rungs[: self._at]}
        return BreakerState(
            self.current, self._trial_left is not None, self._steps, self.speed, dict(self._failures), waiting
        )

    def observe(self, tokens: float, seconds: float, plain_s: float) -> Change | None:
        """One step of the current schedule is over; what moved, if something did.

        Args:
            tokens: emitted by the step, the target's own one included.
            seconds: that it took, drafting included.
            plain_s: seconds that plain decoding takes per token now.

        What no clock can mean (NaN, infinite, not positive) is passed over.
        """
        values = (tokens, seconds, plain_s)
        if not all(math.isfinite(value) and value > 0 for value in values):
            return None
        self._steps += 1
        plain = tokens * plain_s
        self._window.append((plain, min(seconds, self.rule.pause * plain)))
        if self._trial_left is not None:
            return self._on_trial()
        if self._at + 1 < len(self.rungs) and self._loses():
            return self._step_down(LOST)
        self._held += 1
        if self._held % self.rule.window == 0 and self._failures[self.current]:
            self._failures[self.current] -= 1
        return self._step_up()

    def _on_trial(self) -> Change | None:
        assert self._trial_left is not None
        self._trial_left -= 1
        if self._loses():
            return self._step_down(FAILED)
        if self._trial_left:
            return None
        speed = self.speed
        assert speed is not None, "a trial has steps"
        if speed < (1 + self.rule.margin) * max(1.0, self._below or 1.0):
            return self._step_down(FAILED)
        self._trial_left = None
        return Change(self._steps, self.current, self.current, PASSED, self._compared())

    def _loses(self) -> bool:
        """Slower than plain decoding by more than margin and noise."""
        count = len(self._window)
        if count < self.rule.least:
            return False
        gains = [plain - own for plain, own in self._window]
        mean = sum(gains) / count
        if mean >= -self.rule.margin * sum(plain for plain, _ in self._window) / count:
            return False
        variance = sum((gain - mean) ** 2 for gain in gains) / max(count - 1, 1)
        return mean < -self.rule.certainty * math.sqrt(variance / count)

    def _step_down(self, reason: str) -> Change:
        before, detail = self.current, self._compared()
        self._failures[before] += 1
        wait = self.rule.wait(self._failures[before])
        self._due[before] = self._steps + wait
        self._move(self._at + 1)
        return Change(self._steps, before, self.current, reason, f"{detail}; tried again after {wait} steps")

    def _step_up(self) -> Change | None:
        """Begin the trial of the rung above, if there is one and its time has come."""
        if self._at == 0 or self._steps < self._due[self.rungs[self._at - 1]]:
            return None
        # Plain decoding is its own measure; a rung of drafters has to be known before it is compared with.
        is_plain = self._at + 1 == len(self.rungs)
        if not is_plain and len(self._window) < self.rule.least:
            return None
        before, below = self.current, 1.0 if is_plain else self.speed
        self._move(self._at - 1)
        self._trial_left, self._below = self.rule.trial, below
        return Change(self._steps, before, self.current, RETRY, f"for {self.rule.trial} steps")

    def _move(self, rung: int) -> None:
        self._at = rung
        self._window.clear()
        self._trial_left, self._below, self._held = None, None, 0

    def _compared(self) -> str:
        text = f"{self.speed or 0.0:.2f} times as fast as plain decoding over {len(self._window)} steps"
        if self._trial_left is not None and self._below is not None and self._below > 1.0:
            text += f", {self.rungs[self._at + 1]} {self._below:.2f}"
        return text


def ladder(schedule: Schedule, offered: Mapping[str, Schedule]) -> tuple[str, ...]:
    """The rungs below `schedule`, itself first: the small drafter alone, prompt lookup, plain decoding, as far as offered.

    What drafts with the same drafters as a rung above it would change nothing, or be dearer than that, and is left out.
    """
    own = set(schedule.drafters.values())
    below = [name for name in _CHEAPER if name in offered]
    for index, name in enumerate(below):
        if set(offered[name].drafters.values()) == own:
            below = below[index + 1 :]
            break
    distinct: dict[frozenset[str], str] = {}
    for name in below:
        if set(offered[name].drafters.values()) == own:
            continue  # the same under another name: where the small drafter is lookup, `small` is `ngram`
        distinct.setdefault(frozenset(offered[name].drafters.values()), name)
    return (schedule.name, *distinct.values())
