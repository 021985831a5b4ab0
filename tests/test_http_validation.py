"""What is refused, with which status, and which parameter the answer names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from app.serving import LoadedEngine
from engine.request import Request, RequestError
from models.toy import byte_tokenizer
from tests.http_engine import MAX_MODEL_LEN, ScriptedEngine, Server, alphabet, serve


@pytest.fixture(scope="module", name="running")
def _running() -> Iterator[Server]:
    with serve() as server:
        yield server


@pytest.fixture
def server(running: Server) -> Server:
    running.engine.reset()
    return running


def refused(response: httpx.Response, param: str | None, *, status: int = 400, code: str | None = None) -> str:
    """Check that an answer is an error of the API's shape; returns the message."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == {429: "rate_limit_error", 503: "server_error"}.get(status, "invalid_request_error")
    assert error["param"] == param, error
    assert error["code"] is None or isinstance(error["code"], str)
    if code is not None:
        assert error["code"] == code
    assert error["message"]
    return str(error["message"])


def alive(server: Server) -> None:
    """The server still answers."""
    assert server.client.get("/health").status_code == 200
    assert server.complete(max_tokens=3).json()["choices"][0]["text"] == alphabet(3)


@pytest.mark.parametrize("prompt", ["", [""], [], ["a", ""], [[]], [[104], []]])
def test_empty_prompts_are_refused_and_the_server_lives_on(server: Server, prompt: object) -> None:
    """An empty prompt has killed engines: there is no token to start from."""
    refused(server.complete(prompt=prompt), "prompt")
    assert server.engine.submitted == []
    alive(server)


def test_empty_prompt_is_served_where_the_tokenizer_adds_a_start_token() -> None:
    """There it has a meaning: text from nothing."""

    class WithStartToken:
        chat_template = None

        def encode(self, text: str, /, *, add_special_tokens: bool = True) -> list[int]:
            return [256] * add_special_tokens + list(text.encode())

    engine = ScriptedEngine()
    with serve(engine, load=lambda: LoadedEngine(engine, WithStartToken())) as server:  # type: ignore[arg-type]
        assert server.complete(prompt="").status_code == 200
        assert engine.submitted[0].prompt == (256,)
        refused(server.complete(prompt=[[]]), "prompt")


@pytest.mark.parametrize("prompt", [[1, 2, 999999999], [-1], [[1], [-1]], [10**400], [byte_tokenizer().vocab_size + 3]])
def test_token_ids_outside_the_vocabulary_are_refused(server: Server, prompt: object) -> None:
    """Such an id reads outside the embedding, and has written into a neighbour's row elsewhere."""
    assert "vocabulary" in refused(server.complete(prompt=prompt), "prompt")
    alive(server)


@pytest.mark.parametrize("prompt", [None, 5, True, [1.5], [True], ["a", 1], [1, "a"], [[1, "a"]], [None], {"a": 1}])
def test_prompts_of_no_known_form_are_refused(server: Server, prompt: object) -> None:
    """A guess at what was meant would answer another question."""
    refused(server.complete(prompt=prompt), "prompt")


