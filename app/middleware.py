"""What happens to every HTTP call: an id, a key if there must be one, bounds on the body, a last resort for errors, a log line.

Plain ASGI on purpose: wrappers that hand the inner application a copied ``receive`` would hide disconnects from it.
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.access import Keys, check_host, keys_of, needs_key
from app.call import Call, attach
from app.config import Settings
from app.errors import STATUSES, describe
from app.logs import log_call
from app.metrics import Metrics

_SAFE_ID = re.compile(r"[\x21-\x7e]{1,128}")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rules:
    """What a call must keep to."""

    keys: Keys = field(default_factory=Keys)
    only_host: str | None = None  # where the server listens, if it answers to names of this machine only
    metrics_auth: bool = False  # whether /metrics asks for a key too
    max_body_bytes: int = 8 * 2**20
    max_body_s: float = 60.0  # from a call's head to the end of its body


def rules_of(settings: Settings) -> Rules:
    """The rules that the settings make."""
    is_private = not settings.api_keys and not settings.allow_keyless
    only_host = settings.host if is_private else None
    return Rules(keys_of(settings), only_host, settings.metrics_auth, settings.max_body_bytes)


class Edge:
    """The outermost layer of the application but for CORS."""

    def __init__(self, app: ASGIApp, metrics: Metrics, rules: Rules) -> None:
        """Wrap ``app``; errors under /v1 are counted in ``metrics``."""
        self._app = app
        self._metrics = metrics
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        clock = asyncio.get_running_loop().time
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        call = Call(given if _SAFE_ID.fullmatch(given) else uuid.uuid4().hex, clock())
        attach(scope, call)
        status = 0

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = call.request_id
            await send(message)

        try:
            if self._rules.only_host is not None:
                check_host(headers.get("host", ""), self._rules.only_host)
            if needs_key(scope["path"], metrics_auth=self._rules.metrics_auth):
                call.api_key = self._rules.keys.check(headers.get("authorization"))
            self._check_length(headers)
            await self._app(scope, self._bounded(receive), send_on)
        except Exception as error:
            if not isinstance(error, HTTPException):
                _log.exception("request %s failed", call.request_id)
            if status:
                raise  # the answer has begun; the server can only cut the connection
            await describe(error).response()(scope, receive, send_on)
        finally:
            if status in STATUSES and scope["path"].startswith("/v1/"):
                self._metrics.count_error(status)
            log_call(scope["method"], scope.get("raw_path") or b"", status, clock() - call.arrived_s, call)

    def _check_length(self, headers: Headers) -> None:
        """Refuse by the announced length, before reading."""
        announced = headers.get("content-length", "")
        if announced.isdecimal() and len(announced) < 20 and int(announced) > self._rules.max_body_bytes:
            raise self._too_large()

    def _bounded(self, receive: Receive) -> Receive:
        """The same ``receive``, which raises once more than the limits has come, since a length need not be announced."""
        total, is_over = 0, False
        until_s = asyncio.get_running_loop().time() + self._rules.max_body_s

        async def bounded() -> Message:
            nonlocal total, is_over
            if is_over:
                return await receive()  # a disconnect, whenever it comes
            try:
                async with asyncio.timeout_at(until_s):
                    message = await receive()
            except TimeoutError:
                raise _cut(408, f"The body was not complete after {self._rules.max_body_s:g} seconds.") from None
            total += len(message.get("body", b""))
            is_over = not message.get("more_body", False)
            if total > self._rules.max_body_bytes:
                raise self._too_large()
            return message

        return bounded

    def _too_large(self) -> HTTPException:
        return _cut(413, f"The body is larger than {self._rules.max_body_bytes} bytes.")


def _cut(status: int, message: str) -> HTTPException:
    # The rest of the body is not read, so the connection cannot be used again.
    return HTTPException(status, message, {"Connection": "close"})
