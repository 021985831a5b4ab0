"""One line per call with all that is known of it, and never a word of a prompt or an answer."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from app.logs import JsonLines, set_up_logs
from tests.http_engine import ScriptedEngine, Server, serve, until


@pytest.fixture(scope="module", name="running")
def _running() -> Iterator[Server]:
    with serve(ScriptedEngine(max_model_len=4000), api_keys=["a-key-for-logs"], request_timeout_s=5) as server:
        server.client.headers["Authorization"] = "Bearer a-key-for-logs"
        yield server


@pytest.fixture
def server(running: Server) -> Server:
    running.engine.reset()
    return running


@pytest.fixture
def calls(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Records of calls, as they come."""
    caplog.set_level(logging.DEBUG)
    found: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record)

    handler = Keep()
    logging.getLogger("app.calls").addHandler(handler)
    yield found  # type: ignore[misc]
    logging.getLogger("app.calls").removeHandler(handler)


def fields(record: logging.LogRecord) -> dict[str, Any]:
    """What a record knows of its call."""
    return dict(record.fields)  # type: ignore[attr-defined]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_is_one_line(server: Server, calls: list[logging.LogRecord], stream: bool) -> None:
    """Status and tokens beside the id that the client has: without them nobody finds the call that was slow."""
    response = server.complete(prompt=["hi", "you"], max_tokens=7, n=2, stream=stream)
    until(lambda: [record for record in calls if record.levelno > logging.DEBUG])
    (record,) = [record for record in calls if record.levelno > logging.DEBUG]  # the server's start was watched by probes
    known = fields(record)
    assert {name: known[name] for name in ("method", "path", "status", "prompt_tokens", "completion_tokens")} == {
        "method": "POST", "path": "/v1/completions", "status": 200, "prompt_tokens": 5, "completion_tokens": 28,
    }
    assert known["request_id"] == response.headers["x-request-id"]
    assert known["answer_id"] in response.text
    assert 0 < known["ms"] < 5000
    assert "error" not in known and "abandoned" not in known
    message = record.getMessage()
    assert message.startswith("POST /v1/completions 200 ") and "\n" not in message
    assert f"request_id={known['request_id']}" in message and "completion_tokens=28" in message


def test_what_went_wrong_is_in_the_line(server: Server, calls: list[logging.LogRecord]) -> None:
    """A stream that broke off has status 200; the line must say more."""
    server.engine.fail_after = 1
    server.complete(stream=True)
    server.complete()
    server.engine.fail_after = None
    server.complete(top_p=-1)
    server.client.get("/v1/models", headers={"Authorization": "Bearer no-such-key"})
    server.engine.refuse_after = 0
    server.complete()
    until(lambda: len(calls) == 5)
    assert [(fields(c)["status"], fields(c).get("error")) for c in calls] == [
        (200, "server_error"), (500, None), (400, None), (401, None), (429, None),
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_who_hung_up_is_in_the_line(server: Server, calls: list[logging.LogRecord], stream: bool) -> None:
    """Else a call that nobody waited for looks like one that was answered."""
    server.engine.pace_s = 0.02
    body = {"prompt": "x", "max_tokens": 3000, "stream": stream}
    with httpx.Client(base_url=server.url, timeout=0.3, headers=server.client.headers) as client:
        try:
            with client.stream("POST", "/v1/completions", json=body) as response:
                next(response.iter_bytes())
        except httpx.ReadTimeout:
            pass
    until(lambda: calls)
    assert fields(calls[0])["abandoned"] is True
    assert fields(calls[0])["completion_tokens"] > 0


def test_probes_are_quiet(server: Server, calls: list[logging.LogRecord]) -> None:
    """Three of them per second would drown the calls."""
    for path in ("/health", "/metrics", "/v1/models"):
        server.client.get(path)
    until(lambda: len(calls) == 3)
    assert [record.levelname for record in calls] == ["DEBUG", "DEBUG", "INFO"]


def test_a_path_cannot_write_lines_of_its_own(server: Server, calls: list[logging.LogRecord]) -> None:
    """Nor can an id; and a query, which may hold anything, is left out."""
    server.client.get("/v1/models/x%0aPOST%20/v1/completions%20200", headers={"X-Request-Id": "a b"})
    server.client.get("/v1/models?secret=1")
    server.client.get("/" + "x" * 5000)
    until(lambda: len(calls) == 3)
    assert "%0a" in calls[0].getMessage()
    assert not any("\n" in c.getMessage() or "secret" in c.getMessage() or len(c.getMessage()) > 400 for c in calls)


MARK = "xyzzy-marker"


def test_no_prompt_and_no_answer_is_ever_logged(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """People's texts do not belong into files that others read, whatever goes wrong with them."""
    caplog.set_level(logging.DEBUG)
    one = {"role": "user", "content": MARK}
    for body in ({}, {"stream": True}, {"stop": MARK}, {"echo": True}, {"top_p": -1}, {"user": MARK}, {"unknown": MARK},
                 {"model": MARK}, {"response_format": {"type": MARK}}):
        server.complete(prompt=MARK, **body)
        server.client.post("/v1/chat/completions", json={"messages": [one], "max_tokens": 3, **body})
    server.client.post("/tokenize", json={"prompt": MARK})
    server.client.post("/v1/completions", content=f'{{"prompt": "{MARK}"')
    server.engine.fail_after = 1
    for stream in (False, True):
        server.complete(prompt=MARK, stream=stream)
    for record in caplog.records:
        if record.name.startswith(("httpx", "httpcore")):
            continue
        text = logging.Formatter("%(message)s").format(record)
        assert MARK not in text and "abcdef" not in text, text


def test_json_lines_are_json_and_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log collector takes each line as one object; a traceback must not be forty of them."""
    form = JsonLines()
    try:
        raise ValueError("two\nlines \u2028 \x00")
    except ValueError:
        record = logging.LogRecord("app.x", logging.ERROR, "x.py", 1, "failed: %s", ("a\nb",), sys.exc_info())
    record.fields = {"status": 500}
    line = form.format(record)
    assert "\n" not in line and line.isascii()
    read = json.loads(line)
    assert (read["level"], read["logger"], read["message"], read["status"]) == ("error", "app.x", "failed: a\nb", 500)
    assert "ValueError" in read["traceback"]
    assert read["time"].endswith("Z") and "T" in read["time"]


@pytest.mark.parametrize("form", ["text", "json"])
def test_the_setting_decides_the_form(form: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And only records of the level and above are written."""
    given: dict[str, Any] = {}
    monkeypatch.setattr("app.logs.logging.basicConfig", lambda **options: given.update(options))
    set_up_logs("warning", form)
    assert given["level"] == "WARNING"
    assert isinstance(given["handlers"][0].formatter, JsonLines) == (form == "json")
