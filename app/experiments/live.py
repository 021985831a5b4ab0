"""The experiments of a running server: who gets which arm now, and every change that people, guard and bandit make.

Changes are written to disk first and then take effect by one assignment, so a call sees the state before or the state after.
:meth:`Experiments.assign` and everything else that the event loop calls reads that one reference and waits for nobody. Requests
that are being answered keep their arm whatever happens.
"""

from __future__ import annotations

import logging
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from app.errors import StateNotWritten, UnknownExperiment
from app.experiments.assign import choose, unit_of
from app.experiments.bandit import RENEW_EVERY, thompson_weights
from app.experiments.experiment import Experiment, Mode, State, check, ended, with_weights
from app.experiments.judge import Event, review
from app.experiments.outcome import Assignment, Outcome
from app.experiments.recorder import Recorder
from app.experiments.report import overview, public_view, view
from app.experiments.store import Promotion, Store
from app.experiments.tally import ArmTally, UnitSums
from engine.request import RequestError

_ROWS_PENDING = 5_000  # outcomes kept for a file that cannot be written just now
_FLUSH_S = 1.0  # how long a report waits for requests that have just ended
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Default:
    """What a request gets that has no arm and names no schedule."""

    schedule: str
    budget: int | None = None  # None: the schedule's own


class Experiments:
    """All experiments of one server; at most one of them is running."""

    def __init__(
        self,
        store: Store,
        schedules: Mapping[str, object],
        default_schedule: str,
        *,
        configured: str | None = None,
        on_default: Callable[[str], None] = lambda schedule: None,
        on_running: Callable[[Experiment], None] = lambda experiment: None,
        lossy: Collection[str] = (),
        persistent: bool = True,
    ) -> None:
        """Take up what `store` holds.

        Args:
            store: the file; closed by :meth:`close`.
            schedules: those the server offers, by name.
            default_schedule: what counts without a promotion.
            configured: the setting `schedule`, which a promotion replaces until it is changed.
            on_default: told of every schedule that becomes the default.
            on_running: told of every experiment before its first request.
            lossy: those of the schedules that may change a text; no arm can have one.
            persistent: whether `store` outlives the process; shown only.
        """
        self._store, self._schedules, self._configured = store, schedules, configured
        self._on_default, self._on_running, self._lossy, self._persistent = on_default, on_running, lossy, persistent
        self._lock = threading.Lock()  # for everything below but `_running` and `default`, which are read without
        saved = store.load()
        self._all = {one.name: one for one in saved.experiments}
        self._events, self._tallies, self._promotion = saved.events, saved.tallies, saved.promotion
        self._rows: list[Outcome] = []  # not written yet
        self._dirty: dict[tuple[str, str], ArmTally] = {}
        self._dirty_units: dict[tuple[str, str, str], UnitSums] = {}
        self._unsaved: list[tuple[str, Event]] = []
        self._is_unsaved = False  # the running experiment was changed by guard or bandit, not on disk yet
        self._until_renewal = RENEW_EVERY
        self.num_write_failures = self.num_rows_lost = 0
        self.default = self._taken_up(default_schedule)
        self._running = next((one for one in saved.experiments if one.state is State.RUNNING), None)
        self._stop_if_impossible()
        if self._running is not None:
            on_running(self._running)
        self._recorder = Recorder(self._absorb)

    # ---- event loop and engine thread ---------------------------------------------------------------------------------

    def assign(self, key: str | None, call: str | None = None) -> Assignment | None:
        """The arm of a call; None while nothing runs. `call` names a call of several requests that has no key."""
        running = self._running
        if running is None:
            return None
        whose = key if key is not None else call
        unit = "" if whose is None else unit_of(running, whose)
        return Assignment(running.name, choose(running, key), unit, self._recorder.put)

    # ---- any thread that may wait -------------------------------------------------------------------------------------

    def start(self, experiment: Experiment) -> dict[str, Any]:
        """Start an experiment; `salt` and `created_s` are filled in. RequestError for one that cannot be run."""
        experiment = replace(experiment, salt=secrets.token_hex(16), created_s=time.time(), state=State.RUNNING)
        check(experiment, self._schedules, self._lossy)
        with self._lock:
            if experiment.name in self._all:
                raise RequestError(f"name: there is an experiment {experiment.name!r} already", param="name")
            if self._running is not None:
                message = f"name: the experiment {self._running.name!r} is running; one at a time, so stop it first"
                raise RequestError(message, param="name")
            self._write(experiment, Event("started"))
            self._tallies[experiment.name] = {arm.name: ArmTally() for arm in experiment.arms}
            self._until_renewal = RENEW_EVERY
            self._on_running(experiment)
            self._running = experiment
            return self._view(experiment.name)

    def stop(self, name: str) -> dict[str, Any]:
        """End a running experiment; from now on requests get the default."""
        with self._lock:
            experiment = ended(self._of(name, running=True), time.time())
            self._write(experiment, Event("stopped"))
            self._running = None
            return self._view(name)

    def set_weights(self, name: str, weights: Mapping[str, float]) -> dict[str, Any]:
        """Change the weights of some arms of a running experiment."""
        with self._lock:
            experiment = self._of(name, running=True)
            if experiment.mode is Mode.BANDIT:
                raise RequestError("weights: a bandit sets them itself", param="weights")
            changed = with_weights(experiment, weights)
            self._write(changed, Event("weights", {arm.name: arm.weight for arm in changed.arms}))
            self._running = changed
            return self._view(name)

    def promote(self, name: str, arm_name: str | None = None) -> dict[str, Any]:
        """Make an arm's schedule and budget the server's default, by default the winner's; ends a running experiment."""
        with self._lock:
            experiment = self._of(name)
            if arm_name is None and experiment.winner is None:
                raise RequestError(f"arm: the experiment {name!r} has no winner (yet); name the arm", param="arm")
            arm = experiment.arm(arm_name or experiment.winner or "")
            if arm.schedule not in self._schedules:
                raise RequestError(f"arm: there is no schedule {arm.schedule!r} any more", param="arm")
            was_running = experiment.state is State.RUNNING
            experiment = ended(experiment, time.time(), promoted=arm.name)
            promotion = Promotion(arm.schedule, arm.budget, name, arm.name, self._configured)
            self._write(experiment, Event("promoted", {"arm": arm.name, "schedule": arm.schedule}), promotion)
            self._promotion = promotion
            self._set_default(promotion)
            if was_running:
                self._running = None
            return self._view(name)

    def overview(self) -> dict[str, Any]:
        """Everything, for the admin API: the newest experiment first, with all that has been counted until now."""
        self._recorder.flush(_FLUSH_S)
        with self._lock:
            promotion = self._promotion
            books = {
                "num_queued": self._recorder.num_queued,
                "num_dropped": self._recorder.num_dropped,
                "num_write_failures": self.num_write_failures,
                "num_rows_lost": self.num_rows_lost,
            }
            return overview(
                [self._view(name) for name in reversed(self._all)],
                running=None if self._running is None else self._running.name,
                persistent=self._persistent,
                default={"schedule": self.default.schedule, "budget": self.default.budget},
                promoted=None if promotion is None else {"experiment": promotion.experiment, "arm": promotion.arm},
                books=books,
            )

    def one(self, name: str) -> dict[str, Any]:
        """One experiment, as in the overview."""
        self._recorder.flush(_FLUSH_S)
        with self._lock:
            self._of(name)
            return self._view(name)

    def public(self) -> list[dict[str, Any]]:
        """What everybody may know, the newest experiment first."""
        with self._lock:
            return [public_view(one, self._tallies[one.name]) for one in reversed(self._all.values())]

    def close(self) -> None:
        """Write what waits, and close the file."""
        self._recorder.close()
        with self._lock:
            self._store.close()

    # ---- under the lock -----------------------------------------------------------------------------------------------

    def _view(self, name: str) -> dict[str, Any]:
        return view(self._all[name], self._tallies[name], self._events.get(name, []))

    def _of(self, name: str, *, running: bool = False) -> Experiment:
        experiment = self._all.get(name)
        if experiment is None:
            raise UnknownExperiment(f"There is no experiment {name[:40]!r}.", param="name", code="not_found")
        if running and experiment.state is not State.RUNNING:
            raise RequestError(f"name: the experiment {name!r} has ended", param="name")
        return experiment

    def _write(self, experiment: Experiment, event: Event, promotion: Promotion | None = None) -> None:
        """Put a change on disk, then into the books. StateNotWritten if that fails, and then nothing has changed."""
        events = [*self._unsaved, (experiment.name, event)]
        try:
            self._store.save(experiment, events, promotion)
        except sqlite3.Error as error:
            self._count_failure(error)
            raise StateNotWritten(f"The change could not be written to disk ({error}), so it was not made.") from error
        self._unsaved = []
        if self._running is None or self._running.name == experiment.name:
            self._is_unsaved = False
        self._book(experiment, [event])

    def _book(self, experiment: Experiment, events: Iterable[Event]) -> None:
        self._all[experiment.name] = experiment
        for event in events:
            self._events.setdefault(experiment.name, []).append(event)
            log.info("experiment %s: %s %s", experiment.name, event.what, event.detail or "")

    def _set_default(self, promotion: Promotion) -> None:
        self.default = Default(promotion.schedule, promotion.budget)
        self._on_default(promotion.schedule)

    def _taken_up(self, default_schedule: str) -> Default:
        """The default at the start: a promotion's, unless the setting it replaced has been changed since."""
        promotion = self._promotion
        if promotion is None:
            return Default(default_schedule)
        if promotion.over != self._configured or promotion.schedule not in self._schedules:
            why = "the setting was changed" if promotion.over != self._configured else "it is not there any more"
            log.warning("the promoted schedule %s is not used: %s", promotion.schedule, why)
            self._promotion = None
            return Default(default_schedule)
        log.info("default schedule %s, promoted by experiment %s", promotion.schedule, promotion.experiment)
        self._on_default(promotion.schedule)
        return Default(promotion.schedule, promotion.budget)

    def _stop_if_impossible(self) -> None:
        """End an experiment that was running when the server was, if an arm's schedule is not offered any more."""
        running = self._running
        missing = [arm.schedule for arm in running.arms if arm.schedule not in self._schedules] if running else []
        if running is not None and missing:
            log.warning("experiment %s ends: there is no schedule %s any more", running.name, missing[0])
            self._write(ended(running, time.time()), Event("stopped", {"missing_schedule": missing[0]}))
            self._running = None

    # ---- the recorder's thread ----------------------------------------------------------------------------------------

    def _absorb(self, batch: list[Outcome]) -> bool:
        """Count a batch, let guard and bandit look, and write. True if something could not be written."""
        with self._lock:
            for outcome in batch:
                self._count(outcome)
            if batch:
                self._look()
            return not self._write_books()

    def _count(self, outcome: Outcome) -> None:
        tally = self._tallies[outcome.experiment][outcome.arm]
        tally.add(outcome)
        self._rows.append(outcome)
        self._dirty[outcome.experiment, outcome.arm] = tally
        if outcome.unit in tally.units:
            self._dirty_units[outcome.experiment, outcome.arm, outcome.unit] = tally.units[outcome.unit]
        if self._running is not None and outcome.experiment == self._running.name:
            self._until_renewal -= outcome.rate is not None

    def _look(self) -> None:
        """Guard, winner and bandit. What they change counts at once, written or not: a full disk makes a bad arm no better."""
        running = self._running
        if running is None:
            return
        tallies = self._tallies[running.name]
        changed, events = review(running, tallies)
        if running.mode is Mode.BANDIT and (self._until_renewal <= 0 or events):
            seed = sum(tally.num_requests for tally in tallies.values())
            changed = with_weights(changed, thompson_weights(changed, tallies, seed))
            self._until_renewal = RENEW_EVERY
        if changed is not running:
            self._book(changed, events)
            self._unsaved += [(changed.name, event) for event in events]
            self._is_unsaved, self._running = True, changed

    def _write_books(self) -> bool:
        try:
            if self._is_unsaved and self._running is not None:
                self._store.save(self._running, self._unsaved)
                self._unsaved, self._is_unsaved = [], False
            if self._rows or self._dirty:
                self._store.add(self._rows, self._dirty, self._dirty_units)
                self._rows, self._dirty, self._dirty_units = [], {}, {}
        except sqlite3.Error as error:
            self._count_failure(error)
            lost = self._rows[:-_ROWS_PENDING]
            self.num_rows_lost += len(lost)
            del self._rows[: len(lost)]
            return False
        return True

    def _count_failure(self, error: sqlite3.Error) -> None:
        self.num_write_failures += 1
        if self.num_write_failures.bit_count() == 1:  # 1, 2, 4, 8, …
            log.error("experiments could not be written (%d times by now): %s", self.num_write_failures, error)
