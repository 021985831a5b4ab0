"""Structured output over HTTP, with a real model behind it: what is asked for comes, or an error that names the field."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from tests.http_engine import Server
from tests.tool_world import chat, serve_toy

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
SCHEDULES = ("ar", "ngram", "small", "medium", "treegraft")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve_toy() as running:
        yield running


def complete(server: Server, **body: Any) -> httpx.Response:
    defaults = {"prompt": "hi", "temperature": 1, "seed": 1, "max_tokens": 300}
    return server.client.post("/v1/completions", json={**defaults, **body})


WISHES: dict[str, tuple[dict[str, Any], Any]] = {
    "response_format": ({"response_format": FORMAT}, "person"),
    "guided_json": ({"guided_json": SCHEMA}, "person"),
    "guided_json as text": ({"guided_json": json.dumps(SCHEMA)}, "person"),
    "structured_outputs.json": ({"structured_outputs": {"json": SCHEMA}}, "person"),
    "guided_regex": ({"guided_regex": "[a-f]{3}-[0-9]{2,4}"}, "[a-f]{3}-[0-9]{2,4}"),
    "structured_outputs.regex": ({"structured_outputs": {"regex": "x{5}y?"}}, "x{5}y?"),
    "guided_choice": ({"guided_choice": ["yes", "no", "perhaps"]}, "yes|no|perhaps"),
    "structured_outputs.choice": ({"structured_outputs": {"choice": ["ä", "b"]}}, "ä|b"),
    "guided_grammar": ({"guided_grammar": 'start: "a" ("+" "b")~2'}, r"a\+b\+b"),
    "structured_outputs.grammar": ({"structured_outputs": {"grammar": 'root ::= "a" | "bc"'}}, "a|bc"),
}


@pytest.mark.parametrize("name", WISHES)
def test_every_way_of_asking_is_honored(server: Server, name: str) -> None:
    """Both endpoints; an answer that ends by itself is what was asked for."""
    wish, wanted = WISHES[name]
    for response in (complete(server, **wish), chat(server, **wish)):
        assert response.status_code == 200, response.text
        choice = response.json()["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert choice["finish_reason"] == "stop", text
        if wanted == "person":
            jsonschema.validate(json.loads(text), SCHEMA)
        else:
            assert re.fullmatch(wanted, text), text


@pytest.mark.parametrize("temperature", [0, 1])
def test_the_schedule_does_not_change_an_answer(server: Server, temperature: float) -> None:
    """What a server is asked at once, with and without trees, several answers each, whole and streamed."""
    answers = {}
    for schedule in SCHEDULES:
        body = {"guided_json": SCHEMA, "n": 2, "temperature": temperature, "speculative": {"schedule": schedule}}
        if temperature == 0:  # then this model goes on with white space as long as it may
            body["max_tokens"] = 60
        whole = complete(server, **body).json()
        answers[schedule] = [(choice["text"], choice["finish_reason"]) for choice in whole["choices"]]
        if schedule in ("ar", "treegraft"):
            assert streamed(server, body) == answers[schedule]
    assert all(answer == answers["ar"] for answer in answers.values()), answers
    if temperature:
        for text, reason in answers["ar"]:
            assert reason == "stop"
            jsonschema.validate(json.loads(text), SCHEMA)


def streamed(server: Server, body: dict[str, Any]) -> list[tuple[str, str]]:
    texts, reasons = [""] * body["n"], [""] * body["n"]
    response = complete(server, **body, stream=True)
    for line in response.text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                texts[choice["index"]] += choice["text"]
                reasons[choice["index"]] = choice["finish_reason"] or reasons[choice["index"]]
    return list(zip(texts, reasons, strict=True))


def test_a_limit_cuts_and_says_length(server: Server) -> None:
    """Half a JSON text must not pass for a whole one; a limit that is just reached changes nothing."""
    whole = complete(server, guided_regex="[ab]{20}").json()
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens"] == 20, "no end token is spent where nothing else can follow"
    exact = complete(server, guided_regex="[ab]{20}", max_tokens=20).json()["choices"][0]
    assert (exact["text"], exact["finish_reason"]) == (whole["choices"][0]["text"], "stop")
    cut = complete(server, guided_regex="[ab]{20}", max_tokens=19).json()["choices"][0]
    assert (cut["text"], cut["finish_reason"]) == (whole["choices"][0]["text"][:19], "length")


def test_ends_bias_and_least_length_bow_to_the_grammar(server: Server) -> None:
    """What may end an answer, what is banned and what must be long: never against the grammar."""
    banned = complete(server, guided_choice=["yes", "no"], logit_bias={str(ord("y")): -100, str(ord("n")): -100})
    assert banned.json()["choices"][0]["text"] in ("yes", "no")
    longer = complete(server, guided_regex="a+", min_tokens=7, max_tokens=50).json()
    assert longer["usage"]["completion_tokens"] >= 7
    short = complete(server, guided_regex="ab", min_tokens=7, max_tokens=50).json()["choices"][0]
    assert (short["text"], short["finish_reason"]) == ("ab", "stop")
    endless = complete(server, guided_regex="a+", ignore_eos=True, max_tokens=50).json()["choices"][0]
    assert (endless["text"], endless["finish_reason"]) == ("a" * 50, "length")
    cut = complete(server, guided_regex="[ab]{30}c", stop=["b"]).json()["choices"][0]
    assert re.fullmatch("a*", cut["text"]) and cut["finish_reason"] == "stop"
    token = complete(server, guided_regex="[ab]{30}c", stop_token_ids=[ord("b")]).json()["choices"][0]
    assert re.fullmatch("a*", token["text"]) and token["finish_reason"] == "stop"


def test_logprobs_are_the_models_own(server: Server) -> None:
    """The mask shapes what is drawn, not what is reported: here the model would hardly have said it."""
    choice = complete(server, guided_choice=["zq~"], logprobs=2, temperature=0).json()["choices"][0]
    assert choice["text"] == "zq~"
    assert all(-100 < value < 0 for value in choice["logprobs"]["token_logprobs"]), "a forced token is not certain"
    assert sum(value > -0.01 for value in choice["logprobs"]["token_logprobs"]) < 3


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_object", "json_schema": FORMAT["json_schema"]}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format.json_schema.schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
        "response_format.json_schema.name",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}},
        "response_format.json_schema.schema",
    ),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": "[" * 100_000}, "guided_json"),
    ({"guided_json": "3"}, "guided_json"),
    ({"guided_json": 5}, "guided_json"),
    ({"structured_outputs": {"json": []}}, "structured_outputs.json"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"guided_regex": "a" * 300_000}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": ["a", ""]}, "guided_choice[1]"),
    ({"guided_choice": "a"}, "guided_choice"),
    ({"guided_grammar": "start: x"}, "guided_grammar"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"pattern": "x"}}, "structured_outputs.pattern"),
    ({"guided_regex": "a+", "stop_token_ids": [97]}, "stop_token_ids"),
]


@pytest.mark.parametrize(("body", "param"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_what_cannot_be_honored_is_refused_by_name(server: Server, body: dict[str, Any], param: str) -> None:
    """A 400 that says which field and why; nothing reaches the engine."""
    if param == "stop_token_ids":
        assert complete(server, **body).status_code == 200, "the token may follow, and then cuts the answer"
        return
    response = complete(server, **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert len(error["message"]) < 600


def test_what_changes_nothing_is_accepted(server: Server) -> None:
    """Clients send their defaults."""
    for body in ({"response_format": {"type": "text"}}, {"guided_json": None, "structured_outputs": None}):
        assert complete(server, **body, max_tokens=2).status_code == 200


def test_many_grammars_at_once_do_not_mix(server: Server) -> None:
    """Sequences that run together follow a grammar each; one without has none."""
    body = {"prompt": ["a", "b"], "guided_regex": "[xy]{12}", "n": 2}
    texts = [choice["text"] for choice in complete(server, **body).json()["choices"]]
    assert all(re.fullmatch("[xy]{12}", text) for text in texts)
    assert len(set(texts)) > 1


def test_openai_client_parses_an_answer(server: Server) -> None:
    """As its users do it: a pydantic class in, an object of it out."""
    import pydantic

    class Person(pydantic.BaseModel):
        age: int
        is_adult: bool

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        got = client.chat.completions.parse(
            model="toy",
            messages=[{"role": "user", "content": "hi"}],
            response_format=Person,
            seed=1,
            max_tokens=400,
        )
    person = got.choices[0].message.parsed
    assert isinstance(person, Person)


# ---- best_of ---------------------------------------------------------------------------------------------------------


def test_the_best_of_several_are_the_likeliest(server: Server) -> None:
    """Ranked by mean log-probability per token, best first; the others were drawn, and are counted."""
    all_of_them = complete(server, n=4, logprobs=0, max_tokens=6, ignore_eos=True).json()["choices"]
    means = {choice["text"]: sum(choice["logprobs"]["token_logprobs"]) / 6 for choice in all_of_them}
    ranked = sorted(means, key=lambda text: -means[text])
    best = complete(server, n=2, best_of=4, max_tokens=6, ignore_eos=True).json()
    assert [choice["text"] for choice in best["choices"]] == ranked[:2]
    assert [choice["index"] for choice in best["choices"]] == [0, 1]
    assert [choice["logprobs"] for choice in best["choices"]] == [None, None], "nobody asked for them"
    assert best["usage"]["completion_tokens"] == 24
    two = complete(server, prompt=["hi", "ho"], best_of=3, max_tokens=4, logprobs=1, echo=False).json()["choices"]
    assert [choice["index"] for choice in two] == [0, 1]
    assert all(choice["logprobs"] for choice in two)


@pytest.mark.parametrize("body", [{"n": 3, "best_of": 2}, {"best_of": 2, "stream": True}, {"best_of": 10_000}, {"best_of": 0}])
def test_a_best_of_that_cannot_be_is_refused(server: Server, body: dict[str, Any]) -> None:
    """Fewer than n; a stream, which would have to take text back; more than fit."""
    response = complete(server, **body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "best_of"
