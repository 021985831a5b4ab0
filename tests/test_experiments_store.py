"""Experiments on disk: what survives a restart or a crash, and that no trouble with the disk fails a request."""

from __future__ import annotations

import logging
import math
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from app.errors import StateNotWritten, UnknownExperiment
from app.experiments import store as store_module
from app.experiments.experiment import Arm, Experiment, Mode
from app.experiments.live import Default, Experiments
from app.experiments.outcome import Assignment, Outcome, outcome_of
from app.experiments.recorder import Recorder
from app.experiments.store import FILE, Store
from engine.request import DrafterCount, FinishReason, RequestError, RequestStats

ROOT = Path(__file__).resolve().parent.parent
SCHEDULES = {"ar": 1, "tree": 2, "chain": 3}
ARMS = (Arm("control", "ar"), Arm("tree", "tree", 16))


def trial(name: str = "trial", arms: tuple[Arm, ...] = ARMS, **options: Any) -> Experiment:
    return Experiment(name, arms, arms[0].name, "", 0.0, **options)


@contextmanager
def opened(folder: Path | None, schedules: dict[str, int] = SCHEDULES, **options: Any) -> Iterator[Experiments]:
    live = Experiments(Store(folder), schedules, "chain", persistent=folder is not None, **options)
    try:
        yield live
    finally:
        live.close()


def finish(assignment: Assignment, rate: float = 40.0, reason: FinishReason = FinishReason.STOP) -> None:
    """End a request of 21 tokens in 11 steps that had this arm."""
    drafters = {"small": DrafterCount(20, 10, 22)}
    end = 1.5 + 21 * 10 / 11 / rate
    stats = RequestStats(assignment.arm.schedule, 7, 21, 11, drafters=drafters)
    stats.arrived_s, stats.first_token_s, stats.finished_s = 1.0, 1.5, end
    assignment.record(outcome_of(assignment, stats, reason))


def run_some(live: Experiments, num: int = 40) -> None:
    for number in range(num):
        assignment = live.assign(f"user:{number % 12}")
        assert assignment is not None
        finish(assignment, 40 + number % 7)


def without_books(overview: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in overview.items() if name != "books"}


def test_everything_is_there_again_after_a_restart(tmp_path: Path) -> None:
    """State, report, events, the default, and who gets which arm."""
    with opened(tmp_path) as live:
        live.start(trial())
        arms = [live.assign(f"user:{number}").arm.name for number in range(50)]
        run_some(live)
        live.set_weights("trial", {"tree": 3})
        live.set_weights("trial", {"tree": 1})
        before = live.overview()
        assert before["persistent"] and before["running"] == "trial"
        assert sum(arm["num_requests"] for arm in before["data"][0]["report"]["arms"]) == 40
    with opened(tmp_path) as live:
        assert without_books(live.overview()) == without_books(before)
        assert [live.assign(f"user:{number}").arm.name for number in range(50)] == arms
        run_some(live)  # requests of the same users go on in the same units
        report = live.one("trial")["report"]
        assert sum(arm["num_units"] for arm in report["arms"]) == 12
        assert sum(arm["num_requests"] for arm in report["arms"]) == 80


def test_without_a_folder_nothing_is_kept_and_the_api_says_so() -> None:
    """Who believes an experiment to be safe must not lose it."""
    with opened(None) as live:
        live.start(trial())
        assert live.overview()["persistent"] is False
    with opened(None) as live:
        assert live.overview()["data"] == []


def test_a_promotion_is_the_default_until_the_setting_is_changed(tmp_path: Path) -> None:
    """It must outlive a restart, and must not make the setting useless."""
    told: list[str] = []
    with opened(tmp_path, on_default=told.append) as live:
        live.start(trial())
        assert live.default == Default("chain")
        with pytest.raises(RequestError, match="no winner"):
            live.promote("trial")
        assert live.promote("trial", "tree")["state"] == "promoted"
        assert (live.default, told, live.assign("x")) == (Default("tree", 16), ["tree"], None)
    with opened(tmp_path, on_default=told.append) as live:
        assert (live.default, told) == (Default("tree", 16), ["tree", "tree"])
        assert live.overview()["default"]["promoted_by"] == {"experiment": "trial", "arm": "tree"}
    with opened(tmp_path, configured="ar") as live:
        assert live.default == Default("chain")
    with opened(tmp_path, {"ar": 1, "chain": 3}) as live:
        assert live.default == Default("chain")


