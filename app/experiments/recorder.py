"""From the engine thread to the books: a bounded queue, and a thread that takes outcomes from it in batches.

Putting never waits and never raises. What does not fit is counted and dropped, since a request must not fail because of how
it is counted.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from app.experiments.outcome import Outcome

_QUEUED = 10_000  # outcomes that may wait
_BATCH = 500
_BATCH_S = 0.2  # how long a batch collects
_RETRY_S = 1.0  # after which what could not be written is tried again
log = logging.getLogger(__name__)


class Recorder:
    """The thread; `absorb` is called on it with every batch and says whether anything is left to be written."""

    def __init__(self, absorb: Callable[[list[Outcome]], bool], *, capacity: int = _QUEUED) -> None:
        """Start the thread."""
        self.num_dropped = 0  # outcomes that found the queue full
        self._absorb = absorb
        self._queue: queue.Queue[Outcome | threading.Event | None] = queue.Queue(capacity)
        self._thread = threading.Thread(target=self._run, name="experiments", daemon=True)
        self._thread.start()

    @property
    def num_queued(self) -> int:
        """Outcomes that wait."""
        return self._queue.qsize()

    def put(self, outcome: Outcome) -> None:
        """Hand over one outcome; any thread."""
        try:
            self._queue.put_nowait(outcome)
        except queue.Full:
            self.num_dropped += 1
            if self.num_dropped.bit_count() == 1:  # 1, 2, 4, 8, …: often enough to be seen
                log.warning("%d outcomes of experiments dropped: the queue is full", self.num_dropped)

    def flush(self, within_s: float) -> bool:
        """Wait until everything put before is absorbed; whether that came about in time."""
        done = threading.Event()
        try:
            self._queue.put(done, timeout=within_s)
        except queue.Full:
            return False
        return done.wait(within_s)

    def close(self) -> None:
        """Absorb what waits and end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        unsaved, is_open = False, True
        while is_open:
            batch, signals = self._collect(_RETRY_S if unsaved else None)
            try:
                unsaved = self._absorb(batch)
            except Exception:
                log.exception("%d outcomes of experiments could not be counted", len(batch))
            for signal in signals:
                if signal is None:
                    is_open = False
                else:
                    signal.set()

    def _collect(self, wait_s: float | None) -> tuple[list[Outcome], list[threading.Event | None]]:
        """The next batch, and the signal that ended its collection if one did."""
        batch: list[Outcome] = []
        until = None if wait_s is None else time.monotonic() + wait_s
        while len(batch) < _BATCH:
            try:
                item = self._queue.get(timeout=None if until is None else max(until - time.monotonic(), 0))
            except queue.Empty:
                break
            if not isinstance(item, Outcome):
                return batch, [item]
            if not batch:
                until = time.monotonic() + _BATCH_S
            batch.append(item)
        return batch, []
