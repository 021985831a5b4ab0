"""What happens to every HTTP call: a request id, a bound on the body, a last resort for errors, a count of them.

Plain ASGI on purpose: wrappers that hand the inner application a copied ``receive`` would hide disconnects from it.
"""

from __future__ import annotations

import logging
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import STATUSES, describe
from app.metrics import Metrics

MAX_BODY_BYTES = 8 * 2**20
_SAFE_ID = re.compile(r"[\x21-\x7e]{1,128}")
_log = logging.getLogger(__name__)


class Edge:
    """The outermost layer of the application."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        """Wrap ``app``; errors under /v1 are counted in ``metrics``."""
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _SAFE_ID.fullmatch(given) else uuid.uuid4().hex
        status = 0

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            _check_length(headers)
            await self._app(scope, _bounded(receive), send_on)
        except Exception as error:
            if not isinstance(error, HTTPException):
                _log.exception("request %s failed", request_id)
            if status:
                raise  # the answer has begun; the server can only cut the connection
            await describe(error).response()(scope, receive, send_on)
        finally:
            if status in STATUSES and scope["path"].startswith("/v1/"):
                self._metrics.count_error(status)


def _check_length(headers: Headers) -> None:
    """Refuse by the announced length, before reading."""
    announced = headers.get("content-length", "")
    if announced.isdecimal() and len(announced) < 20 and int(announced) > MAX_BODY_BYTES:
        raise _too_large()


def _bounded(receive: Receive) -> Receive:
    """The same ``receive``, which raises once more than the limit has come, since a length need not be announced."""
    total = 0

    async def bounded() -> Message:
        nonlocal total
        message = await receive()
        total += len(message.get("body", b""))
        if total > MAX_BODY_BYTES:
            raise _too_large()
        return message

    return bounded


def _too_large() -> HTTPException:
    # The rest of the body is not read, so the connection cannot be used again.
    return HTTPException(413, f"The body is larger than {MAX_BODY_BYTES} bytes.", {"Connection": "close"})
