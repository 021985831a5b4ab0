"""A whole engine behind the real edge: who leaves, what runs out of time and what breaks gives back every row and place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import torch
from transformers import PreTrainedModel

from engine.admission import Limits
from tests.http_engine import until
from tests.real_server import PATH, Fault, Real, events, real_server

TinyModel = Callable[..., PreTrainedModel]
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def target(tiny_model: TinyModel) -> PreTrainedModel:
    """Its context is so long that no answer ends by itself while a test looks at it."""
    return tiny_model("llama", 259, 5, max_positions=9000)


@pytest.fixture(scope="module", name="running")
def _running(target: PreTrainedModel) -> Iterator[Real]:
    with real_server(target, medium=target, limits=Limits(max_num_seqs=2, max_waiting=6), num_rows=40_000) as real:
        yield real


@pytest.fixture
def real(running: Real) -> Iterator[Real]:
    yield running
    until(running.idle)


class Leaving(threading.Thread):
    """A call whose client can hang up at any time."""

    def __init__(self, real: Real, path: str = PATH, **body: Any) -> None:
        super().__init__(daemon=True)
        asked = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "abc"}
        self.path, self.body = path, {**asked, "temperature": 0, "max_tokens": 8000, **body}
        self.client = httpx.Client(base_url=real.url, timeout=60)
        self.seen = 0
        self.start()

    def run(self) -> None:
        try:
            with self.client.stream("POST", self.path, json=self.body) as response:
                for piece in response.iter_bytes():
                    self.seen += len(piece)
        except (httpx.HTTPError, OSError, RuntimeError, ValueError):
            pass

    def leave(self) -> None:
        """Close the connection, as a browser tab does."""
        for connection in list(self.client._transport._pool.connections):  # type: ignore[attr-defined]
            stream = connection._connection._network_stream
            stream.get_extra_info("socket").shutdown(2)
        self.join(10)
        self.client.close()


@pytest.mark.parametrize("path", [PATH, CHAT])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("place", ["running", "waiting"])
def test_who_hangs_up_frees_rows_and_places_within_a_step(real: Real, place: str, stream: bool, n: int, path: str) -> None:
    """Streamed or whole, decoding or in the queue: what nobody reads must not be made, and the neighbor notices nothing."""
    others = [Leaving(real), Leaving(real)] if place == "waiting" else []
    until(lambda: real.engine.num_running == len(others))
    call = Leaving(real, path, stream=stream, n=n)
    until(lambda: (real.engine.num_waiting if others else real.engine.num_running) == n)
    pool = real.world.lm.pool
    free = pool.num_available
    call.leave()
    until(lambda: (real.engine.num_running, real.engine.num_waiting) == (len(others), 0))
    if others:
        assert pool.num_available <= free, "the neighbors keep theirs"
    else:
        until(real.idle)
    for other in others:
        other.leave()


def test_an_abort_is_read_before_the_next_step(real: Real, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one step is made for who has gone: the one that runs when the word arrives."""
    call = Leaving(real, stream=True)
    until(lambda: call.seen > 0)
    after: list[str] = []
    abort, step = real.engine.abort, real.engine.step
    monkeypatch.setattr(real.engine, "abort", lambda request_id: (after.append("abort"), abort(request_id))[1])
    monkeypatch.setattr(real.engine, "step", lambda: (after.append("step"), step())[1])
    call.leave()
    until(real.idle)
    assert after[after.index("abort") + 1 :].count("step") <= 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_time_that_is_up_frees_them_too(real: Real, stream: bool, n: int) -> None:
    """With three answers two run and one waits."""
    response = real.complete(max_tokens=8000, timeout=0.3, n=n, stream=stream)
    assert (response.status_code, "timeout" in response.text) == (200 if stream else 504, True)
    until(real.idle)
    assert real.client.get("/health").status_code == 200


OUT_OF_MEMORY = [
    lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    lambda: RuntimeError("[enforce fail at alloc_cpu.cpp:118] . DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"),
    lambda: MemoryError(),
]


def holds(token: int) -> Callable[[Any], bool]:
    """Forwards in which some sequence has this very token."""
    return lambda segments: any(token in segment.tokens for segment in segments)


