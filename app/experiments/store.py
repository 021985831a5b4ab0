"""Experiments on disk: one SQLite file with a write-ahead log, every change one transaction.

    experiments.sqlite3 in the state folder:
    experiments(name, state, data)                    one JSON object each; at most one is running
    events(experiment, at_s, what, detail)
    tallies(experiment, arm, data)                    the sums behind the report
    units(experiment, arm, unit, …)                   the running experiment's sums by hashed key
    outcomes(experiment, arm, unit, at_s, reason, …)  the last requests, one row each, for whoever wants to look
    server(key, value)                                the promoted default

Sums are written as they stand, not as increments, so a write that failed is made good by the next one.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path

from app.experiments.experiment import Experiment, State, from_json
from app.experiments.judge import Event
from app.experiments.outcome import Outcome
from app.experiments.tally import ArmTally, UnitSums, from_sums

FILE = "experiments.sqlite3"
ROWS_KEPT = 100_000  # outcomes, of all experiments together
ENDED_KEPT = 100  # experiments
_VERSION = 2
_BUSY_MS = 1000  # how long another program may hold the file before a write gives up
_COLUMNS = [one.name for one in fields(Outcome)]
_SCHEMA = (
    "CREATE TABLE experiments(id INTEGER PRIMARY KEY, name TEXT UNIQUE NOT NULL, state TEXT NOT NULL, data TEXT NOT NULL)",
    "CREATE UNIQUE INDEX one_running ON experiments(state) WHERE state = 'running'",
    "CREATE TABLE events(id INTEGER PRIMARY KEY, experiment TEXT NOT NULL, at_s REAL, what TEXT, detail TEXT)",
    "CREATE TABLE tallies(experiment TEXT, arm TEXT, data TEXT NOT NULL, PRIMARY KEY(experiment, arm)) WITHOUT ROWID",
    "CREATE TABLE units(experiment TEXT, arm TEXT, unit TEXT, num_rates INTEGER, log_rates REAL, num_waits INTEGER, "
    "log_waits REAL, num_taus INTEGER, log_taus REAL, PRIMARY KEY(experiment, arm, unit)) WITHOUT ROWID",
    f"CREATE TABLE outcomes(id INTEGER PRIMARY KEY, {', '.join(_COLUMNS)})",
    "CREATE TABLE server(key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    f"PRAGMA user_version = {_VERSION}",
)


@dataclass(frozen=True, slots=True)
class Promotion:
    """A default schedule that an experiment made."""

    schedule: str
    budget: int | None
    experiment: str
    arm: str
    over: str | None  # the setting `schedule` it replaced: when that is changed, the setting counts again


@dataclass(frozen=True, slots=True)
class Saved:
    """What a file holds; experiments oldest first, units of the running one only."""

    experiments: list[Experiment]
    events: dict[str, list[Event]]
    tallies: dict[str, dict[str, ArmTally]]
    promotion: Promotion | None


class Store:
    """One open file. Not for two threads at once."""

    def __init__(self, folder: Path | None, *, factory: type[sqlite3.Connection] = sqlite3.Connection) -> None:
        """Open the file in `folder`, or a database in memory. ValueError for a folder that another server uses, OSError
        for one that cannot be written."""
        self._guard: sqlite3.Connection | None = None
        place = ":memory:"
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._guard = _only_user(folder)
            place = str(folder / FILE)
        try:
            self._sql = sqlite3.connect(
                place, timeout=_BUSY_MS / 1000, isolation_level=None, check_same_thread=False, factory=factory
            )
            self._prepare()
        except (sqlite3.Error, ValueError) as error:
            self.close()
            raise ValueError(f"state_dir: {place}: {error}") from error

    def close(self) -> None:
        """Close the file; everything is on disk already."""
        for connection in (getattr(self, "_sql", None), self._guard):
            if connection is not None:
                connection.close()

    def load(self) -> Saved:
        """Everything but the outcomes."""
        sql = self._sql
        experiments = [from_json(json.loads(data)) for (data,) in sql.execute("SELECT data FROM experiments ORDER BY id")]
        events: dict[str, list[Event]] = {one.name: [] for one in experiments}
        for name, at_s, what, detail in sql.execute("SELECT experiment, at_s, what, detail FROM events ORDER BY id"):
            if name in events:
                events[name].append(Event(what, json.loads(detail), at_s))
        tallies = {one.name: {arm.name: ArmTally() for arm in one.arms} for one in experiments}
        for name, arm, data in sql.execute("SELECT experiment, arm, data FROM tallies"):
            if name in tallies:
                tallies[name][arm] = from_sums(json.loads(data))
        for name, arm, unit, *sums in sql.execute("SELECT * FROM units"):
            if name in tallies:
                tallies[name][arm].units[unit] = UnitSums(*sums)
        row = sql.execute("SELECT value FROM server WHERE key = 'promotion'").fetchone()
        return Saved(experiments, events, tallies, Promotion(**json.loads(row[0])) if row else None)

    def save(self, experiment: Experiment, events: Sequence[tuple[str, Event]], promotion: Promotion | None = None) -> None:
        """Write an experiment as it is now, what happened (with the experiment's name), and a new default if there is one:
        all of it or nothing. Raises sqlite3.Error."""
        with self._transaction() as sql:
            sql.execute(
                "INSERT INTO experiments(name, state, data) VALUES (?, ?, ?) "
                "ON CONFLICT(name) DO UPDATE SET state = excluded.state, data = excluded.data",
                (experiment.name, experiment.state.value, json.dumps(experiment.to_json())),
            )
            for name, event in events:
                sql.execute(
                    "INSERT INTO events(experiment, at_s, what, detail) VALUES (?, ?, ?, ?)",
                    (name, event.at_s, event.what, json.dumps(event.detail)),
                )
            if promotion is not None:
                value = json.dumps(asdict(promotion))
                sql.execute("INSERT OR REPLACE INTO server(key, value) VALUES ('promotion', ?)", (value,))
            if experiment.state is not State.RUNNING:
                sql.execute("DELETE FROM units WHERE experiment = ?", (experiment.name,))
            _forget_old(sql)

    def add(
        self,
        outcomes: Iterable[Outcome],
        tallies: Mapping[tuple[str, str], ArmTally],
        units: Mapping[tuple[str, str, str], UnitSums],
    ) -> None:
        """Write outcomes, and the sums they changed, by experiment, arm and unit. All or nothing; raises sqlite3.Error."""
        places = ", ".join("?" * len(_COLUMNS))
        with self._transaction() as sql:
            sql.executemany(f"INSERT INTO outcomes({', '.join(_COLUMNS)}) VALUES ({places})", map(astuple, outcomes))
            sql.execute("DELETE FROM outcomes WHERE id <= (SELECT max(id) FROM outcomes) - ?", (ROWS_KEPT,))
            sql.executemany(
                "INSERT OR REPLACE INTO tallies(experiment, arm, data) VALUES (?, ?, ?)",
                [(*key, json.dumps(tally.sums())) for key, tally in tallies.items()],
            )
            sql.executemany(
                "INSERT OR REPLACE INTO units VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [(*key, *astuple(sums)) for key, sums in units.items()],
            )

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._sql.execute("BEGIN IMMEDIATE")
        try:
            yield self._sql
            self._sql.execute("COMMIT")
        except BaseException:
            if self._sql.in_transaction:
                self._sql.execute("ROLLBACK")
            raise

    def _prepare(self) -> None:
        self._sql.execute("PRAGMA journal_mode = WAL")
        self._sql.execute("PRAGMA synchronous = FULL")
        (version,) = self._sql.execute("PRAGMA user_version").fetchone()
        if version not in (0, _VERSION):
            raise ValueError(f"written by another version of graftserve (format {version}, this one knows {_VERSION})")
        if version == 0:
            with self._transaction() as sql:
                for statement in _SCHEMA:
                    sql.execute(statement)
        with self._transaction() as sql:  # requests that ended after their experiment leave some behind
            sql.execute("DELETE FROM units WHERE experiment NOT IN (SELECT name FROM experiments WHERE state = 'running')")


def _only_user(folder: Path) -> sqlite3.Connection:
    """Hold the folder until the connection is closed or the process ends, however it ends."""
    guard: sqlite3.Connection | None = None
    try:
        guard = sqlite3.connect(str(folder / "lock.sqlite3"), timeout=0, isolation_level=None, check_same_thread=False)
        guard.execute("BEGIN EXCLUSIVE")
    except sqlite3.Error as error:
        if guard is not None:
            guard.close()
        why = "another server uses it" if "locked" in str(error) else str(error)
        raise ValueError(f"state_dir: {folder}: {why}") from error
    return guard


def _forget_old(sql: sqlite3.Connection) -> None:
    """Drop the oldest ended experiments beyond those kept."""
    old = sql.execute(
        "SELECT name FROM experiments WHERE state != 'running' ORDER BY id DESC LIMIT -1 OFFSET ?", (ENDED_KEPT,)
    ).fetchall()
    sql.executemany("DELETE FROM experiments WHERE name = ?", old)
    for table in ("events", "tallies", "units"):
        sql.executemany(f"DELETE FROM {table} WHERE experiment = ?", old)
