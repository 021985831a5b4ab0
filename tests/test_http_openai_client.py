"""The real client library against the real server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.http_engine import MODEL, Server, alphabet, serve

MESSAGES: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module", name="running")
def _running() -> Iterator[tuple[Server, openai.OpenAI]]:
    with serve() as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield server, client


@pytest.fixture
def server(running: tuple[Server, openai.OpenAI]) -> Server:
    running[0].engine.reset()
    return running[0]


@pytest.fixture
def client(server: Server, running: tuple[Server, openai.OpenAI]) -> openai.OpenAI:
    return running[1]


def test_client_reads_whole_answers(client: openai.OpenAI) -> None:
    """Both endpoints, as its users call them."""
    chat = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=5, temperature=0)
    assert chat.choices[0].message.content == alphabet(5)
    assert chat.choices[0].finish_reason == "length"
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 5
    text = client.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=5, temperature=0)
    assert [choice.text for choice in text.choices] == [alphabet(5)] * 2


def test_client_reads_streams(client: openai.OpenAI) -> None:
    """Text, finish reason, and usage on the last chunk."""
    stream = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=10,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == alphabet(10)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 10
    pieces = client.completions.create(model=MODEL, prompt="a", max_tokens=10, temperature=0, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == alphabet(10)


def test_client_reaches_our_extensions(client: openai.OpenAI) -> None:
    """The switch through extra_body, the numbers through the untyped part of the answer."""
    off = client.completions.create(
        model=MODEL, prompt="a", max_tokens=4, temperature=0, extra_body={"speculative": {"enabled": False}}
    )
    metrics: Any = (off.model_extra or {})["metrics"]
    assert metrics["graft"]["schedule"] == "ar"
    assert metrics["speculative_decoding"]["num_draft_tokens"] == 0


def test_client_raises_the_error_that_fits(client: openai.OpenAI, server: Server) -> None:
    """Its users catch classes, which it chooses by status and body."""
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, n=300)
    assert bad.value.param == "n"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert unknown.value.code == "model_not_found"
    server.engine.refuse_after = 0
    with pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model=MODEL, messages=MESSAGES)


def test_client_raises_when_a_stream_breaks_off(client: openai.OpenAI, server: Server) -> None:
    """Otherwise half an answer would pass for a whole one."""
    server.engine.fail_after = 2
    stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, stream=True)
    with pytest.raises(openai.APIError, match="scripted fault"):
        list(stream)


def test_client_lists_the_model(client: openai.OpenAI) -> None:
    """Ids with a slash must survive the path."""
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_client_can_send_an_answer_back(client: openai.OpenAI) -> None:
    """The usual loop of a chat: append what came, ask again."""
    first = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=2, temperature=0)
    history = [*MESSAGES, first.choices[0].message]
    second = client.chat.completions.create(model=MODEL, messages=history, max_tokens=2, temperature=0)
    assert second.choices[0].message.content == alphabet(2)
