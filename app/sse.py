"""Server-sent events: bytes on the wire, and the response that sends them."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.call import call_of
from app.disconnect import ClientGone, unless_gone

DONE = b"data: [DONE]\n\n"


def event(data: Any) -> bytes:
    """One event. ASCII only: some clients split lines at U+2028 or U+0085, which JSON may hold unescaped otherwise."""
    return b"data: " + json.dumps(data, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n\n"


class EventStream(Response):
    """A stream of events that stops being made when the client hangs up.

    ``close`` is called exactly when the response is over, for whatever reason, even if ``events`` was never started.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], None]) -> None:
        """The headers keep caches and reverse proxies from holding events back."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await unless_gone(receive, self._send_events(send))
        except ClientGone:
            call_of(scope).is_abandoned = True
        finally:
            self._close()

    async def _send_events(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events) as events:
            async for chunk in events:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
