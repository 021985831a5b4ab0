"""What went wrong, in the words of the OpenAI API: one table from exceptions to status and error body."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse

from engine.request import EngineStopped, QueueFull, RequestError
from models.sampling import ParamError

CALLER, LIMITED, OURS = "invalid_request_error", "rate_limit_error", "server_error"
STATUSES = (400, 401, 404, 405, 408, 413, 429, 500, 503, 504)  # every error status the service sends on purpose
_SHOWN = 200  # characters of a caller's text that an error message repeats at most


class UnknownModel(RequestError):
    """The body names a model that is not served here."""


class UnknownExperiment(RequestError):
    """There is no experiment of that name."""


class StateNotWritten(RuntimeError):
    """A change could not be written to disk, so it was not made."""


class RequestFailed(RuntimeError):
    """The engine gave up on a request that it had accepted."""


class TimedOut(RuntimeError):
    """An answer was not complete in the time that the server, or the request itself, allows."""


@dataclass(frozen=True, slots=True)
class Problem:
    """An error as the client sees it."""

    status: int
    type: str
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """The JSON object: the whole body of an error answer, or the data of an error event."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The HTTP answer."""
        return JSONResponse(self.body(), status_code=self.status, headers=dict(self.headers))


def describe(error: BaseException) -> Problem:
    """The table. What is not in it is our fault, and its text stays in the log."""
    match error:
        case RequestValidationError():
            return _describe_validation(error.errors())
        case UnknownModel() | UnknownExperiment():
            return Problem(404, CALLER, str(error), error.param, error.code)
        case RequestError():
            return Problem(400, CALLER, str(error), error.param, error.code)
        case ParamError():
            return Problem(400, CALLER, str(error), error.param, "invalid_value")
        case QueueFull():
            wait = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
            return Problem(429, LIMITED, str(error), None, "rate_limit_exceeded", wait)
        case EngineStopped():
            return Problem(503, OURS, str(error), None, "overloaded", {"Retry-After": "1"})
        case StateNotWritten():
            return Problem(503, OURS, str(error), None, "state_not_written", {"Retry-After": "1"})
        case TimedOut():
            # A second try would take as long as the first; OpenAI's clients read this header.
            return Problem(504, OURS, str(error), None, "timeout", {"X-Should-Retry": "false"})
        case RequestFailed():
            return Problem(500, OURS, str(error))
        case HTTPException():
            kind = CALLER if error.status_code < 500 else OURS
            code = _HTTP_CODES.get(error.status_code)
            return Problem(error.status_code, kind, str(error.detail), None, code, dict(error.headers or {}))
        case _:
            return Problem(500, OURS, "The server failed on this request; its log says why.")


async def answer_error(request: HttpRequest, error: Exception) -> JSONResponse:
    """Exception handler for everything in :data:`HANDLED`."""
    return describe(error).response()


HANDLED: tuple[type[Exception], ...] = (
    RequestValidationError,
    RequestError,
    ParamError,
    QueueFull,
    EngineStopped,
    RequestFailed,
    StateNotWritten,
    TimedOut,
    HTTPException,
)

_HTTP_CODES = {
    400: "invalid_json",
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    408: "body_too_slow",
    413: "body_too_large",
}


def shorten(text: str) -> str:
    """A caller's text, short enough to be repeated in a message, and free of what JSON cannot carry."""
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def _describe_validation(errors: Sequence[Any]) -> Problem:
    """The first of FastAPI's complaints, as a 400 that names the parameter."""
    first = errors[0]
    kind, context = first["type"], first.get("ctx") or {}
    if kind == "json_invalid":
        return Problem(400, CALLER, f"The body is not valid JSON: {context.get('error')}.", None, "invalid_json")
    place = [*first["loc"][1:], *([context["param"]] if "param" in context else [])]
    if not place:
        # Nothing inside the body to point at: it is empty, no object, or came with another content type.
        message = "The body must be a JSON object, sent with the header Content-Type: application/json."
        return Problem(400, CALLER, message, None, "invalid_json")
    param = ""
    for part in place:
        param += f"[{part}]" if isinstance(part, int) else f".{part}" if param else str(part)
    param = shorten(param)
    if kind == "missing":
        return Problem(400, CALLER, f"Missing required parameter: {param}.", param, "missing_required_parameter")
    code = kind if kind in ("unsupported_parameter", "unknown_parameter") else "invalid_value"
    return Problem(400, CALLER, f"{param}: {shorten(first['msg'])}", param, code)