def test_missing_prompt_and_messages_are_named(server: Server) -> None:
    """The commonest mistake deserves the clearest answer."""
    refused(server.client.post("/v1/completions", json={}), "prompt", code="missing_required_parameter")
    refused(server.client.post("/v1/chat/completions", json={}), "messages", code="missing_required_parameter")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", "NaN"),
        ("temperature", "0.5"),
        ("temperature", 1e9),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.0001),
        ("top_p", -0.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", "5"),
        ("max_tokens", True),
        ("max_completion_tokens", 0),
        ("seed", 2**63),
        ("seed", 1.5),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", "0.1"),
        ("presence_penalty", 2.1),
        ("presence_penalty", True),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", "1"),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("logit_bias", []),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"1.0": 1}),
        ("logit_bias", {"007": 1}),
        ("logit_bias", {"\u0661": 1}),
        ("logit_bias", {"9" * 4000: 1}),
        ("logit_bias", {"10000000": 5}),
        ("logit_bias", {"5": 100.5}),
        ("logit_bias", {"5": -101}),
        ("logit_bias", {"5": True}),
        ("logit_bias", {"5": "1"}),
        ("logit_bias", {"5": None}),
        ("logit_bias", {"5": 10**400}),
        ("stop", ["x"] * 17),
        ("n", 0),
        ("n", True),
        ("n", 1.5),
        ("n", 10**400),
        ("best_of", 0),
        ("logprobs", -1),
        ("logprobs", 21),
        ("logprobs", "5"),
        ("echo", 1),
        ("stop_token_ids", 5),
        ("stop_token_ids", [10000000]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", ["5"]),
        ("stop_token_ids", [1] * 1025),
        ("ignore_eos", 1),
        ("min_tokens", -1),
        ("min_tokens", True),
        ("min_tokens", 10**400),
        ("stop", 5),
        ("stream", "yes"),
        ("stream", 1),
        ("user", 5),
        ("model", 5),
        ("speculative", "on"),
    ],
)
def test_impossible_values_are_refused_by_name(server: Server, name: str, value: object) -> None:
    """Neither a crash, nor a silent clamp to something the caller did not ask for."""
    # Inside a list, the item at fault is named.
    param = f"{name}[1]" if value == ["a", ""] else f"{name}[0]" if value in ("", [-1], ["5"], [True]) else name
    refused(server.complete(**{name: value}), param)
    assert server.engine.submitted == []


@pytest.mark.parametrize("top_k", [-1, 0, 1, 10**9])
def test_possible_values_of_top_k_are_served(server: Server, top_k: int) -> None:
    """-1 and 0 both mean off to clients of other servers."""
    assert server.complete(top_k=top_k).status_code == 200


@pytest.mark.parametrize(
    ("name", "value", "taken"),
    [
        ("min_p", 0.5, 0.5),
        ("min_p", 1, 1.0),
        ("min_p", None, 0.0),
        ("presence_penalty", 0.5, 0.5),
        ("presence_penalty", -2, -2.0),
        ("frequency_penalty", -1, -1.0),
        ("frequency_penalty", None, 0.0),
        ("repetition_penalty", 1.2, 1.2),
        ("repetition_penalty", None, 1.0),
        ("logit_bias", {"5": 100, "0": -100.0, "258": 0.5}, {5: 100.0, 0: -100.0, 258: 0.5}),
        ("logit_bias", {"5": 0}, {}),
        ("logit_bias", None, {}),
    ],
)
def test_what_shapes_the_distribution_reaches_the_engine(server: Server, name: str, value: object, taken: object) -> None:
    """Accepted and then ignored, a parameter would be worse than refused."""
    assert server.complete(**{name: value}).status_code == 200
    assert server.chat(**{name: value}).status_code == 200
    assert [getattr(request.sampling, name) for request in server.engine.submitted] == [taken, taken]


def test_a_bias_that_is_not_finite_is_refused(server: Server) -> None:
    """Python reads these although they are no JSON; one would spoil the row."""
    for literal in ("NaN", "Infinity", "-Infinity", "1e999"):
        refused(post_text(server, '{"prompt": "hi", "logit_bias": {"5": ' + literal + "}}"), "logit_bias")
    alive(server)


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("name", ["temperature", "top_p", "seed", "min_p", "presence_penalty", "repetition_penalty"])
def test_numbers_that_are_not_finite_are_refused(server: Server, name: str, literal: str) -> None:
    """Python reads these although they are no JSON; one of them in a softmax spoils a whole batch."""
    body = f'{{"prompt": "hi", "{name}": {literal}}}'
    refused(post_text(server, body), name)
    alive(server)


def post_text(server: Server, body: str | bytes, kind: str = "application/json") -> httpx.Response:
    """Post a body as it is."""
    return server.client.post("/v1/completions", content=body, headers={"Content-Type": kind})