def test_an_experiment_whose_schedule_is_gone_ends_at_the_start(tmp_path: Path) -> None:
    """A drafter was taken away over the restart; requests must not be sent to what is not there."""
    with opened(tmp_path) as live:
        live.start(trial())
    with opened(tmp_path, {"ar": 1, "chain": 3}) as live:
        assert live.assign("x") is None
        assert live.one("trial")["events"][-1]["missing_schedule"] == "tree"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        (lambda live: live.start(trial("other")), "name"),
        (lambda live: live.set_weights("trial", {"nobody": 1}), "weights"),
        (lambda live: live.set_weights("trial", {"control": 0, "tree": 0}), "weights"),
        (lambda live: live.set_weights("trial", {"tree": math.inf}), "weights"),
        (lambda live: live.set_weights("trial", {"control": 3, "tree": -1}), "weights"),
        (lambda live: live.promote("trial", "nobody"), "arm"),
        (lambda live: live.promote("trial"), "arm"),
        (lambda live: live.stop("other"), "name"),
    ],
)
def test_a_refused_change_changes_nothing(change: Callable[[Experiments], Any], param: str) -> None:
    """Half of a change of weights is a change that nobody asked for."""
    with opened(None) as live:
        live.start(trial())
        before = live.overview()
        with pytest.raises(RequestError) as refused:
            change(live)
        assert refused.value.param == param
        assert live.overview() == before


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"name": "No Name"}, "name"),
        ({"name": "a/b"}, "name"),
        ({"arms": ARMS[:1]}, "arms"),
        ({"arms": (ARMS[0], ARMS[0])}, "arms[1].name"),
        ({"arms": (ARMS[0], Arm("b", "nothing"))}, "arms[1].schedule"),
        ({"arms": (ARMS[0], Arm("lossy", "chain"))}, "arms[1].schedule"),
        ({"arms": (Arm("a", "ar", 8), ARMS[1])}, "arms[0].budget"),
        ({"arms": (ARMS[0], Arm("b", "tree", 512))}, "arms[1].budget"),
        ({"arms": (ARMS[0], Arm("b", "tree", weight=math.nan))}, "weights"),
        ({"alpha": 0.0}, "alpha"),
        ({"guard": 1.0}, "guard"),
        ({"floor": 0.6}, "floor"),
    ],
)
def test_an_experiment_that_makes_no_sense_is_refused_by_name(options: dict[str, Any], param: str) -> None:
    """An arm with a schedule that is not there would fail requests that asked for nothing."""
    with opened(None, lossy=["chain"]) as live, pytest.raises(RequestError) as refused:
        live.start(trial(**options))
    assert refused.value.param == param


def test_an_ended_experiment_can_not_be_changed_but_promoted() -> None:
    """Its figures are history; what they taught may still be used."""
    with opened(None) as live:
        live.start(trial())
        live.stop("trial")
        for change in (lambda: live.stop("trial"), lambda: live.set_weights("trial", {"tree": 2})):
            with pytest.raises(RequestError, match="ended"):
                change()
        with pytest.raises(RequestError, match="already"):
            live.start(trial())
        with pytest.raises(UnknownExperiment):
            live.one("other")
        live.start(trial("second"))
        live.promote("trial", "tree")
        assert live.assign("x").experiment == "second", "a promotion of another experiment does not end this one"


CRASHING = """
import os, sqlite3, sys
from pathlib import Path
from app.experiments.live import Experiments
from app.experiments.store import Store
from tests.test_experiments_store import CHANGES, SCHEDULES

def attempt(folder, change, at):
    # Make the change in a process of its own that dies before statement `at`; the statements it has made.
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        seen, armed = 0, False

        class Crashing(sqlite3.Connection):
            def execute(self, *given):
                nonlocal seen
                if armed:
                    if seen == at:
                        os._exit(9)
                    seen += 1
                return super().execute(*given)

        live = Experiments(Store(folder, factory=Crashing), SCHEDULES, "chain")
        armed = True
        CHANGES[change](live)
        os.write(writer, bytes([seen]))
        os._exit(0)
    os.close(writer)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    made = os.read(reader, 1)
    assert status == (0 if made else 9), status
    return made[0] if made else 0

for change in CHANGES:
    folder = Path(sys.argv[1]) / change
    for at in range(attempt(folder / "whole", change, -1)):
        attempt(folder / str(at), change, at)
"""

CHANGES: dict[str, Callable[[Experiments], Any]] = {
    "promote": lambda live: live.promote("trial", "tree"),
    "weights": lambda live: live.set_weights("trial", {"control": 1, "tree": 4}),
    "stop": lambda live: live.stop("trial"),
}


