"""Start, health, stop, and what the service says about itself."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest
import uvicorn

from app.serving import LoadedEngine
from tests.http_engine import MODEL, ScriptedEngine, alphabet, serve, until


def test_server_answers_503_while_loading_and_serves_when_ready() -> None:
    """A server silent while it loads is killed by its supervisor; one that claims to be healthy gets traffic."""
    engine, gate = ScriptedEngine(), threading.Event()

    def load() -> LoadedEngine:
        gate.wait(10)
        return LoadedEngine(engine, engine.tokenizer)

    with serve(engine, load=load, wait_ready=False) as server:
        health = server.client.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "loading"})
        for response in (server.complete(), server.chat(), server.client.get("/v1/models")):
            assert response.status_code == 503
            assert response.json()["error"]["type"] == "server_error"
            assert response.json()["error"]["code"] == "overloaded"
            assert response.headers["retry-after"]
        assert server.client.get("/metrics").status_code == 200
        gate.set()
        until(lambda: server.client.get("/health").status_code == 200)
        assert server.client.get("/health").json() == {"status": "ok"}
        assert server.complete(max_tokens=2).json()["choices"][0]["text"] == alphabet(2)


@pytest.mark.parametrize("error", [ValueError("no such model: toy"), SystemExit("no such model: toy")])
def test_a_failed_load_is_handed_to_the_caller_who_can_stop_the_server(error: BaseException) -> None:
    """Running on without a model, or dying without a word, both leave the operator guessing."""
    seen: list[BaseException] = []

    def load() -> LoadedEngine:
        raise error

    with serve(load=load, wait_ready=False, on_failure=seen.append) as server:
        until(lambda: seen)
        assert server.app.state.failure is seen[0]
        assert "no such model: toy" in str(seen[0])
        health = server.client.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "failed"})
        assert "could not be loaded" in server.complete().json()["error"]["message"]


def test_the_hook_of_a_failed_load_can_end_the_server() -> None:
    """What the command line does with it."""

    def load() -> LoadedEngine:
        raise ValueError("no")

    def on_failure(_: BaseException) -> None:
        stop[0].should_exit = True

    stop: list[uvicorn.Server] = []
    gate = threading.Event()

    def load_later() -> LoadedEngine:
        gate.wait(10)
        return load()

    with serve(load=load_later, wait_ready=False, on_failure=on_failure) as server:
        stop.append(server.uvicorn)
        gate.set()
        until(lambda: server.uvicorn.should_exit)


def test_stopping_while_loading_does_not_wait_for_the_models() -> None:
    """Loading takes minutes; Ctrl-C must not."""
    gate = threading.Event()

    def load() -> LoadedEngine:
        gate.wait(30)
        raise AssertionError("not reached in time")

    with serve(load=load, wait_ready=False) as server:
        assert server.client.get("/health").status_code == 503
    gate.set()


@pytest.mark.parametrize("state", ["stalled", "stopped", "failed: out of memory at 0x7f"])
def test_health_tells_what_the_engine_says(state: str) -> None:
    """A frozen engine behind a healthy-looking server was invisible for hours elsewhere."""
    with serve() as server:
        server.engine.state = state
        response = server.client.get("/health")
        assert (response.status_code, response.json()) == (503, {"status": state.partition(":")[0]})


def test_stopping_the_server_stops_the_engine_and_ends_its_streams() -> None:
    """A stream cut by the end of the server must say so, not look complete."""
    engine = ScriptedEngine()
    with serve(engine) as server:
        engine.pace_s = 0.02
        with server.client.stream(
            "POST", "/v1/completions", json={"prompt": "x", "stream": True, "max_tokens": 60}
        ) as r:
            lines = r.iter_lines()
            assert next(lines).startswith("data: ")
            engine.stop()
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"error"' in rest[-2]
        assert server.complete().status_code == 503
    assert engine.stopped
    assert not engine._thread.is_alive()


def test_models_and_schedules_describe_what_can_be_asked_for() -> None:
    """Clients choose from these lists."""
    with serve(served_model_name="public/name") as server:
        listed = server.client.get("/v1/models").json()
        assert listed["object"] == "list"
        model = listed["data"][0]
        assert (model["id"], model["object"], model["root"], model["max_model_len"]) == (
            "public/name",
            "model",
            MODEL,
            64,
        )
        assert server.client.get("/v1/models/public/name").json() == model
        assert server.client.get(f"/v1/models/{MODEL}").status_code == 404
        assert server.complete(model="public/name").json()["model"] == "public/name"
        assert server.complete(model=MODEL).status_code == 404
        schedules = server.client.get("/v1/schedules").json()["data"]
        assert [s["name"] for s in schedules] == ["ar", "chain", "graft"]
        assert [s["default"] for s in schedules] == [False, False, True]
        assert all(s["description"] and s["budget"] >= 1 for s in schedules)
        assert all(s["lossless"] and s["keeps_seeded_text"] for s in schedules)


def test_request_ids_are_taken_over_if_harmless_and_made_up_otherwise() -> None:
    """The id ties a client's log to ours; a caller's line break in a header must not come back."""
    with serve() as server:
        given = server.client.get("/health", headers={"X-Request-Id": "abc-1"})
        assert given.headers["x-request-id"] == "abc-1"
        for odd in ("", "a b", "x" * 200):
            made = server.client.get("/health", headers={"X-Request-Id": odd}).headers["x-request-id"]
            assert len(made) == 32
        assert server.client.get("/nowhere").headers["x-request-id"]


def test_a_mistake_of_ours_is_a_500_without_internals(monkeypatch: pytest.MonkeyPatch) -> None:
    """The traceback belongs in the log; the answer keeps the error shape and the request id."""

    def broken(*_: object) -> None:
        raise KeyError("secret")

    with serve() as server:
        monkeypatch.setattr("app.routes.completions.check_model", broken)
        response = server.complete()
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
        assert "secret" not in response.text
        assert response.headers["x-request-id"]
        monkeypatch.undo()
        assert server.complete().status_code == 200
        assert server.metrics()['graftserve_request_errors_total{status="500"}'] == 1


def test_a_long_prompt_does_not_hold_up_the_others() -> None:
    """Tokenizing a book takes seconds, in which every stream would stand still and the health check would fail."""
    engine, gate, begun = ScriptedEngine(), threading.Event(), threading.Event()

    class SlowOnLongTexts:
        chat_template = "{{ messages }}"

        def encode(self, text: str, /, *, add_special_tokens: bool = True) -> list[int]:
            if len(text) > 10_000:
                begun.set()
                gate.wait(10)
            return [1] * len(text)

        def apply_chat_template(self, conversation: Any, /, **_: Any) -> str:
            return str(conversation[0]["content"])

    with serve(engine, load=lambda: LoadedEngine(engine, SlowOnLongTexts())) as server:
        text = "x" * 20_000
        calls = [
            ("/v1/completions", {"prompt": text}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ]
        for path, body in calls:
            statuses: list[int] = []
            long = threading.Thread(
                target=lambda p, b, s: s.append(httpx.post(server.url + p, json=b, timeout=20).status_code),
                args=(path, body, statuses),
            )
            long.start()
            assert begun.wait(10)
            assert server.complete(max_tokens=2).json()["choices"][0]["text"] == alphabet(2)
            gate.set()
            long.join(10)
            assert statuses == [400]
            begun.clear()
            gate.clear()


def test_the_api_description_is_served() -> None:
    """Generators of clients read it; a model that cannot be described breaks the page."""
    with serve() as server:
        paths = server.client.get("/openapi.json").json()["paths"]
        assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics"} <= set(paths)