@pytest.mark.parametrize(
    "body",
    [
        "{",
        "",
        "null",
        "[]",
        "5",
        '"hi"',
        b'{"prompt": "\xff"}',
        "[" * 100_000,
        '{"prompt": [' + "9" * 5000 + "]}",
        '{"prompt": "hi"} extra',
    ],
)
def test_bodies_that_are_no_json_object_are_refused(server: Server, body: str | bytes) -> None:
    """Deep nesting and huge numbers overflow parsers; none of this may be a 500."""
    refused(post_text(server, body), None)
    alive(server)


def test_a_body_of_another_content_type_is_refused_with_the_remedy(server: Server) -> None:
    """curl sends a form's content type unless told otherwise; the answer must say what to change."""
    message = refused(post_text(server, '{"prompt": "hi"}', "application/x-www-form-urlencoded"), None)
    assert "Content-Type: application/json" in message


def test_text_with_half_a_surrogate_pair_is_refused(server: Server) -> None:
    """JSON can spell it, tokenizers raise on it."""
    refused(post_text(server, r'{"prompt": "\ud800"}'), "prompt")
    refused(post_text(server, r'{"prompt": ["a", "\ud800"]}'), "prompt")
    refused(post_text(server, r'{"prompt": "a", "stop": "\udc00"}'), "stop[0]")
    refused(post_text(server, r'{"prompt": "a", "\ud800": 1}'), "?")
    content = {"messages": [{"role": "user", "content": "X"}]}
    body = json.dumps(content).replace("X", r"\ud800")
    response = server.client.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    refused(response, "messages[0].content[0].text")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("suffix", "x"),
        ("functions", [{"name": "f"}]),
        ("modalities", ["audio"]),
    ],
)
def test_unsupported_parameters_are_refused_by_name(server: Server, name: str, value: object) -> None:
    """An answer that silently ignores a constraint looks like one that satisfies it."""
    message = refused(server.complete(**{name: value}), name, code="unsupported_parameter")
    assert "not supported" in message
    refused(server.chat(**{name: value}), name, code="unsupported_parameter")


def test_what_only_the_other_endpoint_has_is_refused_by_name(server: Server) -> None:
    """Both call it log-probabilities, but one asks with a number and the other with two fields."""
    refused(server.complete(top_logprobs=3), "top_logprobs", code="unsupported_parameter")
    refused(server.chat(echo=True), "echo", code="unsupported_parameter")
    refused(server.complete(tools=[{"type": "function"}]), "tools", code="unsupported_parameter")
    refused(server.complete(tool_choice="required"), "tool_choice", code="unsupported_parameter")
    assert server.complete(top_logprobs=0).status_code == 200
    assert server.chat(echo=False).status_code == 200
    refused(server.complete(logprobs=True), "logprobs")
    refused(server.chat(logprobs=3), "logprobs")
    assert server.engine.submitted[-1].num_logprobs is None


@pytest.mark.parametrize("name", ["max_token", "Temperature", "prompts", "", "x" * 5000])
def test_unknown_parameters_are_refused_by_name(server: Server, name: str) -> None:
    """A misspelled parameter that does nothing is found only in the bill."""
    response = server.complete(**{name: 1})
    refused(response, name if len(name) <= 200 else name[:200] + "…", code="unknown_parameter")
    assert len(response.content) < 1000, "the caller's text is repeated at full length"


def test_unknown_parameters_inside_objects_are_refused_with_their_path(server: Server) -> None:
    """The switch of speculation is an extension that nobody spells right the first time."""
    refused(server.complete(speculative={"enable": False}), "speculative.enable")
    refused(server.complete(stream=True, stream_options={"usage": True}), "stream_options.usage")
    refused(server.chat(messages=[{"role": "user", "content": "x", "nam": 1}]), "messages[0].nam")


