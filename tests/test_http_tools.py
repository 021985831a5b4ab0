"""Tools over HTTP, with a real model behind them and templates that know them, or do not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from models import toy
from tests.http_engine import ScriptedEngine, Server, serve
from tests.tool_world import HERMES_TEMPLATE, LLAMA_TEMPLATE, TIME, UNKNOWN_TEMPLATE, WEATHER, chat, serve_toy

TOOLS = [WEATHER, TIME]
SCHEMAS = {"get_weather": WEATHER["function"]["parameters"], "time.now": {"type": "object", "maxProperties": 0}}  # type: ignore[index]
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module")
def hermes() -> Iterator[Server]:
    with serve_toy() as running:
        yield running


@pytest.fixture(scope="module")
def llama() -> Iterator[Server]:
    with serve_toy(LLAMA_TEMPLATE) as running:
        yield running


def check_calls(calls: list[dict[str, Any]]) -> None:
    """Ids differ, and arguments fulfill the functions' schemas."""
    assert len({call["id"] for call in calls}) == len(calls)
    for call in calls:
        assert call["type"] == "function"
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])


def gathered(response: Any) -> tuple[dict[str, Any], str]:
    """Message and finish reason of a streamed answer, put together as clients do."""
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    reason = ""
    for line in response.text.splitlines():
        if line.startswith("data: {"):
            (choice,) = json.loads(line[6:])["choices"]
            message["content"] += choice["delta"].get("content") or ""
            for piece in choice["delta"].get("tool_calls", ()):
                if piece["index"] == len(message["tool_calls"]):
                    assert piece["id"] and piece["function"]["name"]
                    message["tool_calls"].append({key: value for key, value in piece.items() if key != "index"})
                else:
                    assert set(piece) == {"index", "function"} and set(piece["function"]) == {"arguments"}
                    message["tool_calls"][piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
            reason = choice["finish_reason"] or reason
    return message, reason


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize("name", ["hermes", "llama"])
def test_demanded_calls_come_and_are_right(choice: Any, name: str, request: pytest.FixtureRequest) -> None:
    """A random model would never call by itself; whole and streamed tell the same, under every schedule."""
    server = request.getfixturevalue(name)
    whole = chat(server, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    assert whole.status_code == 200, whole.text
    answer = whole.json()["choices"][0]
    assert answer["finish_reason"] == "tool_calls"
    assert answer["message"]["content"] is None
    (call,) = answer["message"]["tool_calls"]
    check_calls([call])
    if choice is NAMED:
        assert call["function"]["name"] == "get_weather"
    for schedule in ("ar", "treegraft"):
        body = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "speculative": {"schedule": schedule}}
        message, reason = gathered(chat(server, **body, stream=True))
        assert (reason, message["content"]) == ("tool_calls", "")
        assert [one["function"] for one in message["tool_calls"]] == [call["function"]]


def test_several_calls_where_they_are_allowed(hermes: Server) -> None:
    """A bias against the end makes the model go on calling; without leave it calls once, and by name always once."""
    end = {str(toy.byte_tokenizer().convert_tokens_to_ids(token)): -100 for token in ("<|im_end|>", "<|endoftext|>")}
    message = chat(hermes, tools=TOOLS, tool_choice="required", logit_bias=end).json()["choices"][0]["message"]
    assert len(message["tool_calls"]) > 1
    check_calls(message["tool_calls"][:-1])  # the limit may cut the last one
    for body in ({"tool_choice": "required", "parallel_tool_calls": False}, {"tool_choice": NAMED}):
        answer = chat(hermes, tools=TOOLS, logit_bias=end, **body).json()["choices"][0]
        assert (len(answer["message"]["tool_calls"]), answer["finish_reason"]) == (1, "tool_calls")


def test_a_call_that_is_cut_says_length(hermes: Server) -> None:
    """What there was of the arguments is given, as in a stream, and the reason warns of it."""
    body = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 60}
    answer = chat(hermes, **body).json()["choices"][0]
    assert answer["finish_reason"] == "length"
    (call,) = answer["message"]["tool_calls"]
    with pytest.raises(ValueError):
        json.loads(call["function"]["arguments"])
    message, reason = gathered(chat(hermes, **body, stream=True))
    assert (message["tool_calls"][0]["function"], reason) == (call["function"], "length")


