"""The API's description: FastAPI's, with what is really answered.

Requests are described by the bodies themselves. Answers are built as plain dicts, so their shapes are written down here, as far
as every answer keeps to them. FastAPI's own 422 is never sent and is taken out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from app.access import needs_key
from app.errors import STATUSES

_MEANINGS = {
    400: "A value, or a field that is unknown or not supported; `param` names it.",
    401: "No API key, or none of the server's.",
    403: "The admin API answers this machine only, unless it has a key.",
    404: "Another model than the one served, or something else that is not there.",
    405: "A method that the path does not know.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    429: "Too many requests wait already; `Retry-After` says when to come back.",
    500: "The server's fault; its log says why.",
    503: "The model is loading, or the server is stopping.",
    504: "The answer took longer than the time allowed for it.",
}
_WITH_BODY, _GENERATING = (400, 408, 413), (429, 500, 504)


def _object(properties: dict[str, Any], *, also: bool = True) -> dict[str, Any]:
    """An object with all of these; `also`: and maybe others."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": also}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


_TEXT, _COUNT, _OPEN = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "object"}
_MAYBE_TEXT = {"anyOf": [_TEXT, {"type": "null"}]}
_MAYBE_OBJECT = {"anyOf": [_OPEN, {"type": "null"}]}
_ERROR = _object(
    {"error": _object({"message": _TEXT, "type": _TEXT, "param": _MAYBE_TEXT, "code": _MAYBE_TEXT}, also=False)}, also=False
)
_USAGE = _object({"prompt_tokens": _COUNT, "completion_tokens": _COUNT, "total_tokens": _COUNT})
_CHOICE = {"index": _COUNT, "logprobs": _MAYBE_OBJECT, "finish_reason": _TEXT}


def _answer(kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    head = {"id": _TEXT, "object": {"const": kind}, "created": _COUNT, "model": _TEXT}
    return _object({**head, "choices": _list(_object({**_CHOICE, **choice})), "usage": _USAGE})


_MODEL = _object({"id": _TEXT, "object": {"const": "model"}, "created": _COUNT, "owned_by": _TEXT, "max_model_len": _COUNT})
_SCHEDULE = _object({"name": _TEXT, "description": _TEXT, "budget": _COUNT, "default": {"type": "boolean"}})
_MESSAGE = _object({"role": {"const": "assistant"}, "content": _MAYBE_TEXT})
_STATUS = _object({"status": _TEXT})

_ANSWERS: dict[str, dict[str, Any]] = {
    "/v1/completions": _answer("text_completion", {"text": _TEXT}),
    "/v1/chat/completions": _answer("chat.completion", {"message": _MESSAGE}),
    "/v1/models": _object({"object": {"const": "list"}, "data": _list(_MODEL)}),
    "/v1/models/{name}": _MODEL,
    "/v1/schedules": _object({"object": {"const": "list"}, "data": _list(_SCHEDULE)}),
    "/tokenize": _object({"count": _COUNT, "max_model_len": _COUNT, "tokens": _list(_COUNT)}),
    "/detokenize": _object({"prompt": _TEXT}),
    "/health": _STATUS,
}


def describe_api(app: FastAPI, *, asks_for_keys: bool, metrics_auth: bool) -> dict[str, Any]:
    """The document that /openapi.json shows."""
    document: dict[str, Any] = get_openapi(title=app.title, version=app.version, routes=app.routes)
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    schemas["Error"] = _ERROR
    if asks_for_keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        locked = asks_for_keys and needs_key(path, metrics_auth=metrics_auth)
        for operation in operations.values():
            _describe(path, operation, locked=locked)
    return document


def _describe(path: str, operation: dict[str, Any], *, locked: bool) -> None:
    responses = operation["responses"]
    responses.pop("422", None)
    if path in _ANSWERS:
        responses["200"]["content"] = {"application/json": {"schema": _ANSWERS[path]}}
    generates = path.endswith("completions")
    if generates:
        responses["200"]["description"] = "The answer; with stream, server-sent events, the last of which is [DONE]."
        responses["200"]["content"]["text/event-stream"] = {"schema": {}}  # of one event, which the standard cannot describe
    if path == "/metrics":
        responses["200"]["content"] = {"text/plain": {"schema": _TEXT}}
    if locked:
        operation["security"] = [{"key": []}]
    for status in _statuses(path, operation, locked=locked, generates=generates):
        schema = _STATUS if path == "/health" else {"$ref": "#/components/schemas/Error"}
        responses[str(status)] = {
            "description": _MEANINGS[status],
            "content": {"application/json": {"schema": schema}},
            **({"headers": {"Retry-After": {"schema": {"type": "integer", "minimum": 1}}}} if status == 429 else {}),
        }


def _statuses(path: str, operation: dict[str, Any], *, locked: bool, generates: bool) -> Iterable[int]:
    """The errors that a path may answer with."""
    if path == "/health":
        return [503]
    found = {401} if locked else set()
    if path == "/metrics":
        return sorted(found)
    found |= {500, 503}
    if "requestBody" in operation:
        found |= {404, *_WITH_BODY}
    if "parameters" in operation:
        found.add(404)
    if path.startswith("/admin"):
        return sorted(found | {400, 401, 403, 404})
    if generates:
        found |= {*_GENERATING}
    assert found <= set(STATUSES), "every status is one that the metrics know"
    return sorted(found)
