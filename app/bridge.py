"""Between the event loop and the engine thread: what the edge needs of an engine, and the way its deltas come back.

The engine hands each delta to ``Request.emit`` on its own thread; :class:`DeltaStream` moves it onto the event loop,
where a route reads it. Nothing here waits for the engine, and the engine never waits for a socket.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from app.errors import TimedOut
from engine.request import Delta, FinishReason, Request, RequestStats, StepStats
from engine.steering import PriceState


class ScheduleInfo(Protocol):
    """What the edge shows of a schedule."""

    @property
    def name(self) -> str: ...
    @property
    def description(self) -> str: ...
    @property
    def budget(self) -> int: ...
    @property
    def is_auto(self) -> bool: ...
    @property
    def drafters(self) -> Mapping[Any, str]: ...
    @property
    def greedy_verifier(self) -> str: ...
    @property
    def sampling_verifier(self) -> str: ...


class Observer(Protocol):
    """Who is told of counts; both are called on the engine thread."""

    def on_step(self, steps: list[StepStats], /) -> None: ...
    def on_finish(self, stats: RequestStats, reason: FinishReason, /) -> None: ...
    def on_fallback(self, schedule: str, to: str, reason: str, /) -> None: ...


class Engine(Protocol):
    """The engine as the edge sees it; see :class:`engine.engine.Engine`."""

    default_schedule: str  # of requests that name none; may be assigned to at any time

    @property
    def schedules(self) -> Mapping[str, ScheduleInfo]: ...
    @property
    def drafter_names(self) -> Sequence[str]: ...
    @property
    def model_id(self) -> str: ...
    @property
    def stop_tokens(self) -> frozenset[int]: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_num_seqs(self) -> int: ...
    @property
    def max_waiting(self) -> int: ...
    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def row_use(self) -> Mapping[str, tuple[int, int]]: ...
    @property
    def row_bytes(self) -> Mapping[str, int]: ...

    def price_state(self) -> PriceState | None: ...
    def start(self) -> None: ...
    def stop(self, *, drain_s: float = 0.0) -> None: ...
    def submit(self, request: Request, /) -> None: ...
    def abort(self, request_id: str, /) -> None: ...
    def health(self) -> str: ...
    def subscribe(self, observer: Any, /) -> None: ...


class DeltaStream:
    """The deltas of the one or more engine requests behind one HTTP call, in the order they were emitted.

    Iterate to get ``(index, delta)``, where ``index`` counts the submitted requests; the iteration ends when each of
    them had its last delta. Always :meth:`close` it: that aborts whatever has not ended.
    """

    def __init__(self, engine: Engine, deadline_s: float | None = None) -> None:
        """Must be called on the event loop that will read the deltas, and by whose clock they must all have come."""
        self._engine = engine
        self._deadline_s = deadline_s
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Delta] = asyncio.Queue()
        self._index: dict[str, int] = {}  # by request id
        self._open: set[str] = set()  # ids that had no last delta yet

    def submit(self, request: Request) -> None:
        """Hand one request, built with ``emit=stream.emit``, to the engine. Raises what ``Engine.submit`` raises."""
        # Booked first: the engine thread may emit before submit returns.
        self._index[request.id] = len(self._index)
        self._open.add(request.id)
        try:
            self._engine.submit(request)
        except BaseException:
            self._open.discard(request.id)
            raise

    def emit(self, delta: Delta) -> None:
        """Receive a delta on the engine thread."""
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, delta)
        except RuntimeError:  # the event loop is closed: the server is gone and so is the reader
            pass

    def close(self) -> None:
        """Abort the requests that have not ended. Safe to call twice, from the event loop."""
        unfinished, self._open = self._open, set()
        for request_id in unfinished:
            self._engine.abort(request_id)

    def __aiter__(self) -> DeltaStream:
        return self

    async def __anext__(self) -> tuple[int, Delta]:
        if not self._open:
            raise StopAsyncIteration
        delta = await self._next()
        if delta.finish_reason is not None:
            self._open.discard(delta.request_id)
        return self._index[delta.request_id], delta

    async def _next(self) -> Delta:
        """The next delta. Raises TimedOut at the deadline, also if there is always one more to read."""
        try:
            async with asyncio.timeout_at(self._deadline_s):
                if self._deadline_s is not None and self._loop.time() >= self._deadline_s:
                    raise TimeoutError
                return await self._queue.get()
        except TimeoutError:
            raise TimedOut("The answer took longer than the time allowed for it.") from None
