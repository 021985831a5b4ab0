"""What is logged and in which form: lines for people, or one JSON object per line for machines.

Prompts and answers are in neither. Each HTTP call is one line of the logger ``app.calls``, written when it is over; those of
probes and scrapes are of level debug, as they would drown the others.
"""

from __future__ import annotations

import json
import logging
import time
from typing import Any, Literal

from app.access import METRICS_PATH
from app.call import Call

LogFormat = Literal["text", "json"]

_PROBES = frozenset({"/health", METRICS_PATH})
_SHOWN = 200  # characters of a path
_calls = logging.getLogger("app.calls")


def set_up_logs(level: str, form: LogFormat) -> None:
    """Write records of that level and above to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    if level == "info":
        for name in ("app.main", "uvicorn.error"):  # their informational lines repeat what the command says itself
            logging.getLogger(name).setLevel(logging.WARNING)


def log_call(method: str, raw_path: bytes, status: int, seconds: float, call: Call) -> None:
    """The line of one call. `raw_path` is the path as it was sent, still encoded and without its query."""
    path = raw_path.decode("ascii", "backslashreplace")[:_SHOWN]
    fields = {
        "method": method,
        "path": path,
        "status": status,
        "ms": round(1000 * seconds, 1),
        "request_id": call.request_id,
        "answer_id": call.answer_id,
        "prompt_tokens": call.num_prompt_tokens,
        "completion_tokens": call.num_output_tokens,
        "abandoned": call.is_abandoned or None,
        "error": call.error,
    }
    known = {name: value for name, value in fields.items() if value is not None}
    shown = [f"{method} {path} {status} {known['ms']} ms"]
    shown += [name if value is True else f"{name}={value}" for name, value in list(known.items())[4:]]
    _calls.log(logging.DEBUG if path in _PROBES else logging.INFO, "%s", " ".join(shown), extra={"fields": known})


class JsonLines(logging.Formatter):
    """One JSON object per record: time (UTC), level, logger, message, and the fields of a call."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        fields: dict[str, Any] = getattr(record, "fields", {})
        line = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields,
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
