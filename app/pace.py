"""How fast places become free, measured on the requests that ended last."""

from __future__ import annotations

from collections import deque

from engine.request import FinishReason, RequestStats, StepStats

_WINDOW = 64  # requests
_LONGEST_S = 600.0  # nobody should be told to come back tomorrow on the ground of a few long answers


class Pace:
    """An observer of the engine that knows how long a request holds its place."""

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._held_s: deque[float] = deque(maxlen=_WINDOW)

    def on_step(self, steps: list[StepStats], /) -> None:
        """Nothing: only ends free a place."""

    def on_fallback(self, schedule: str, to: str, reason: str, /) -> None:
        """Nothing to note."""

    def on_finish(self, stats: RequestStats, reason: FinishReason, /) -> None:
        """Note how long the request held a place; one that left the queue held none. Called on the engine thread."""
        if stats.admitted_s > 0:
            self._held_s.append(stats.finished_s - stats.admitted_s)

    def seconds_until(self, num_places: int, *, max_num_seqs: int) -> float:
        """The expected time until that many places have become free while all `max_num_seqs` are taken; at least 1."""
        held = list(self._held_s)
        if not held:
            return 1.0
        return min(max(num_places * sum(held) / len(held) / max_num_seqs, 1.0), _LONGEST_S)
