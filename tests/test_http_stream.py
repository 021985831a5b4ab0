"""Streamed answers: the exact events, and what becomes of a stream that goes wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from app.sse import event
from tests.http_engine import MODEL, NOTHING_CACHED, Server, alphabet, serve


@pytest.fixture(scope="module", name="running")
def _running() -> Iterator[Server]:
    with serve() as server:
        yield server


@pytest.fixture
def server(running: Server) -> Server:
    running.engine.reset()
    return running


def events(response: httpx.Response) -> list[Any]:
    """Every event's data but the closing one's, after a check that the bytes are nothing but events."""
    assert response.status_code == 200, response.text
    blocks = response.content.split(b"\n\n")
    assert blocks.pop() == b"", "the stream ends inside an event"
    for block in blocks:
        assert block.startswith(b"data: ")
        assert b"\n" not in block
        assert b"\r" not in block
    assert blocks.pop() == b"data: [DONE]"
    return [json.loads(block.removeprefix(b"data: ")) for block in blocks]


def test_head_of_a_stream_keeps_proxies_from_buffering(server: Server) -> None:
    """A proxy that collects events turns a stream into one late answer."""
    headers = server.complete(stream=True).headers
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert headers["x-request-id"]
    assert "content-length" not in headers


def test_chat_stream_is_role_then_text_then_finish_then_done(server: Server) -> None:
    """Clients are built around this order and around what is absent in each chunk."""
    chunks = events(server.chat(stream=True, max_tokens=7, messages=[{"role": "user", "content": "x"}]))
    for chunk in chunks:
        assert set(chunk) - {"metrics"} == {"id", "object", "created", "model", "system_fingerprint", "choices"}
        assert chunk["object"] == "chat.completion.chunk"
        assert chunk["model"] == MODEL
        assert len(chunk["choices"]) == 1
        assert set(chunk["choices"][0]) == {"index", "delta", "logprobs", "finish_reason"}
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    assert chunks[0]["id"].startswith("chatcmpl-")
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[1:-1] == [{"content": "abc"}, {"content": "def"}, {"content": "g"}]
    assert deltas[-1] == {}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 4 + ["length"]
    assert ["metrics" in chunk for chunk in chunks] == [False] * 4 + [True]


def test_completion_stream_has_no_role_and_no_empty_piece(server: Server) -> None:
    """Held-back text must not show as empty chunks, which some clients take for the end."""
    chunks = events(server.complete(stream=True, max_tokens=7, stop="zz" + "z" * 10))
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    choices = [chunk["choices"][0] for chunk in chunks]
    assert all(set(choice) == {"index", "text", "logprobs", "finish_reason"} for choice in choices)
    assert [choice["text"] for choice in choices] == ["abcdefg", ""]
    assert [choice["finish_reason"] for choice in choices] == [None, "length"]


def test_usage_chunk_comes_only_when_asked_for_and_in_its_place(server: Server) -> None:
    """Some clients crash on a chunk without choices, others wait for one, and load tools look there for metrics."""
    asked = events(server.chat(stream=True, stream_options={"include_usage": True}, max_tokens=4))
    assert [chunk["choices"] == [] for chunk in asked] == [False] * (len(asked) - 1) + [True]
    assert asked[-2]["choices"][0]["finish_reason"] == "length"
    assert all(chunk["usage"] is None for chunk in asked[:-1])
    assert asked[-1]["usage"]["completion_tokens"] == 4
    assert ["metrics" in chunk for chunk in asked] == [False] * (len(asked) - 1) + [True]
    for options in (None, {}, {"include_usage": False}, {"include_usage": None}):
        plain = events(server.chat(stream=True, stream_options=options, max_tokens=4))
        assert all(chunk["choices"] for chunk in plain)
        assert all("usage" not in chunk for chunk in plain)


@pytest.mark.parametrize("path", ["complete", "chat"])
def test_running_usage_counts_what_came_up_to_the_chunk(server: Server, path: str) -> None:
    """Load generators divide by these counts: one chunk may carry several tokens."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(getattr(server, path)(stream=True, stream_options=options, max_tokens=9))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == counts[-2] == 9
    prompt = chunks[-1]["usage"]["prompt_tokens"]
    for chunk in chunks[:-1]:
        count = chunk["usage"]["completion_tokens"]
        assert chunk["usage"] == {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}
    texts = [
        choice["text"] if path == "complete" else choice["delta"].get("content", "")
        for chunk in chunks[:-1]
        for choice in chunk["choices"]
    ]
    assert [sum(map(len, texts[: end + 1])) for end in range(len(texts))] == counts[:-1], "here a token is a letter"
    assert max(map(len, texts)) > 1, "no chunk carried several tokens"
    assert "prompt_tokens_details" in chunks[-1]["usage"]