def test_logprobs_of_calls_cover_every_token(hermes: Server) -> None:
    """Held back or not, each token is reported once, in a stream as in a whole answer."""
    body = {"tools": [WEATHER], "tool_choice": "required", "logprobs": True}
    whole = chat(hermes, **body).json()
    entries = whole["choices"][0]["logprobs"]["content"]
    assert len(entries) == whole["usage"]["completion_tokens"]
    seen = []
    for line in chat(hermes, **body, stream=True).text.splitlines():
        if line.startswith("data: {"):
            part = json.loads(line[6:])["choices"][0]["logprobs"]
            seen += part["content"] if part else []
    assert [one["token"] for one in seen] == [one["token"] for one in entries]


def test_free_answers_with_strict_functions_are_served(hermes: Server, llama: Server) -> None:
    """The grammar lets any text pass; what it makes of calls is tested where grammars are."""
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    for server in (hermes, llama):
        for extra in ({}, {"parallel_tool_calls": False}):
            response = chat(server, tools=[strict], max_tokens=60, **extra)
            assert response.status_code == 200, response.text
            assert response.json()["choices"][0]["finish_reason"] in ("stop", "length")


@pytest.fixture(scope="module")
def scripted() -> Iterator[tuple[Server, dict[str, str]]]:
    """A server whose answers are written by the test: the scripted engine says what `script["text"]` holds."""
    script = {"text": ""}

    class Speaker(ScriptedEngine):
        @staticmethod
        def _answer(request: Any) -> Iterator[int]:
            return iter([*script["text"].encode("latin-1"), *[0] * 999])

    engine = Speaker(tokenizer=toy.byte_tokenizer(chat_template=HERMES_TEMPLATE), max_model_len=4096)
    with serve(engine) as server:
        yield server, script


def test_free_answers_are_read_for_calls(scripted: tuple[Server, dict[str, str]]) -> None:
    """Text before, several calls, whole and streamed; nothing of the tags is shown."""
    server, script = scripted
    calls = [
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>',
        '<tool_call>\n{"name": "time.now", "arguments": {}}\n</tool_call>',
    ]
    script["text"] = "Let me look.\n" + "\n".join(calls)
    server.engine.end_token_after = len(script["text"])
    body = {"tools": TOOLS, "max_tokens": None}
    answer = chat(server, **body).json()["choices"][0]
    assert (answer["finish_reason"], answer["message"]["content"]) == ("tool_calls", "Let me look.\n")
    assert [one["function"]["name"] for one in answer["message"]["tool_calls"]] == ["get_weather", "time.now"]
    check_calls(answer["message"]["tool_calls"])
    message, reason = gathered(chat(server, **body, stream=True))
    assert (message["content"], reason) == ("Let me look.\n", "tool_calls")
    assert [one["function"] for one in message["tool_calls"]] == [
        one["function"] for one in answer["message"]["tool_calls"]
    ]
    unread = chat(server, **body, tool_choice="none").json()["choices"][0]
    assert unread["message"]["content"] == script["text"], "who forbids calls gets text"
    assert unread["finish_reason"] == "stop"


