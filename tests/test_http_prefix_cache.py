"""What clients and operators are told of cached prompts, with a real engine behind the real server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from openai import OpenAI
from transformers import PreTrainedModel

from app.serving import LoadedEngine
from engine.admission import Limits
from tests.engine_world import World
from tests.http_engine import Server, serve

SYSTEM = "You answer in one word."


@pytest.fixture(scope="module", name="server")
def _server(tiny_model: Callable[..., PreTrainedModel]) -> Iterator[Server]:
    world = World(tiny_model("llama", 259, 1, max_positions=512), limits=Limits(prefill_chunk=32))
    with serve(load=lambda: LoadedEngine(world.engine, world.tokenizer)) as server:
        yield server


def cached(usage: dict[str, Any]) -> int:
    count: int = usage["prompt_tokens_details"]["cached_tokens"]
    assert 0 <= count < usage["prompt_tokens"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    return count


def test_usage_says_what_was_there_already_whole_and_streamed(server: Server) -> None:
    """Prices and latencies are explained by this number; a stream's last chunk has it too."""
    body: dict[str, Any] = {"prompt": "once upon a time there was", "max_tokens": 6}
    first = server.complete(**body).json()
    again = server.complete(**body).json()
    assert cached(first["usage"]) == 0
    assert cached(again["usage"]) == again["usage"]["prompt_tokens"] - 1
    assert again["choices"] == first["choices"]
    text = server.complete(**body, stream=True, stream_options={"include_usage": True}).text
    last = json.loads(text.split("data: ")[-2])
    assert cached(last["usage"]) == cached(again["usage"])


def test_chat_turns_are_read_once(server: Server) -> None:
    """The official client sees the number in the place it knows; the second turn holds the first one whole."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Capital of France?"}]
    known = []
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        for question in ("And of Italy?", "And of Spain?"):
            answer = client.chat.completions.create(model="toy", messages=messages, max_tokens=8, temperature=0)
            assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
            known.append((answer.usage.prompt_tokens_details.cached_tokens, answer.usage.prompt_tokens))
            messages += [{"role": "assistant", "content": "Paris"}, {"role": "user", "content": question}]
    assert known[1][0] is not None and known[0][1] - 20 < known[1][0] < known[1][1]


def test_several_answers_count_their_prompt_once(server: Server) -> None:
    """Three answers to each of two prompts: what the later ones found of the first one's is no saving of the client's."""
    usage = server.complete(prompt=["a new prompt of its own", "b is another"], n=3, max_tokens=2).json()["usage"]
    assert usage["prompt_tokens"] == 35 and cached(usage) < 6
    usage = server.complete(prompt=["a new prompt of its own", "b is another"], n=3, max_tokens=2).json()["usage"]
    assert cached(usage) == 35 - 2


def test_queries_hits_and_preemptions_are_on_the_page(server: Server) -> None:
    """The totals grow by what answers say; all three are there from the start."""
    names = ("prefix_cache_queries_total", "prefix_cache_hits_total", "preemptions_total", "prompt_tokens_total")
    before = {name: server.sums(name) for name in names}
    page = server.metrics()
    assert all(any(key.partition("{")[0] == f"graftserve_{name}" for key in page) for name in names)
    usages = [server.complete(prompt="the same thing twice", max_tokens=3).json()["usage"] for _ in range(2)]
    grown = {name: server.sums(name) - before[name] for name in names}
    assert grown["prefix_cache_queries_total"] == grown["prompt_tokens_total"] == sum(u["prompt_tokens"] for u in usages)
    assert grown["prefix_cache_hits_total"] == sum(map(cached, usages)) > 0
    assert grown["preemptions_total"] == 0