@pytest.mark.slow
def test_a_crash_between_any_two_statements_leaves_the_old_state(tmp_path: Path) -> None:
    """A promotion without its default, or weights of which one is new, would be found only by its effects."""
    begun: dict[Path, dict[str, Any]] = {}
    for change in CHANGES:
        for name in ("whole", *map(str, range(12))):
            folder = tmp_path / change / name
            with opened(folder) as live:
                live.start(trial())
                begun[folder] = without_books(live.overview())
    done = subprocess.run([sys.executable, "-c", CRASHING, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for folder, before in begun.items():
        with opened(folder) as live:
            after = without_books(live.overview())
        if folder.name != "whole":
            assert after == before, f"a crash before statement {folder.name} of {folder.parent.name} left something behind"
        else:  # the control: without a crash the change is made
            assert after != before
            assert after["default"]["schedule"] == ("tree" if folder.parent.name == "promote" else "chain")


def test_two_servers_do_not_share_a_folder(tmp_path: Path) -> None:
    """Each would write its own sums over the other's."""
    with opened(tmp_path), pytest.raises(ValueError, match="state_dir.*another server"):
        Store(tmp_path)
    with opened(tmp_path) as live:
        assert live.assign("x") is None


def test_a_file_of_another_version_or_kind_is_refused(tmp_path: Path) -> None:
    """Guessing at it could lose it."""
    Store(tmp_path).close()
    connection = sqlite3.connect(tmp_path / FILE)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(ValueError, match="another version"):
        Store(tmp_path)
    (tmp_path / FILE).write_bytes(b"no database" * 1000)
    with pytest.raises(ValueError, match="state_dir"):
        Store(tmp_path)


@contextmanager
def full_disk(live: Experiments, folder: Path) -> Iterator[None]:
    """No page more may be added to the file."""
    sql = live._store._sql
    pages = sql.execute("PRAGMA page_count").fetchone()[0]
    sql.execute(f"PRAGMA max_page_count = {pages}")
    yield
    sql.execute("PRAGMA max_page_count = 1000000")


@contextmanager
def locked(live: Experiments, folder: Path) -> Iterator[None]:
    """Another program holds the file."""
    other = sqlite3.connect(folder / FILE, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    yield
    other.execute("ROLLBACK")
    other.close()


@pytest.mark.parametrize("trouble", [full_disk, locked])
def test_trouble_with_the_disk_fails_no_request_and_is_made_good(
    trouble: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests go on, the failure is counted and logged, changes by people are refused whole, sums come right later."""
    monkeypatch.setattr(store_module, "_BUSY_MS", 50)
    with opened(tmp_path) as live:
        live.start(trial())
        with trouble(live, tmp_path), caplog.at_level(logging.ERROR):
            took = time.monotonic()
            run_some(live, 600)
            assert time.monotonic() - took < 5, "a request waited for the disk"
            while live.num_write_failures == 0:
                time.sleep(0.01)
            before = live.overview()
            assert sum(arm["num_requests"] for arm in before["data"][0]["report"]["arms"]) == 600
            if trouble is locked:
                with pytest.raises(StateNotWritten):
                    live.promote("trial", "tree")
                assert live.default == Default("chain") and live.assign("x") is not None
        assert "could not be written" in caplog.text
        assert live.overview()["books"]["num_write_failures"] > 0
    with opened(tmp_path) as live:
        assert without_books(live.overview()) == without_books(before)
        (rows,) = live._store._sql.execute("SELECT count(*) FROM outcomes").fetchone()
        assert rows == 600


def test_a_full_queue_drops_and_counts_and_does_not_wait() -> None:
    """The engine thread puts outcomes; it must not stand still because a disk does."""
    entered, gate = [], threading.Event()

    def absorb(batch: list[Outcome]) -> bool:
        entered.append(len(batch))
        gate.wait(10)
        return False

    recorder = Recorder(absorb, capacity=5)
    one = Outcome("x", "a", "", 0.0, "stop", "ar", 1, 1, 1, 0, 0.0, 0.0, None, None)
    recorder.put(one)
    while not entered:
        time.sleep(0.005)
    started = time.monotonic()
    for _ in range(20):
        recorder.put(one)
    assert time.monotonic() - started < 1
    assert (recorder.num_dropped, recorder.num_queued) == (15, 5)
    assert not recorder.flush(0.05)
    gate.set()
    recorder.close()
    assert sum(entered) == 6


def test_old_rows_and_experiments_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that runs for years must not fill its disk."""
    monkeypatch.setattr(store_module, "ROWS_KEPT", 25)
    monkeypatch.setattr(store_module, "ENDED_KEPT", 3)
    with opened(tmp_path) as live:
        for number in range(6):
            live.start(trial(f"trial-{number}"))
            run_some(live, 20)
            assert live.one(f"trial-{number}")["report"]["arms"]
            live.stop(f"trial-{number}")
        sql = live._store._sql
        assert sql.execute("SELECT count(*) FROM outcomes").fetchone() == (25,)
        for table, column in (("experiments", "name"), ("tallies", "experiment"), ("events", "experiment")):
            names = {name for (name,) in sql.execute(f"SELECT {column} FROM {table}")}
            assert names == {"trial-3", "trial-4", "trial-5"}, table
        assert sql.execute("SELECT count(*) FROM units").fetchone() == (0,)
    with opened(tmp_path) as live:
        assert [one["name"] for one in live.overview()["data"]] == ["trial-5", "trial-4", "trial-3"]


def test_no_key_stands_in_the_file(tmp_path: Path) -> None:
    """Sessions and users are the callers' business."""
    with opened(tmp_path) as live:
        live.start(trial())
        finish(live.assign("user:alice@example.com"))
        live.overview()
    assert not [path for path in tmp_path.iterdir() if b"alice" in path.read_bytes()]


def test_rates_leave_out_the_wait_and_what_did_not_finish() -> None:
    """A speculative first step emits several tokens in no time; an aborted answer says nothing of its arm's speed."""
    assignment = Assignment("x", ARMS[1], "", lambda _: None)
    stats = RequestStats("tree", 5, 30, 10, arrived_s=1.0, first_token_s=3.0, finished_s=12.0)
    whole = outcome_of(assignment, stats, FinishReason.LENGTH)
    assert (whole.rate, whole.wait_s) == (pytest.approx(3.0), 2.0)
    for reason in (FinishReason.ABORT, FinishReason.ERROR):
        assert outcome_of(assignment, stats, reason).rate is None
    alone = RequestStats("tree", 5, 3, 1, arrived_s=1.0, first_token_s=3.0, finished_s=3.0)
    assert outcome_of(assignment, alone, FinishReason.STOP).rate is None
    refused = RequestStats("tree", 5, arrived_s=1.0, finished_s=3.0)
    assert outcome_of(assignment, refused, FinishReason.ABORT).wait_s is None


def test_the_guard_acts_by_itself_and_is_remembered(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """From assignment to weight 0 without anybody's help; after a restart the arm is still stopped."""
    with opened(tmp_path) as live, caplog.at_level(logging.INFO):
        live.start(trial())
        for number in range(1000):
            assignment = live.assign(None)
            finish(assignment, (40 if assignment.arm.name == "control" else 20) * (0.9 + 0.2 * (number % 11) / 10))
            if number % 100 == 99:
                seen = live.one("trial")
                if seen["arms"][1]["stopped"]:
                    break
        assert seen["arms"][1]["stopped"] and seen["arms"][1]["share"] == 0, seen["report"]
        assert {event["what"] for event in seen["events"]} == {"started", "stopped_by_guard", "winner"}
        assert seen["winner"] == "control"
        assert "stopped_by_guard" in caplog.text
        with pytest.raises(RequestError, match="guard"):
            live.set_weights("trial", {"tree": 1})
    with opened(tmp_path) as live:
        assert {live.assign(f"user:{number}").arm.name for number in range(50)} == {"control"}


def test_a_bandit_moves_the_weights_by_itself(tmp_path: Path) -> None:
    """It keeps its floor, and people cannot interfere with its weights."""
    with opened(tmp_path) as live:
        live.start(trial(mode=Mode.BANDIT, guard=None, floor=0.1))
        for number in range(400):
            assignment = live.assign(None)
            finish(assignment, (30 if assignment.arm.name == "control" else 40) * (0.9 + 0.2 * (number % 11) / 10))
            if number % 40 == 39:
                live.one("trial")
        shares = {arm["name"]: arm["share"] for arm in live.one("trial")["arms"]}
        assert shares["tree"] > 0.85 and shares["control"] >= 0.1 - 1e-9, shares
        with pytest.raises(RequestError, match="bandit"):
            live.set_weights("trial", {"tree": 1})
    with opened(tmp_path) as live:
        assert {arm["name"]: arm["share"] for arm in live.one("trial")["arms"]} == pytest.approx(shares)