def test_openai_client_reads_streamed_calls(hermes: Server) -> None:
    """The usual loop: stream, gather, answer the call, ask again."""
    with openai.OpenAI(base_url=f"{hermes.url}/v1", api_key="none", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "hi"}]
        tools: Any = TOOLS
        with client.chat.completions.stream(
            model="toy", messages=messages, tools=tools, tool_choice="required", seed=3, max_tokens=400,
            parallel_tool_calls=False,
        ) as stream:  # fmt: skip
            final = stream.get_final_completion()
        assert final.choices[0].finish_reason == "tool_calls"
        said = final.choices[0].message
        assert said.tool_calls
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": call.function.arguments}}
            for call in said.tool_calls
        ]
        messages.append({"role": "assistant", "content": said.content, "tool_calls": calls})
        messages.append({"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "sunny"})
        again = client.chat.completions.create(model="toy", messages=messages, tools=tools, max_tokens=3, seed=1)
        assert again.usage is not None and again.usage.completion_tokens >= 1


def test_the_model_is_shown_tools_calls_and_results(hermes: Server) -> None:
    """What the template gets: definitions, arguments as objects, results; and nothing of them with tool_choice none."""
    messages = [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    prompts = {}
    for name, tools in (("with", TOOLS), ("without", [])):
        tokens = hermes.client.post("/tokenize", json={"messages": messages, "tools": tools}).json()["tokens"]
        prompts[name] = hermes.client.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert '"description": "The weather of a city."' in prompts["with"]
    assert '{"name": "get_weather", "arguments": {"city": "K' in prompts["with"]
    assert "<|im_start|>tool\nrain" in prompts["with"]
    assert "The weather of a city" not in prompts["without"]
    sizes = [
        chat(hermes, messages=messages, tools=TOOLS, tool_choice=choice, max_tokens=1).json()["usage"]["prompt_tokens"]
        for choice in ("auto", "none")
    ]
    counted = [
        hermes.client.post("/tokenize", json={"messages": messages, "tools": tools}).json()["count"] for tools in (TOOLS, [])
    ]
    assert sizes == counted


def test_a_template_without_tools_refuses_them(llama: Server) -> None:
    """The model would not learn of them: for every choice but none, and for calls in the conversation."""
    with serve_toy(toy.CHAT_TEMPLATE) as server:
        for choice in (None, "auto", "required", NAMED):
            error = chat(server, tools=TOOLS, tool_choice=choice).json()["error"]
            assert error["param"] == "tools" and "chat template does not show tools" in error["message"]
        assert chat(server, tools=TOOLS, tool_choice="none", max_tokens=2).status_code == 200
        results = [{"role": "user", "content": "a"}, {"role": "tool", "tool_call_id": "x", "content": "b"}]
        assert chat(server, messages=results).json()["error"]["param"] == "messages"
    with serve_toy(UNKNOWN_TEMPLATE) as server:
        error = chat(server, tools=TOOLS, tool_choice="required").json()["error"]
        assert error["param"] == "tools" and "not known here" in error["message"]


CALL = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": NAMED}, "tool_choice"),
    ({"tools": [TIME], "tool_choice": NAMED}, "tool_choice.function.name"),
    ({"tools": [TIME, TIME]}, "tools"),
    ({"tools": [{"type": "code_interpreter"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format"),
    ({"tools": TOOLS, "guided_regex": "a"}, "guided_regex"),
    (
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}],
            "tool_choice": "required",
        },
        "tools[0].function.parameters",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}], "tool_choice": "required"},
        "tools",
    ),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "user", "content": "a", "tool_call_id": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "{"}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
]


@pytest.mark.parametrize(("body", "param"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_what_cannot_be_is_refused_by_name(hermes: Server, body: dict[str, Any], param: str) -> None:
    """A 400 that names the field."""
    response = chat(hermes, **body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param, response.text


def test_schemas_that_are_not_enforced_are_not_looked_at(hermes: Server) -> None:
    """With tool_choice auto and no strict function the answer is free, so any schema may be shown to the model."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {}}}}
    assert chat(hermes, tools=[tool], max_tokens=2).status_code == 200


def test_json_inside_of_json_cannot_break_the_server(hermes: Server) -> None:
    """Escapes that only the inner reader resolves, and nesting that only the template's writer meets."""
    half = {**CALL, "function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}
    deep = {**CALL, "function": {"name": "f", "arguments": '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"}}
    for call in (half, deep):
        response = chat(hermes, messages=[{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}])
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"].startswith("messages")
    tool = {"type": "function", "function": {"name": "f", "parameters": {"description": "\ud800"}}}
    body = json.dumps({"messages": [{"role": "user", "content": "a"}], "tools": [tool]})
    response = hermes.client.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400, response.text


@pytest.mark.parametrize("choice", ["other", 5, {}, {"type": "function"}, {"type": "function", "function": {"name": 5}}])
def test_a_choice_of_no_known_shape_is_refused_once(hermes: Server, choice: Any) -> None:
    """One complaint that names the field, whatever shapes it may have."""
    error = chat(hermes, tools=TOOLS, tool_choice=choice).json()["error"]
    assert error["param"] == "tool_choice" and "required" in error["message"]
