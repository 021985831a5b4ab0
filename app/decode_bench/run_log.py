"""The log of a long run: every measurement as it is made, so that a run that was stopped goes on where it was.

The first line says what is measured, each further one holds one method's answers to one group of prompts. A log is gone on
with only if it measures the very same thing: settings, schedules, prompts, model files, machine. Only the commit may differ
(somebody may write down results meanwhile); each line has its own.

    with RunLog.open(file, identity, commit) as log:
        log.append(repeat, group, "ar", work)
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from app.decode_bench.turns import Pace, Work
from app.proof import Outcome
from engine.request import DrafterCount, RequestStats


class RunLog:
    """An open log. A line that is there twice counts as the later one says."""

    def __init__(self, stream: TextIO, known: dict[tuple[int, int, str], Work], commits: list[str | None]) -> None:
        self._stream = stream
        self._known = known
        self.commits = commits  # of all lines, the last one is ours

    @classmethod
    def open(cls, file: Path, identity: Mapping[str, Any], commit: str | None) -> RunLog:
        """Begin a log, or go on with one.

        Args:
            identity: a JSON object of what is measured.
            commit: of the code that measures.

        Raises ValueError for a file that is no log of this run, naming what differs, and OSError. Nothing is written then.
        """
        identity = json.loads(json.dumps(identity))  # as it will be read: lists for tuples
        content = file.read_bytes() if file.exists() else b""
        whole = content.rfind(b"\n") + 1  # a process that was killed may have left half a line
        if content and not whole:
            raise ValueError(f"{file} is not a log of this bench")
        known: dict[tuple[int, int, str], Work] = {}
        commits: list[str | None] = []
        for number, line in enumerate(content[:whole].splitlines(), 1):
            try:
                entry = json.loads(line)
                if number == 1:
                    begun = entry["measures"]
                else:
                    known[entry["repeat"], entry["group"], entry["method"]] = _work(entry)
                    commits.append(entry["commit"])
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{file}:{number}: not a line of a log of this bench") from error
            if number == 1 and (found := list(_differing(begun, identity))):
                raise ValueError(f"{file} is the log of another run: {'; '.join(found[:3])}; name another file")
        if whole < len(content):
            os.truncate(file, whole)
        stream = file.open("a", encoding="utf-8")
        log = cls(stream, known, list(dict.fromkeys([*commits, commit])))
        if not content:
            log._write({"measures": identity})
        return log

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stream.close()

    def __len__(self) -> int:
        """Measurements that are there."""
        return len(self._known)

    def group(self, repeat: int, group: int, methods: Sequence[str]) -> list[Work] | None:
        """What is known of a group in a repeat, in the order of `methods`; None unless all of them are there."""
        works = [self._known.get((repeat, group, method)) for method in methods]
        found = [work for work in works if work is not None]
        return found if len(found) == len(works) else None

    def append(self, repeat: int, group: int, method: str, work: Work) -> None:
        """Write a measurement, at once."""
        self._known[repeat, group, method] = work
        self._write({"repeat": repeat, "group": group, "method": method, "commit": self.commits[-1], **asdict(work)})

    def _write(self, entry: Mapping[str, Any]) -> None:
        self._stream.write(json.dumps(entry, separators=(",", ":")) + "\n")
        self._stream.flush()


def file_states(paths: Iterable[Path]) -> dict[str, str]:
    """A word for each file or folder that changes when it, or a file in it, does (by name, size and time)."""
    states = {}
    for path in paths:
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        words = repr([(str(p.relative_to(path)), p.stat().st_size, p.stat().st_mtime_ns) for p in files])
        states[str(path)] = hashlib.sha256(words.encode()).hexdigest()[:16]
    return states


def _work(entry: Mapping[str, Any]) -> Work:
    outcomes = tuple(Outcome(tuple(item["token_ids"]), item["finish_reason"]) for item in entry["outcomes"])
    stats = tuple(
        RequestStats(**{**item, "drafters": {name: DrafterCount(**count) for name, count in item["drafters"].items()}})
        for item in entry["stats"]
    )
    return Work(entry["seconds"], outcomes, tuple(Pace(**pace) for pace in entry["paces"]), stats)


def _differing(then: Any, now: Any, path: str = "") -> Iterable[str]:
    """What differs between two JSON values, as 'place: then, now'; objects are entered."""
    if isinstance(then, dict) and isinstance(now, dict):
        for key in dict.fromkeys([*then, *now]):
            yield from _differing(then.get(key), now.get(key), f"{path}.{key}" if path else key)
    elif then != now:
        yield f"{path} was {_short(then)}, is {_short(now)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
