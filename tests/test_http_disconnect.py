"""Clients that hang up, and many clients at once: nothing is decoded for nobody, and nothing stays behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.http_engine import ScriptedEngine, Server, alphabet, serve, until


@pytest.fixture(scope="module", name="running")
def _running() -> Iterator[Server]:
    with serve(ScriptedEngine(max_model_len=4000, max_waiting=100)) as server:
        yield server


@pytest.fixture
def server(running: Server) -> Iterator[Server]:
    running.engine.reset()
    yield running
    running.engine.paused = False
    until(lambda: running.engine.num_running == running.engine.num_waiting == 0)


def aborted(server: Server) -> float:
    """Requests that ended because the caller went away."""
    return server.sums("requests_total", finish_reason="abort")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_closing_a_stream_aborts_its_request(server: Server, path: str) -> None:
    """Else each closed browser tab decodes on to the end of the context."""
    before = aborted(server)
    server.engine.pace_s = 0.02
    body: dict[str, Any] = {"stream": True, "max_tokens": 3000}
    if "chat" in path:
        body["messages"] = [{"role": "user", "content": "x"}]
    else:
        body["prompt"] = "x"
    with httpx.Client(base_url=server.url) as client, client.stream("POST", path, json=body) as response:
        next(response.iter_bytes())
    until(lambda: server.engine.aborted == [server.engine.submitted[0].id])
    until(lambda: aborted(server) == before + 1)


@pytest.mark.parametrize("stream", [False, True])
def test_hanging_up_before_the_first_token_aborts_too(server: Server, stream: bool) -> None:
    """A request that waits writes nothing, so no failed write can tell that its client is gone."""
    server.engine.paused = True
    with httpx.Client(base_url=server.url, timeout=0.2) as client, pytest.raises(httpx.ReadTimeout):
        response = client.post("/v1/completions", json={"prompt": ["a", "b", "c"], "stream": stream})
        assert response.status_code == 200  # the head of a stream comes at once, its first event does not
    until(lambda: sorted(server.engine.aborted) == sorted(request.id for request in server.engine.submitted))
    assert len(server.engine.aborted) == 3


def test_a_neighbour_is_not_touched_by_a_disconnect(server: Server) -> None:
    """Aborting the wrong request would cut a stranger's answer."""
    server.engine.pace_s = 0.005
    with httpx.Client(base_url=server.url) as gone, httpx.Client(base_url=server.url, timeout=20) as stays:
        body = {"prompt": "x", "stream": True, "max_tokens": 3000}
        with gone.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_bytes())
            neighbour = stays.build_request(
                "POST", "/v1/completions", json={**body, "temperature": 0, "max_tokens": 60}
            )
            answer = stays.send(neighbour, stream=True)
        text = "".join(line for line in answer.iter_text())
        answer.close()
    assert '"finish_reason":"length"' in text
    assert len(server.engine.aborted) == 1


def test_answers_that_ended_are_not_aborted(server: Server) -> None:
    """An abort after the end could hit a later request that reuses what the first one had."""
    server.complete(max_tokens=3)
    server.complete(max_tokens=3, stream=True)
    server.complete(prompt=["a", "b"], max_tokens=3)
    assert server.engine.aborted == []


def test_many_mixed_requests_all_end_and_leave_no_zombies(server: Server) -> None:
    """Short, long, stopped, cancelled, bad: each gets an answer or an error, and the gauges return to 0."""
    draw = random.Random(1)
    kinds = ["short", "long", "stop", "cancel", "bad", "stream"]

    async def one(client: httpx.AsyncClient, gate: asyncio.Semaphore, kind: str) -> str:
        body: dict[str, Any] = {"prompt": "x", "temperature": 0, "max_tokens": 10}
        changes: dict[str, dict[str, Any]] = {
            "short": {},
            "long": {"max_tokens": 300},
            "stop": {"stop": "hij", "max_tokens": 50},
            "cancel": {"max_tokens": 3000, "stream": True},
            "bad": {"top_p": -1},
            "stream": {"stream": True},
        }
        body |= changes[kind]
        async with gate:
            if kind == "cancel":
                async with client.stream("POST", "/v1/completions", json=body) as response:
                    async for _ in response.aiter_bytes():
                        return "cancelled"
            response = await client.post("/v1/completions", json=body)
            if kind == "bad":
                return str(response.status_code)
            if kind == "stream":
                return "done" if response.text.endswith("data: [DONE]\n\n") else response.text
            return str(response.json()["choices"][0]["text"])

    async def all_of_them() -> list[tuple[str, str]]:
        gate = asyncio.Semaphore(16)
        async with httpx.AsyncClient(base_url=server.url, timeout=20, limits=httpx.Limits()) as client:
            chosen = [draw.choice(kinds) for _ in range(64)]
            return list(zip(chosen, await asyncio.gather(*(one(client, gate, kind) for kind in chosen)), strict=True))

    expected = {
        "short": alphabet(10),
        "long": alphabet(300),
        "stop": "abcdefg",
        "cancel": "cancelled",
        "bad": "400",
        "stream": "done",
    }
    results = asyncio.run(all_of_them())
    assert all(result == expected[kind] for kind, result in results)
    until(lambda: server.sums("num_requests_running") == server.sums("num_requests_waiting") == 0)
    assert server.client.get("/health").status_code == 200


def test_requests_beyond_places_and_queue_are_refused_at_once() -> None:
    """An unbounded queue answers everyone too late; here one is decoded, four wait, the others hear so immediately."""
    engine = ScriptedEngine(max_num_seqs=1, max_waiting=4)
    with serve(engine) as server:
        engine.paused = True

        async def fire() -> list[int]:
            async with httpx.AsyncClient(base_url=server.url, timeout=20, limits=httpx.Limits()) as client:

                async def post() -> int:
                    return (await client.post("/v1/completions", json={"prompt": "x"})).status_code

                first = asyncio.ensure_future(post())
                while engine.num_running == 0:
                    await asyncio.sleep(0.005)
                others = [asyncio.ensure_future(post()) for _ in range(19)]
                while sum(other.done() for other in others) < 15:
                    await asyncio.sleep(0.005)
                engine.paused = False
                return [await first, *[await other for other in others]]

        statuses = asyncio.run(fire())
        assert sorted(statuses) == [200] * 5 + [429] * 15
        assert server.metrics()['graftserve_request_errors_total{status="429"}'] == 15
