"""Bounds on what one caller may cost: time, bodies, depth, places; and what is said to who meets one."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from app.bridge import DeltaStream
from app.errors import TimedOut
from app.middleware import Edge, Rules
from app.pace import Pace
from engine.request import Delta, FinishReason, RequestStats
from tests.http_engine import ScriptedEngine, Server, alphabet, serve, until


@pytest.fixture(scope="module", name="running")
def _running() -> Iterator[Server]:
    with serve(ScriptedEngine(max_model_len=4000), request_timeout_s=0.5, max_body_bytes=20_000) as server:
        yield server


@pytest.fixture
def server(running: Server) -> Iterator[Server]:
    running.engine.reset()
    yield running
    running.engine.paused = False
    until(lambda: running.engine.num_running == running.engine.num_waiting == 0)


def timed_out(error: dict[str, Any]) -> None:
    """The error that says so."""
    assert (error["type"], error["code"], error["param"]) == ("server_error", "timeout", None)


@pytest.mark.parametrize("place", ["running", "waiting"])
@pytest.mark.parametrize("body", [{}, {"n": 3}, {"prompt": ["a", "b", "c"]}])
def test_a_whole_answer_ends_with_the_time(server: Server, place: str, body: dict[str, Any]) -> None:
    """Whether the model is slow or no place was free: the caller hears, and all that it held is given up."""
    server.engine.paused, server.engine.pace_s = place == "waiting", 0.02
    response = server.complete(max_tokens=3000, **body)
    assert response.status_code == 504
    timed_out(response.json()["error"])
    assert response.headers["x-should-retry"] == "false"
    until(lambda: server.engine.num_running == server.engine.num_waiting == 0 or place == "waiting")
    assert sorted(server.engine.aborted) == sorted(request.id for request in server.engine.submitted)


@pytest.mark.parametrize("place", ["running", "waiting"])
@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_ends_with_one_error_event(server: Server, place: str, n: int) -> None:
    """Its status was sent long ago; what came until then stays."""
    server.engine.paused, server.engine.pace_s = place == "waiting", 0.02
    before = server.metrics()['graftserve_request_errors_total{status="504"}']
    response = server.complete(max_tokens=3000, stream=True, n=n)
    assert response.status_code == 200
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    events = [json.loads(line) for line in lines]
    assert ["error" in event for event in events] == [False] * (len(events) - 1) + [True]
    timed_out(events[-1]["error"])
    text = "".join(choice["text"] for event in events[:-1] for choice in event["choices"] if choice["index"] == 0)
    assert alphabet(3000).startswith(text) and bool(text) == (place == "running")
    assert server.metrics()['graftserve_request_errors_total{status="504"}'] == before + 1
    assert len(server.engine.aborted) == n


def test_a_request_may_ask_for_less_time_and_not_for_more(server: Server) -> None:
    """Who has a page to show in two seconds does not want the text of the third."""
    server.engine.pace_s = 0.01
    start = time.monotonic()
    assert server.complete(max_tokens=3000, timeout=0.1).status_code == 504
    assert time.monotonic() - start < 0.45
    more = server.complete(timeout=9)
    assert (more.status_code, more.json()["error"]["param"]) == (400, "timeout")
    for bad in (0, -1, "soon", True):
        assert server.complete(timeout=bad).json()["error"]["param"] == "timeout"
    assert server.complete(max_tokens=3, timeout=0.4).status_code == 200


def test_a_deadline_holds_also_for_who_always_has_something_to_read() -> None:
    """A wait that never waits cannot time out by itself."""
    import asyncio

    async def read() -> None:
        stream = DeltaStream(ScriptedEngine(), asyncio.get_running_loop().time() - 1)
        stream._open.add("x")
        stream.emit(Delta("x", (1,)))
        await asyncio.sleep(0)
        with pytest.raises(TimedOut):
            await stream.__anext__()

    asyncio.run(read())


def test_without_a_limit_answers_take_what_they_take() -> None:
    """The negative control."""
    with serve(ScriptedEngine(max_model_len=4000)) as server:
        server.engine.pace_s = 0.01
        assert server.complete(max_tokens=200).status_code == 200


@pytest.mark.parametrize("form", ["length", "chunked"])
@pytest.mark.parametrize(("size", "status"), [(19_000, 200), (21_000, 413)])
def test_the_bound_on_bodies_is_the_setting(server: Server, form: str, size: int, status: int) -> None:
    """However the length is announced, or not at all."""
    content = json.dumps({"prompt": "hi", "max_tokens": 1, "user": "x" * (size - 60)}).encode()
    body: Any = content if form == "length" else (content[i : i + 1000] for i in range(0, len(content), 1000))
    response = server.client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == status, response.text
    if status == 413:
        assert "20000" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        "[" * 9_000 + "]" * 9_000,
        '{"prompt": ' + "[" * 9_000 + "]" * 9_000 + "}",
        '{"prompt": "hi", "stop": ' + "[" * 900 + "]" * 900 + "}",
        '{"prompt": "hi", "speculative": ' + '{"a":' * 900 + "1" + "}" * 900 + "}",
        '{"prompt": "hi", "response_format": ' + '{"a":' * 900 + "1" + "}" * 900 + "}",
        '{"prompt": "hi", "logit_bias": ' + '{"1":' * 900 + "1" + "}" * 900 + "}",
        '{"prompt": "hi", "unknown": ' + '{"a":' * 900 + "1" + "}" * 900 + "}",
        '{"messages": ' + "[" * 900 + "]" * 900 + "}",
        '{"messages": [{"role": "user", "content": ' + "[" * 900 + "]" * 900 + "}]}",
        '{"prompt": "hi", ' + ", ".join(f'"k{i}": 1' for i in range(1500)) + "}",
        '{"prompt": "hi", "prompt": 1}',
        '{"prompt": "hi", "seed": 1' + "0" * 5_000 + "}",
        "{" * 19_000,
        '"' + "\\u" * 5_000,
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_deep_and_odd_json_is_a_400(server: Server, path: str, body: str) -> None:
    """A parser that runs out of stack takes the process along, or answers 500."""
    response = server.client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400, response.text
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert len(response.content) < 2000
    assert server.complete(max_tokens=2).json()["choices"][0]["text"] == alphabet(2)


def raw(server: Server, data: bytes) -> bytes:
    """What the server answers to these bytes before it closes the connection, or after two seconds."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=2) as connection:
        answer = b""
        try:
            connection.sendall(data)
            while piece := connection.recv(65536):
                answer += piece
        except (TimeoutError, ConnectionError):
            pass
    return answer


