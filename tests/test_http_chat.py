"""``POST /v1/chat/completions``: the template, the messages, and the answer's shape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from models.toy import byte_tokenizer
from tests.http_engine import MODEL, ScriptedEngine, Server, alphabet, serve


@pytest.fixture(scope="module", name="running")
def _running() -> Iterator[Server]:
    with serve(ScriptedEngine(max_model_len=200)) as server:
        yield server


@pytest.fixture
def server(running: Server) -> Server:
    running.engine.reset()
    return running


def prompt_text(server: Server) -> str:
    """What the engine was given."""
    return str(server.engine.tokenizer.decode(server.engine.submitted[-1].prompt))


def test_answer_has_the_shape_clients_parse(server: Server) -> None:
    """A missing or misplaced key would break every client library."""
    body = server.chat(max_tokens=5).json()
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["model"] == MODEL
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": alphabet(5)},
            "logprobs": None,
            "finish_reason": "length",
        }
    ]
    assert body["usage"]["completion_tokens"] == 5
    assert body["metrics"]["graft"]["schedule"] == "graft"


def test_the_template_writes_the_prompt_and_its_special_tokens_are_single_tokens(server: Server) -> None:
    """Special tokens added twice, or spelled out letter by letter, are a prompt the model was never trained on."""
    server.chat(messages=[{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}], max_tokens=1)
    expected = "<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt_text(server) == expected
    start = server.engine.tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert server.engine.submitted[-1].prompt.count(start) == 3


def test_content_in_parts_is_the_same_as_the_joined_text(server: Server) -> None:
    """Client libraries send both forms for the same thing."""
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    server.chat(messages=[{"role": "user", "content": parts}], max_tokens=1)
    in_parts = prompt_text(server)
    server.chat(messages=[{"role": "user", "content": "one\ntwo"}], max_tokens=1)
    assert prompt_text(server) == in_parts


def test_a_developer_message_is_the_system_message_of_open_models(server: Server) -> None:
    """Newer clients say developer; no open model's template knows the word."""
    server.chat(messages=[{"role": "developer", "content": "be"}, {"role": "user", "content": "x"}], max_tokens=1)
    assert prompt_text(server).startswith("<|im_start|>system\nbe")


def test_an_answer_can_be_sent_back_as_history(server: Server) -> None:
    """Clients append the message they got, with all its empty fields."""
    empty: dict[str, Any] = {"refusal": None, "tool_calls": None, "audio": None, "annotations": []}
    got = {"role": "assistant", "content": "yes", **empty}
    messages = [{"role": "user", "content": "x"}, got, {"role": "user", "content": "y"}]
    assert server.chat(messages=messages, max_tokens=1).status_code == 200
    assert "assistant\nyes<|im_end|>" in prompt_text(server)


def test_without_a_limit_a_chat_may_fill_the_context(server: Server) -> None:
    """Sixteen tokens, the other endpoint's default, would cut every answer in the first sentence."""
    body = server.chat().json()
    assert body["usage"]["total_tokens"] == 200
    assert server.engine.submitted[0].max_tokens is None


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ("hi", "messages"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "text": "x"}]}], "messages[0].content[0].type"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "x", "image_url": "y"}]}],
            "messages[0].content[0].image_url",
        ),
        ([{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [{}]}], "messages[1].tool_calls[0].id"),
        (["hi"], "messages[0]"),
    ],
)
def test_malformed_messages_are_refused_with_their_place(server: Server, messages: object, param: str) -> None:
    """In a conversation of fifty turns "invalid message" helps nobody."""
    response = server.chat(messages=messages)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert server.client.get("/health").status_code == 200


def test_a_conversation_beyond_the_context_is_refused_with_true_numbers(server: Server) -> None:
    """The template's own tokens count too."""
    error = server.chat(messages=[{"role": "user", "content": "x" * 9000}]).json()["error"]
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
    template = byte_tokenizer().apply_chat_template(
        [{"role": "user", "content": ""}], tokenize=False, add_generation_prompt=True
    )
    num_special = 3
    bare = str(template).replace("<|im_start|>", "").replace("<|im_end|>", "")
    assert str(9000 + len(bare) + num_special) in error["message"]


def test_a_model_without_a_chat_template_refuses_chats_only() -> None:
    """Base models have none; a made-up template would be a wrong prompt, a crash would take completions along."""
    with serve(ScriptedEngine(tokenizer=byte_tokenizer(chat_template=None))) as server:
        error = server.chat().json()["error"]
        assert server.chat().status_code == 400
        assert (error["param"], error["code"]) == ("messages", "no_chat_template")
        assert "chat_template.jinja" in error["message"]
        assert server.complete(max_tokens=3).json()["choices"][0]["text"] == alphabet(3)


def test_what_the_template_itself_refuses_is_the_callers_fault() -> None:
    """Many templates insist on alternating roles and raise; that is no 500."""
    template = "{{ raise_exception('roles must alternate') }}"
    with serve(ScriptedEngine(tokenizer=byte_tokenizer(chat_template=template))) as server:
        response = server.chat()
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "messages"
        assert "roles must alternate" in response.json()["error"]["message"]