def test_contradictions_are_refused(server: Server) -> None:
    """Two values that cannot both be honored are a mistake the caller wants to know about."""
    refused(server.complete(max_tokens=5, max_completion_tokens=6), "max_tokens")
    refused(server.complete(n=2, best_of=1), "best_of")
    refused(server.chat(top_logprobs=2), "top_logprobs")
    refused(server.chat(top_logprobs=2, logprobs=False), "top_logprobs")
    refused(server.complete(stream_options={"include_usage": True}), "stream_options")
    refused(server.complete(stream=False, stream_options={"include_usage": True}), "stream_options")
    alone = {"continuous_usage_stats": True}
    refused(server.complete(stream=True, stream_options=alone), "stream_options.continuous_usage_stats")
    refused(server.chat(stream=True, stream_options={"include_usage": False, **alone}), "stream_options.continuous_usage_stats")
    refused(server.complete(speculative={"enabled": False, "schedule": "graft"}), "speculative.schedule")
    refused(server.complete(speculative={"enabled": True, "schedule": "ar"}), "speculative.schedule")
    refused(server.complete(speculative={"enabled": False, "budget": 5}), "speculative.budget")


def test_an_unknown_schedule_is_refused_with_the_known_ones(server: Server) -> None:
    """A fallback would make a comparison of schedules compare nothing."""
    message = refused(server.complete(speculative={"schedule": "magic"}), "speculative.schedule")
    assert "ar, chain, graft" in message
    refused(server.complete(speculative={"budget": 0}), "speculative.budget")


