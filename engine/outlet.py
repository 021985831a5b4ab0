"""What leaves the engine: deltas for callers, counts for observers. A receiver that raises harms nobody but itself."""

from __future__ import annotations

import logging
from typing import Protocol

from engine.commit import Block
from engine.request import Delta, FinishReason, RequestStats, StepStats
from engine.sequence import Sequence

log = logging.getLogger(__name__)


class Observer(Protocol):
    """Who is told of counts. Called on the engine thread; what it raises is logged and fails nobody."""

    def on_step(self, steps: list[StepStats], /) -> None:
        """One step is over; one record per schedule."""

    def on_finish(self, stats: RequestStats, reason: FinishReason, /) -> None:
        """One request is over."""

    def on_fallback(self, schedule: str, to: str, reason: str, /) -> None:
        """Requests for `schedule` decode with `to` from now on."""


class Outlet:
    """Deltas and counts, on the engine's thread. An observer of observers itself."""

    def __init__(self) -> None:
        self._observers: list[Observer] = []

    def subscribe(self, observer: Observer) -> None:
        """Tell `observer` of everything from now on; before the engine starts."""
        self._observers.append(observer)

    def on_step(self, steps: list[StepStats]) -> None:
        """Tell the observers of a step."""
        self._tell("on_step", steps)

    def on_finish(self, stats: RequestStats, reason: FinishReason) -> None:
        """Tell the observers of an ended request."""
        self._tell("on_finish", stats, reason)

    def on_fallback(self, schedule: str, to: str, reason: str) -> None:
        """Tell the observers that a breaker moved."""
        self._tell("on_fallback", schedule, to, reason)

    def send(self, sequence: Sequence, block: Block) -> None:
        """The tokens of one step, with more to come."""
        _emit(
            sequence,
            Delta(
                sequence.request.id,
                block.token_ids,
                block.creators,
                block.text,
                block.logprobs,
                block.prompt_logprobs,
                trace=block.trace,
                times=block.times,
            ),
        )

    def send_last(self, sequence: Sequence, reason: FinishReason, error: str | None, block: Block | None) -> None:
        """The end of a request, with the tokens of its last step if there are any."""
        _emit(
            sequence,
            Delta(
                sequence.request.id,
                block.token_ids if block else (),
                block.creators if block else (),
                block.text if block else "",
                block.logprobs if block else (),
                block.prompt_logprobs if block else (),
                finish_reason=reason,
                error=error,
                stats=sequence.stats,
                trees=tuple(sequence.trees),
                trace=block.trace if block else None,
                times=block.times if block else None,
            ),
        )

    def _tell(self, event: str, *what: object) -> None:
        for observer in self._observers:
            try:
                getattr(observer, event)(*what)
            except Exception:
                log.exception("an observer failed")


def _emit(sequence: Sequence, delta: Delta) -> None:
    try:
        sequence.request.emit(delta)
    except Exception:  # the receiver is gone or broken; that is no reason to stop serving the others
        log.exception("the receiver of request %s failed", sequence.request.id)