@pytest.mark.parametrize(
    "data",
    [
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-Big: " + b"x" * 200_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: 1\r\n" % i for i in range(20_000)) + b"\r\n",
        b"GET /" + b"x" * 200_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcde",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-Request-Id: a\r\n b\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200,
        b"\r\n" * 10,
    ],
)
def test_odd_heads_harm_nobody(server: Server, data: bytes) -> None:
    """Large, malformed, or another protocol: the connection may end, the server may not."""
    answer = raw(server, data)
    assert not answer.startswith(b"HTTP/1.1 5"), answer[:200]
    assert server.complete(max_tokens=2).json()["choices"][0]["text"] == alphabet(2)


def test_a_body_that_never_comes_is_given_up() -> None:
    """Else a thousand connections that send a byte an hour are a thousand tasks for ever."""
    from app.main import create_app
    from app.metrics import Metrics

    calls: list[int] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        calls.append(1)
        while (await receive()).get("more_body"):
            pass

    import asyncio

    async def one() -> list[dict[str, Any]]:
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            await asyncio.sleep(0.03)
            return {"type": "http.request", "body": b"x", "more_body": True}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions", "headers": []}
        await Edge(inner, Metrics(), Rules(max_body_s=0.2))(scope, receive, send)
        return sent

    start, body = asyncio.run(one())
    assert (start["status"], calls) == (408, [1])
    assert json.loads(body["body"])["error"]["code"] == "body_too_slow"
    assert (b"connection", b"close") in start["headers"]
    assert create_app is not None