def test_what_the_engine_refuses_is_named_as_in_the_body(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine knows a budget, the body a budget inside an object."""

    def submit(request: Request) -> None:
        raise RequestError("the budget is beyond the rows there are", param="budget")

    monkeypatch.setattr(server.engine, "submit", submit)
    refused(server.complete(speculative={"budget": 10**6}), "speculative.budget")


@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_model_is_a_404(server: Server, stream: bool) -> None:
    """Clients of several servers find out by this which one has their model."""
    refused(server.complete(model="gpt-4o", stream=stream), "model", status=404, code="model_not_found")
    refused(server.chat(model="", stream=stream), "model", status=404, code="model_not_found")
    assert server.complete(model=server.engine.model_id).status_code == 200


@pytest.mark.parametrize(
    ("length", "fits"),
    [
        (MAX_MODEL_LEN - 1, True),
        (MAX_MODEL_LEN, False),
        (MAX_MODEL_LEN + 1, False),
        (10 * MAX_MODEL_LEN, False),
        (100_000, False),
    ],
)
def test_a_prompt_must_leave_room_for_one_token(server: Server, length: int, fits: bool) -> None:
    """Servers have died here, or answered with a limit that was not theirs."""
    response = server.complete(prompt="x" * length)
    if fits:
        assert response.json()["usage"]["completion_tokens"] == 1
        assert response.json()["choices"][0]["finish_reason"] == "length"
    else:
        message = refused(response, "prompt", code="context_length_exceeded")
        assert str(MAX_MODEL_LEN) in message
        assert str(length) in message


def test_prompt_and_explicit_limit_must_fit_together(server: Server) -> None:
    """A promise of tokens that cannot be kept is refused; the numbers in the message are the true ones."""
    assert server.complete(prompt="x" * 60, max_tokens=4).json()["usage"]["total_tokens"] == 64
    message = refused(server.complete(prompt="x" * 60, max_tokens=5), "max_tokens", code="context_length_exceeded")
    assert all(number in message for number in ("64", "60", "5", "65"))
    refused(server.complete(prompt="x", max_tokens=10**12), "max_tokens", code="context_length_exceeded")
    response = server.chat(max_completion_tokens=60)
    refused(response, "max_completion_tokens", code="context_length_exceeded")


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_limits_with_as_many_digits_as_a_body_may_have_are_refused(server: Server, name: str) -> None:
    """The sum in the message had one digit more than Python turns into text, and the answer was a 500."""
    refused(server.complete(prompt="x", **{name: 10**4300 - 1}), name)
    refused(server.complete(prompt="x", speculative={"budget": 10**4300 - 1}), "speculative.budget")
    alive(server)


def test_an_empty_schedule_is_no_schedule(server: Server) -> None:
    """Taken for absent, it would answer with the default schedule and let nobody know."""
    refused(server.complete(prompt="x", speculative={"schedule": ""}), "speculative.schedule")
    refused(server.complete(prompt="x", speculative={"schedule": "", "enabled": False}), "speculative.schedule")


@pytest.mark.parametrize(
    "bad",
    [
        {"top_p": -1},
        {"max_tokens": 0},
        {"prompt": ""},
        {"prompt": "x" * 100},
        {"speculative": {"schedule": "magic"}},
        {"best_of": 2},
        {"logprobs": 21},
    ],
)
def test_bad_streamed_requests_get_a_status_not_a_stream(server: Server, bad: dict[str, object]) -> None:
    """A 200 whose events carry a validation error looks like success to every monitor."""
    response = server.complete(stream=True, **bad)
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"


def test_large_bodies_are_refused_before_and_while_they_are_read(server: Server) -> None:
    """Without a bound one call takes all memory; a length that is not announced must not evade it."""
    big = b'{"prompt": "' + b"x" * (8 * 2**20) + b'"}'
    kind = {"Content-Type": "application/json"}
    # The server may close while the client still writes; both an answer and a reset prove the bound.
    for content in (big, iter([big[: 2**20]] * 9)):
        with httpx.Client(base_url=server.url) as client:
            try:
                response = client.post("/v1/completions", content=content, headers=kind)
            except httpx.TransportError:
                continue
            refused(response, None, status=413)
    alive(server)


def test_a_body_of_a_million_wrong_items_gets_one_complaint(server: Server) -> None:
    """A report on each of them would need a hundred times the body's memory."""
    many: list[Any] = [1] * 1_000_000
    for response in (
        server.chat(messages=many),
        server.complete(stop=many),
        server.complete(prompt=["a", *many]),
        server.complete(logit_bias={f"x{i}": 1 for i in range(100_000)}),
        server.complete(logit_bias={str(i): "x" for i in range(100_000)}),
        server.complete(logit_bias={str(i): 1 for i in range(100_000)}),
        server.complete(**{f"x{i}": 1 for i in range(100_000)}),
        server.chat(messages=[{"role": "user", "content": many}]),
    ):
        assert response.status_code == 400
        assert len(response.content) < 500


def test_paths_and_methods_that_do_not_exist_get_the_same_error_body(server: Server) -> None:
    """Client libraries read the message from one place only."""
    refused(server.client.get("/v1/nothing"), None, status=404)
    refused(server.client.get("/v1/completions"), None, status=405)
    assert server.client.get("/v1/completions").headers["allow"] == "POST"
    refused(server.client.delete("/v1/models"), None, status=405)


def test_more_prompts_than_the_queue_holds_are_refused(server: Server) -> None:
    """Such a call could never be accepted, however often it is tried again, so it is no 429."""
    assert server.complete(prompt=["a"] * 6, max_tokens=1).status_code == 200
    refused(server.complete(prompt=["a"] * 7), "prompt")
    assert server.complete(prompt=["a"] * 2, n=3, max_tokens=1).status_code == 200
    refused(server.complete(prompt=["a"] * 2, n=4), "n")
    refused(server.complete(n=2**63 - 1), "n")


def test_a_full_queue_is_a_429_that_says_when_to_come_back(server: Server) -> None:
    """Without the header clients hammer on."""
    server.engine.refuse_after = 0
    response = server.complete()
    refused(response, None, status=429, code="rate_limit_exceeded")
    assert response.headers["retry-after"] == "3"
    assert server.complete(stream=True).status_code == 429


def test_a_list_that_half_fits_into_the_queue_leaves_nothing_behind(server: Server) -> None:
    """Prompts accepted before the refusal would be decoded for nobody."""
    server.engine.paused = True
    server.engine.refuse_after = 2
    refused(server.complete(prompt=["a", "b", "c"]), None, status=429)
    assert sorted(server.engine.aborted) == sorted(request.id for request in server.engine.submitted)
    assert len(server.engine.aborted) == 2
