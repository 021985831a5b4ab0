"""Which schedule a sequence decodes with in this step: the one it asked for, unless that loses against plain decoding.

A schedule whose amount of drafting is left to prices can still lose where prices mislead: a model pair that never agrees, a
clock that lies. Each such schedule has a breaker (`scheduler.breaker`) for the whole server, fed with what its steps gave and
took; while it is open, sequences decode with the next rung of its ladder. What loses with eight sequences in a step may gain
for one alone, so a breaker counts for loads like the one under which it opened. The text is the same with every rung. A
schedule with a fixed budget is what somebody asked for whatever it costs, and has none.

The ladder holds only schedules whose drafters follow the sequence anyway: one that begins to listen in mid-text would have
missed the hidden states of what came before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from engine.sequence import Sequence as TokenSequence
from scheduler.auto_budget import AutoBudget
from scheduler.breaker import Breaker, BreakerRule, BreakerState, ladder
from scheduler.schedule import Schedule
from scheduler.tuning import ArmState, Tuner
from tree.policies.talon import Talon

log = logging.getLogger(__name__)

Told = Callable[[str, str, str], None]
"""Who is told when a breaker moves: (schedule, schedule it decodes with from now on, reason)."""


@dataclass(frozen=True, slots=True)
class PriceState:
    """What prices and breakers say now, for people to look at."""

    drift: Mapping[str, float]  # model -> measured over predicted milliseconds of its forwards, lately
    speedup: Mapping[str, float]  # schedule -> tokens per millisecond over plain decoding's, lately; 1 before anything is known
    rung: Mapping[str, int]  # schedule -> steps down its ladder at the load of now; 0: it decodes as asked
    tuned: Sequence[ArmState]  # of the tuner of TALON, if there is one


class Steering:
    """The breakers of all schedules of one engine, and the tuner of those that grow by TALON. The engine's thread owns it."""

    def __init__(
        self,
        schedules: Mapping[str, Schedule],
        free: frozenset[str],
        *,
        rule: BreakerRule | None = None,
        tuner: Tuner | None = None,
        told: Told = lambda schedule, to, reason: None,
    ) -> None:
        """`free` are the drafters that can join in mid-text, since they read nothing but tokens."""
        self._schedules = schedules
        self._told = told
        self.tuner = tuner
        self._rule = rule
        self._ladders: dict[str, tuple[str, ...]] = {}
        self._breakers: dict[tuple[str, int], Breaker] = {}  # by schedule and load
        self._load = 1
        for schedule in schedules.values():
            if not schedule.is_auto:
                continue
            known = free.union(schedule.drafters.values())
            offered = {name: other for name, other in schedules.items() if known.issuperset(other.drafters.values())}
            rungs = ladder(schedule, offered)
            if len(rungs) > 1:
                self._ladders[schedule.name] = rungs

    def begin(self, sequences: int) -> None:
        """A step of so many sequences. Loads are told apart by powers of two: 1, 2 to 3, 4 to 7, and so on."""
        self._load = max(sequences, 1).bit_length()

    def steer(self, sequence: TokenSequence) -> None:
        """Set what `sequence` decodes with from this step on."""
        asked = sequence.asked
        name = asked.name
        if asked.is_auto and name in self._ladders:
            name = self._breaker(name).current
        if name != sequence.schedule.name:
            sequence.schedule = asked if name == asked.name else self._schedules[name]
        if name != asked.name:
            sequence.stats.fallbacks[name] = sequence.stats.fallbacks.get(name, 0) + 1
        elif self.tuner is not None and asked.is_auto and isinstance(asked.policy, Talon):
            sequence.schedule = replace(asked, policy=self.tuner.arm.applied(asked.policy))

    def stepped(self, schedule: str, *, tokens: int, ms: float, plain_ms: float) -> None:
        """Sequences that asked for `schedule` emitted `tokens` in `ms`, their share of a step.

        `plain_ms` is what plain decoding would have taken per token. Not for steps that read prompts.
        """
        if schedule in self._ladders:
            breaker = self._breaker(schedule)
            change = breaker.observe(tokens, ms / 1000, plain_ms / 1000)
            if change is not None:
                log.info("schedule %s: %s to %s, %s: %s", schedule, change.before, change.after, change.reason, change.detail)
                self._told(schedule, change.after, change.reason)
        if self.tuner is not None and isinstance(self._schedules[schedule].policy, Talon):
            self.tuner.observe(tokens=tokens, seconds=ms / 1000, plain_s=plain_ms / 1000)

    def price_state(self, auto: AutoBudget) -> PriceState:
        """A snapshot; from any thread, since it only reads numbers that are replaced as a whole."""
        rungs = {}
        for name, ladder_of in self._ladders.items():
            breaker = self._breakers.get((name, self._load))
            rungs[name] = 0 if breaker is None else ladder_of.index(breaker.current)
        return PriceState(
            drift={model: auto.costs.drift(model) for model in auto.costs.profile.models},
            speedup={name: auto.speedup(name) for name in rungs},
            rung=rungs,
            tuned=() if self.tuner is None else tuple(self.tuner.states),
        )

    def states(self) -> dict[str, BreakerState]:
        """Every schedule's breaker at the load of now."""
        return {name: self._breaker(name).state for name in self._ladders}

    def _breaker(self, schedule: str) -> Breaker:
        key = (schedule, self._load)
        if key not in self._breakers:
            self._breakers[key] = Breaker(self._ladders[schedule], self._rule)
        return self._breakers[key]