@pytest.mark.parametrize("error", OUT_OF_MEMORY)
@pytest.mark.parametrize("stream", [False, True])
def test_out_of_memory_ends_only_who_cannot_be_served(real: Real, stream: bool, error: Callable[[], Exception]) -> None:
    """The batch is halved until the culprit is alone: its caller hears why, the others get their whole answer."""
    alone = real.text("abc", max_tokens=80)
    with Fault(real.world, holds(7), error) as fault:
        answers: list[str] = []
        neighbor = threading.Thread(target=lambda: answers.append(real.text("abc", max_tokens=80)))
        neighbor.start()
        until(lambda: real.engine.num_running == 1)
        response = real.complete([65, 7, 66], max_tokens=50, stream=stream)
        neighbor.join(60)
        assert fault.calls >= 1
    if stream:
        (event,) = events(response.text)
    else:
        assert response.status_code == 500
        event = response.json()
    assert (event["error"]["type"], event["error"]["param"]) == ("server_error", None)
    assert "memory" in event["error"]["message"] and "Allocator" not in response.text
    assert answers == [alone]
    assert real.client.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize("error", [OUT_OF_MEMORY[0], lambda: RuntimeError("a shape that does not fit")])
def test_one_caller_cannot_end_the_server_by_asking_often(real: Real, error: Callable[[], Exception]) -> None:
    """Steps that fail in a row mean a lost device, unless the model can still read a single token."""
    with Fault(real.world, holds(7), error):
        assert [real.complete([65, 7]).status_code for _ in range(5)] == [500] * 5
        assert real.client.get("/health").json() == {"status": "ok"}
        assert real.text("abc", max_tokens=3)


def test_a_batch_that_is_too_large_is_served_in_parts(real: Real) -> None:
    """Nobody fails where less at a time would do."""
    alone = real.text("abc", max_tokens=30)
    with Fault(real.world, lambda segments: len(segments) > 1, OUT_OF_MEMORY[0]) as fault:
        together = real.ask(["abc", "abc"], max_tokens=30)
        assert fault.calls > 5
    assert [choice["text"] for choice in together["choices"]] == [alone, alone]


def test_a_fault_of_everyone_is_everyones_and_health_says_so(target: PreTrainedModel) -> None:
    """A lost device: every answer is an error, the server says that it is ill, and takes no more."""
    with real_server(target) as real:
        with Fault(real.world, lambda _: True, lambda: RuntimeError("device lost")):
            for _ in range(3):
                response = real.complete()
                assert response.status_code == 500
                assert "device" not in response.text
            until(lambda: real.client.get("/health").status_code == 503)
        assert real.client.get("/health").json() == {"status": "failed"}
        refused = real.complete()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        assert real.total("requests_total", finish_reason="error") == 3


@pytest.mark.parametrize("error", [OUT_OF_MEMORY[0], lambda: RuntimeError("broken")])
def test_a_drafter_that_fails_costs_nobody_the_answer(real: Real, error: Callable[[], Exception]) -> None:
    """It is given up for the requests that asked it, counted, and asked again by the next one."""
    plain = real.text("abc", max_tokens=40)
    drafter: Any = real.world.drafters["medium"]
    forward = drafter.lm.forward
    before = real.total("drafter_halts_total", drafter="medium", reason="error")

    def broken(segments: Any) -> Any:
        raise error()

    drafter.lm.forward = broken
    try:
        answer = real.ask("abc", max_tokens=40, speculative={"schedule": "treegraft"})
    finally:
        drafter.lm.forward = forward
    assert answer["choices"][0]["text"] == plain
    assert answer["metrics"]["graft"]["halts"] == {"medium": "error"}
    assert real.total("drafter_halts_total", drafter="medium", reason="error") == before + 1
    assert drafter.lm.pool.num_available == drafter.lm.pool.num_rows
    healed = real.ask("abc", max_tokens=40, speculative={"schedule": "treegraft"})
    assert healed["metrics"]["graft"]["halts"] == {} and healed["choices"][0]["text"] == plain


def test_a_stream_that_breaks_in_the_middle_says_so_once(real: Real) -> None:
    """What came before stays, then one error, nothing else; and it is counted as failed."""
    counted = (("requests_total", {"finish_reason": "error"}), ("request_errors_total", {"status": "500"}))
    before = [real.total(name, **labels) for name, labels in counted]
    calls = 0

    def after_three(_: Any) -> bool:
        nonlocal calls
        calls += 1
        return calls > 3

    with Fault(real.world, after_three, lambda: RuntimeError("broken")):
        got = real.events("abc", max_tokens=50)
    assert ["error" in event for event in got] == [False] * (len(got) - 1) + [True]
    assert sum(len(event["choices"][0]["text"]) for event in got[:-1]) > 0
    assert [real.total(name, **labels) for name, labels in counted] == [count + 1 for count in before]
    assert real.text("abc", max_tokens=3)
