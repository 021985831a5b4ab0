"""Faults that other speculative servers had with parameters, models on disk and settings of a request, tried on this one.

trial                                                   test
F1  an empty prompt kills the server                    test_f1_empty_prompts; test_http_validation.py
F2  top_p = 0, top_k beyond the vocabulary              test_f2_edges_of_sampling_parameters
F3  a prompt that is too long                           test_f3_around_the_end_of_the_context
F5  n > 1 with speculation                              test_f5_several_answers_to_one_prompt
F6  speculation switched off silently                   test_f6_no_parameter_switches_drafting_off
F7  a grammar ignored on drafted tokens                 test_f7_a_form_that_cannot_be_kept_is_refused
F8  no chat template                                    test_f8_without_a_chat_template_only_chats_are_refused
F9  files that cannot be read                           test_f9_a_target_that_cannot_be_read; test_models_refusal.py
J1  divided traffic never reaches the second side       test_http_stickiness.py; where traffic is divided: app/experiments
J2  a switch that is taken and not honored              test_j2_off_and_on_side_by_side
J3  new settings half applied                           settings cannot change while the server runs: test_http_settings.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from app.build import build
from app.config import Settings
from app.serving import LoadedEngine
from models import toy
from tests.engine_world import World
from tests.http_engine import serve
from tests.real_server import Real, real_server

TinyModel = Callable[..., PreTrainedModel]
LONGEST = 120
OFF, ON = {"enabled": False}, {"schedule": "treegraft"}


@pytest.fixture(scope="module")
def real(tiny_model: TinyModel) -> Iterator[Real]:
    target = tiny_model("llama", 259, 5)
    with real_server(
        target, small=tiny_model("llama", 259, 99), medium=target, num_rows=4000, max_model_len=LONGEST, default="treegraft"
    ) as real:
        yield real


def refused(response: Any, param: str, code: str | None = None) -> str:
    """The message of a 400 about that parameter."""
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and code in (None, error["code"])
    return str(error["message"])


@pytest.mark.parametrize("prompt", ["", [""], [], ["a", ""], [[]]])
def test_f1_empty_prompts(real: Real, prompt: object) -> None:
    """There is no token to start from; whoever asks is told, and the server lives on."""
    refused(real.complete(prompt), "prompt")
    refused(real.client.post("/v1/chat/completions", json={"messages": []}), "messages")
    assert real.client.get("/health").status_code == 200


@pytest.mark.parametrize("schedule", ["ar", "treegraft"])
def test_f2_edges_of_sampling_parameters(real: Real, schedule: str) -> None:
    """Impossible values are refused by name, possible ones served, and none is a 500."""
    for name, bad, good in (
        ("top_p", [0, 1.0001, -0.1], [1, 1e-9]),
        ("top_k", [-2], [-1, 0, 1, 10**9]),
        ("temperature", [-1, "nan", 1e9], [0, 2]),
        ("min_p", [-0.1, 1.1], [0, 1]),
        ("repetition_penalty", [0, -1], [0.01, 50]),
    ):
        for value in bad:
            refused(real.complete(**{name: value}, speculative={"schedule": schedule}), name)
        for value in good:
            response = real.complete(**{"temperature": 1, name: value}, max_tokens=5, speculative={"schedule": schedule})
            assert response.status_code == 200, (name, value, response.text)


@pytest.mark.parametrize("speculative", [OFF, ON])
def test_f3_around_the_end_of_the_context(real: Real, speculative: dict[str, Any]) -> None:
    """One token less than the context gives one token; more is refused with the true numbers."""
    one = real.ask("x" * (LONGEST - 1), speculative=speculative)
    assert (one["usage"]["completion_tokens"], one["choices"][0]["finish_reason"]) == (1, "length")
    for length in (LONGEST, LONGEST + 1, 10 * LONGEST):
        message = refused(real.complete("x" * length, speculative=speculative), "prompt", "context_length_exceeded")
        assert str(LONGEST) in message and str(length) in message
    message = refused(real.complete("x" * 100, max_tokens=21), "max_tokens", "context_length_exceeded")
    assert all(number in message for number in ("120", "100", "21", "121"))
    assert real.ask("x" * 100, max_tokens=20, speculative=speculative)["usage"]["completion_tokens"] == 20
    chat = {"messages": [{"role": "user", "content": "x" * 500}]}
    refused(real.client.post("/v1/chat/completions", json=chat), "messages", "context_length_exceeded")


@pytest.mark.parametrize("speculative", [OFF, ON])
def test_f5_several_answers_to_one_prompt(real: Real, speculative: dict[str, Any]) -> None:
    """Each has its index, its own end, and its part of the bill; streams interleave by index."""
    asked = {"n": 4, "temperature": 1, "seed": 1, "max_tokens": 12, "speculative": speculative}
    whole = real.ask("abc", **asked)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert len({choice["text"] for choice in whole["choices"]}) == 4
    bill = {"prompt_tokens": 3, "completion_tokens": 48, "total_tokens": 51}
    assert bill.items() <= whole["usage"].items()
    streamed: dict[int, str] = {}
    ends = []
    for event in real.events("abc", **asked):
        choice = event["choices"][0]
        streamed[choice["index"]] = streamed.get(choice["index"], "") + choice["text"]
        ends += [choice["index"]] if choice["finish_reason"] else []
    assert [streamed[index] for index in range(4)] == [choice["text"] for choice in whole["choices"]]
    assert sorted(ends) == [0, 1, 2, 3]
    best = real.ask("abc", **{**asked, "n": 2}, best_of=4)
    assert len(best["choices"]) == 2 and best["usage"]["completion_tokens"] == 48
    refused(real.complete(n=4, best_of=2), "best_of")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"logprobs": 5},
        {"presence_penalty": 1, "frequency_penalty": 1},
        {"repetition_penalty": 1.2},
        {"logit_bias": {"65": 3}},
        {"min_p": 0.1, "temperature": 1},
        {"stop": ["never there"], "min_tokens": 5},
        {"n": 2, "temperature": 1},
        {"echo": True},
    ],
)
def test_f6_no_parameter_switches_drafting_off(real: Real, options: dict[str, Any]) -> None:
    """If one did, the answer's own numbers would have to say so."""
    told = real.ask("abc", max_tokens=12, **options)["metrics"]
    assert told["speculative_decoding"]["num_draft_tokens"] > 0
    assert told["graft"]["schedule"] == "treegraft" and told["graft"]["halts"] == {}