def test_the_body_that_guidellm_sends_is_served(server: Server) -> None:
    """As version 0.8.1 does: a field refused here is a load generator that cannot be used."""
    content = [{"type": "text", "text": "1 0 m0"}]
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"stream": True, "stream_options": options, "max_completion_tokens": 16, "ignore_eos": True}
    chunks = events(server.chat(**body, model=MODEL, messages=[{"role": "user", "content": content}]))
    assert chunks[-1]["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("path", ["complete", "chat"])
@pytest.mark.parametrize("options", [{}, {"stop": ["mn"]}, {"speculative": {"enabled": False}}, {"max_tokens": 1}])
def test_streamed_and_whole_answers_agree(server: Server, path: str, options: dict[str, object]) -> None:
    """Text, finish reason, usage and metrics must not depend on how the answer travels."""
    ask = getattr(server, path)
    options = {"max_tokens": 20, **options}
    whole = ask(**options).json()
    chunks = events(ask(stream=True, stream_options={"include_usage": True}, **options))
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    text = "".join(c["text"] if path == "complete" else c["delta"].get("content", "") for c in choices)
    choice = whole["choices"][0]
    assert text == (choice["text"] if path == "complete" else choice["message"]["content"])
    assert choices[-1]["finish_reason"] == choice["finish_reason"]
    assert chunks[-1]["usage"] == whole["usage"]
    assert chunks[-1]["metrics"] == whole["metrics"]


def test_streams_of_several_prompts_interleave_by_index(server: Server) -> None:
    """Each choice has its own text and its own end; usage is that of all."""
    prompts = ["a", "b", "c"]
    body: dict[str, Any] = {"prompt": prompts, "max_tokens": 8, "stream": True}
    chunks = events(server.complete(**body, stream_options={"include_usage": True}))
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for index in range(3):
        mine = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in mine) == alphabet(8)
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["length"]
    assert chunks[-1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 24, "total_tokens": 27, **NOTHING_CACHED}
    finishes = [c for c in events(server.complete(**body)) if c["choices"][0]["finish_reason"]]
    own = [chunk["metrics"]["speculative_decoding"]["num_spec_steps"] for chunk in finishes]
    assert own == [3, 3, 3]
    assert chunks[-1]["metrics"]["speculative_decoding"]["num_spec_steps"] == sum(own)


@pytest.mark.parametrize("wants_usage", [False, True])
def test_a_failure_in_the_middle_is_an_error_event_and_counts_as_one(server: Server, wants_usage: bool) -> None:
    """A stream that just ends is read as a complete answer."""
    server.engine.fail_after = 2
    counted = (("requests_total", {"finish_reason": "error"}), ("request_errors_total", {"status": "500"}))
    before = [server.sums(name, **labels) for name, labels in counted]
    options = {"stream_options": {"include_usage": True}} if wants_usage else {}
    chunks = events(server.complete(stream=True, **options))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == "abcdef"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])
    error = chunks[-1]["error"]
    assert set(chunks[-1]) == {"error"}
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "server_error"
    assert "scripted fault" in error["message"]
    assert [server.sums(name, **labels) for name, labels in counted] == [count + 1 for count in before]


def test_a_failed_prompt_of_a_list_ends_the_stream_and_the_other_prompts(server: Server) -> None:
    """The rest would be decoded for an answer that is already lost."""
    server.engine.fail_after = 1
    server.engine.pace_s = 0.05
    chunks = events(server.complete(prompt=["a", "b", "c", "d"], stream=True))
    assert "error" in chunks[-1]
    assert sum("error" in chunk for chunk in chunks) == 1
    assert len(server.engine.aborted) == 3


def test_a_mistake_of_ours_in_the_middle_is_an_error_event_without_internals(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not a cut connection, and nothing of the traceback on the wire."""

    def broken(*_: object) -> None:
        raise KeyError("secret")

    monkeypatch.setattr("app.answer_body.answer_metrics", broken)
    response = server.complete(stream=True)
    assert "secret" not in response.text
    assert events(response)[-1]["error"]["type"] == "server_error"
    assert "secret" in caplog.text


def test_events_are_single_lines_of_ascii_for_every_text() -> None:
    """Clients split at line ends that Unicode knows and JSON may leave bare, and would cut an event in two."""
    text = "a\nb\r\n\u2028\u2029\x85\x0b\x0c\x1c é 漢 😊 \ufffd"
    data = event({"text": text})
    assert data.isascii()
    assert len(data.decode().rstrip("\n").splitlines()) == 1
    assert json.loads(data.removeprefix(b"data: "))["text"] == text


def test_numbers_that_are_no_json_never_reach_the_wire() -> None:
    """Strict parsers reject NaN; better our error than theirs."""
    with pytest.raises(ValueError, match="JSON"):
        event({"x": float("nan")})