def test_who_is_turned_away_learns_when_to_come_back() -> None:
    """One second for all brings everyone back while every place is still taken."""
    pace = Pace()
    assert pace.seconds_until(3, max_num_seqs=2) == 1.0

    def ended(held_s: float, *, was_admitted: bool = True) -> None:
        stats = RequestStats("ar", 1, arrived_s=100.0, admitted_s=200.0 if was_admitted else 0.0, finished_s=200.0 + held_s)
        pace.on_finish(stats, FinishReason.LENGTH)

    ended(900.0, was_admitted=False)  # it left the queue: no place became free
    assert pace.seconds_until(3, max_num_seqs=2) == 1.0
    for held_s in (10.0, 20.0, 30.0):
        ended(held_s)
    assert pace.seconds_until(1, max_num_seqs=2) == 10.0
    assert pace.seconds_until(4, max_num_seqs=2) == 40.0
    assert pace.seconds_until(1, max_num_seqs=1000) == 1.0
    assert pace.seconds_until(10**6, max_num_seqs=1) == 600.0
    for _ in range(64):
        ended(2.0)
    assert pace.seconds_until(4, max_num_seqs=2) == 4.0  # what was long ago is forgotten


def test_the_measured_wait_is_in_the_answer() -> None:
    """Places are held for seconds here, so the header says seconds."""
    with serve(ScriptedEngine(max_num_seqs=1, max_waiting=1)) as server:
        for held_s in (30.0, 50.0):
            server.app.state.serving.pace.on_finish(
                RequestStats("ar", 1, admitted_s=1.0, finished_s=1.0 + held_s), FinishReason.STOP
            )
        server.engine.paused = True
        threads = [threading.Thread(target=server.complete, daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        until(lambda: server.engine.num_running + server.engine.num_waiting == 2)
        refused = server.complete()
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "40")
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        server.engine.paused = False
        for thread in threads:
            thread.join(10)


def test_the_clients_own_retry_waits_as_told() -> None:
    """OpenAI's client comes back by itself: with a queue that has emptied meanwhile it gets its answer."""
    import openai

    with serve(ScriptedEngine(max_num_seqs=1, max_waiting=1)) as server:
        server.engine.refuse_after = 0
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=1) as client:
            timer = threading.Timer(0.5, lambda: setattr(server.engine, "refuse_after", None))
            timer.start()
            answer = client.completions.create(model="toy/scripted", prompt="x", max_tokens=2, temperature=0)
            timer.join()
        assert answer.choices[0].text == "ab"


@pytest.mark.parametrize(("n", "prompts", "status"), [(6, 1, 200), (7, 1, 400), (2, 3, 200), (3, 3, 400), (10**12, 1, 400)])
def test_prompts_times_answers_have_a_bound(server: Server, n: int, prompts: int, status: int) -> None:
    """What could not be queued even on an idle server is no matter of coming back later."""
    response = server.complete(prompt=["x"] * prompts, n=n, max_tokens=1)
    assert response.status_code == status, response.text
    if status == 400:
        assert response.json()["error"]["param"] == "n" and "6" in response.json()["error"]["message"]


def test_what_does_not_fit_is_said_with_the_true_numbers(server: Server) -> None:
    """"Maximum context is 3" has sent people searching for days."""
    response = server.complete(prompt="x" * 3000, max_tokens=1500)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "max_tokens")
    assert all(number in error["message"] for number in ("4000", "3000", "1500", "4500"))


def test_connections_that_hang_do_not_keep_others_out(server: Server) -> None:
    """Half-sent heads and bodies cost a socket each, nothing more."""
    host, port = server.url.removeprefix("http://").split(":")
    half = [socket.create_connection((host, int(port))) for _ in range(50)]
    for index, connection in enumerate(half):
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
        connection.sendall(head if index % 2 else head[:30])
    try:
        assert server.complete(max_tokens=2).json()["choices"][0]["text"] == alphabet(2)
        assert httpx.get(f"{server.url}/health").status_code == 200
    finally:
        for connection in half:
            connection.close()