def test_f7_a_form_that_cannot_be_kept_is_refused(real: Real) -> None:
    """Never an answer without the form that was asked for: it is kept, or refused by name."""
    object_only = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    for form, is_possible in (({"type": "no such form"}, False), ({"type": "json_schema"}, False), (object_only, True)):
        response = real.complete(response_format=form, max_tokens=60)
        if is_possible and response.status_code == 200:
            assert response.json()["choices"][0]["text"].lstrip().startswith("{")
        else:
            assert response.status_code == 400 and response.json()["error"]["param"].startswith("response_format")


def test_f8_without_a_chat_template_only_chats_are_refused(tiny_model: TinyModel) -> None:
    """With the remedy in the message, and not at the start of the server."""
    world = World(tiny_model("llama", 259, 5))
    tokenizer = toy.byte_tokenizer(chat_template=None)
    with serve(load=lambda: LoadedEngine(world.engine, tokenizer)) as server:  # type: ignore[arg-type]
        message = refused(server.chat(), "messages", "no_chat_template")
        assert "chat_template" in message and "/v1/completions" in message
        assert server.complete(max_tokens=2).status_code == 200


@pytest.mark.parametrize("name", ["broken.gguf", "weights.safetensors", "empty"])
def test_f9_a_target_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    """A message of one line about that file, not an hour of a library's traceback."""
    path = tmp_path / name
    if name == "empty":
        path.mkdir()
    else:
        path.write_bytes(b"GGUF" + b"\x00" * 50)
    with pytest.raises(ValueError) as told:
        build(Settings(target=str(path), small="ngram", medium=None), lambda _: None)
    assert name in str(told.value)
    assert len(str(told.value).splitlines()) == 1


def test_j2_off_and_on_side_by_side(real: Real) -> None:
    """In one batch: the one that is off drafts nothing, the others as much as ever, and the texts are the same."""
    alone = real.ask("abc", max_tokens=40, speculative=ON)
    with ThreadPoolExecutor(6) as pool:
        asked = [(OFF if i % 2 else ON) for i in range(6)]
        answers = list(pool.map(lambda one: real.ask("abc", max_tokens=40, speculative=one), asked))
    for one, answer in zip(asked, answers, strict=True):
        told = answer["metrics"]["speculative_decoding"]
        assert answer["choices"] == alone["choices"]
        assert told["num_draft_tokens"] == (0 if one is OFF else alone["metrics"]["speculative_decoding"]["num_draft_tokens"])
