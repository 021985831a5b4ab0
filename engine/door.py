"""The engine's door: requests come in from any thread, and one thread, the engine's, takes them off.

All that other threads may touch of an engine is here, behind one lock: who is inside, whether anybody is let in, and the inbox.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator

from engine.admission import Limits
from engine.request import EngineStopped, QueueFull, RequestError
from engine.sequence import Sequence

_IDLE_WAIT_S = 0.5  # how long an idle engine sleeps before it looks around again


class Door:
    """Opened by `open`; closed for good by `shut`, or by `fail`."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._inbox: queue.SimpleQueue[Sequence | str | None] = queue.SimpleQueue()
        # Requests let in and not yet ended. Guarded, because callers count themselves in on their own threads.
        self._inside: set[str] = set()
        self._lock = threading.Lock()
        self._is_open = False
        self._stop_at: float | None = None  # monotonic time at which whatever is still inside is aborted
        self._last_sign = time.monotonic()
        self.failure: str | None = None
        """Why the engine failed; None: it did not."""

    # ---- any thread -------------------------------------------------------------------------------------------------

    @property
    def num_inside(self) -> int:
        """Requests let in that have not ended."""
        return len(self._inside)

    def open(self) -> None:
        """Let requests in from now on."""
        self._last_sign = time.monotonic()
        self._is_open = True

    def enter(self, sequence: Sequence) -> None:
        """Let a request in. Raises RequestError, QueueFull or EngineStopped, and then it is not inside."""
        name, most = sequence.request.id, self._limits.max_num_seqs + self._limits.max_waiting
        with self._lock:
            if not self._is_open:
                raise EngineStopped(self.failure or "The server is stopping and takes no more requests.")
            if name in self._inside:
                raise RequestError(f"a request with the id {name} is being served already", param="request_id")
            if len(self._inside) >= most:
                raise QueueFull(f"{len(self._inside)} requests are running or waiting, which is the limit")
            if not self._inside:
                self._last_sign = time.monotonic()  # an idle engine is not a stalled one
            self._inside.add(name)
            # Inside the lock, so that nothing can be put behind the stop signal.
            self._inbox.put(sequence)

    def abort(self, request_id: str) -> None:
        """Ask for the end of a request; unknown ids are ignored."""
        self._inbox.put(request_id)

    def shut(self, drain_s: float) -> None:
        """Let nobody in any more; who is inside has `drain_s` seconds."""
        with self._lock:
            self._is_open = False
            self._stop_at = time.monotonic() + drain_s
            self._inbox.put(None)

    def health(self, *, is_alive: bool) -> str:
        """As `Engine.health`; `is_alive`: whether the engine's thread is."""
        if self.failure is not None:
            return f"failed: {self.failure}"
        if not self._is_open or not is_alive:
            return "stopping" if is_alive and self._stop_at is not None else "stopped"
        if self._inside and time.monotonic() - self._last_sign > self._limits.stall_s:
            return "stalled"
        return "ok"

    # ---- engine thread ----------------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether the engine is to end now: it was told to stop, and nobody is inside or their time is up."""
        return self._stop_at is not None and (not self._inside or time.monotonic() >= self._stop_at)

    def mail(self, *, wait: bool) -> Iterator[Sequence | str]:
        """What has come in: sequences, and ids to abort. With `wait`, sleeps a little until there is something."""
        try:
            mail = self._inbox.get(timeout=_IDLE_WAIT_S) if wait else self._inbox.get_nowait()
            while True:
                if mail is not None:  # None only wakes the sleeper
                    yield mail
                mail = self._inbox.get_nowait()
        except queue.Empty:
            return

    @property
    def has_mail(self) -> bool:
        """Whether anything waits to be taken off."""
        return not self._inbox.empty()

    def leave(self, request_id: str) -> None:
        """A request has ended."""
        with self._lock:
            self._inside.discard(request_id)

    def sign(self) -> None:
        """The engine is alive: it has made a step."""
        self._last_sign = time.monotonic()

    def fail(self, why: str) -> None:
        """The engine is broken; nobody is let in any more."""
        with self._lock:
            self._is_open = False
            self.failure = why
