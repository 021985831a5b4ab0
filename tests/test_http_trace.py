"""Traces over HTTP: the trees an answer came from, told the same way streamed and whole, and only to who asks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from transformers import PreTrainedModel

from app import answer_trace
from app.answer_trace import ByteBound, ChoiceTrace
from app.serving import LoadedEngine
from app.token_authors import TokenAuthors
from app.token_text import TokenTexts
from engine.request import Delta
from models.toy import byte_tokenizer
from tests.engine_world import World
from tests.http_engine import Server, serve
from tests.test_http_stream import events

TinyModel = Callable[..., PreTrainedModel]
VOCAB = 259
ASK = {"prompt": "abab", "max_tokens": 24, "speculative": {"schedule": "treegraft", "trace": True}}


@pytest.fixture(scope="module", name="server")
def _server(tiny_model: TinyModel) -> Iterator[Server]:
    """The target itself is the medium, a stranger the small: trees with two creators, rescored edges, long paths."""
    world = World(tiny_model("llama", VOCAB, 3), small=tiny_model("llama", VOCAB, 4), medium=tiny_model("llama", VOCAB, 3))
    with serve(load=lambda: LoadedEngine(world.engine, world.tokenizer)) as server:
        yield server
    world.check_books()


@pytest.fixture(scope="module", name="traced")
def _traced(server: Server) -> dict[str, Any]:
    """One whole traced answer, with log-probabilities."""
    response = server.complete(**ASK, logprobs=0)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def test_tokens_joined_are_the_text_and_name_their_creators(traced: dict[str, Any]) -> None:
    """A page that colors by creator shows exactly the answer, each piece under the token that completed it."""
    tokens = traced["graft"]["tokens"]
    assert "".join(token["text"] for token in tokens) == traced["text"]
    assert {token["creator"] for token in tokens} <= {"small", "medium", "target"}
    assert "medium" in {token["creator"] for token in tokens}, "the target's own twin drafted nothing that was accepted"
    places = [token["index"] for token in tokens]
    assert places == sorted(places) and places[-1] < 24


def test_steps_tell_how_every_token_came_to_be(traced: dict[str, Any]) -> None:
    """The accepted nodes and the bonus of each step, joined over the steps, are the answer's tokens."""
    graft, expected = traced["graft"], 0
    texts = [token["text"] for token in graft["tokens"]]
    assert not graft["truncated"]
    written: list[int] = []
    for number, step in enumerate(graft["steps"]):
        assert (step["step"], step["first_token"]) == (number, expected)
        accepted = [node for node in step["nodes"][1:] if node["accepted"]]
        block = [node["token_id"] for node in accepted] + [step["bonus"]["token_id"]]
        assert 1 <= step["num_tokens"] <= len(block)
        written += block[: step["num_tokens"]]
        expected += step["num_tokens"]
        assert step["draft_ms"] >= 0 < step["verify_ms"]
    assert expected == len(written) == 24
    assert bytes(written).decode("utf-8", "replace") == "".join(texts)


def test_nodes_form_a_tree_whose_scores_add_up(traced: dict[str, Any]) -> None:
    """Whoever draws the tree relies on parents that come first, and on a path's score being the sum along it."""
    kinds = set()
    for step in traced["graft"]["steps"]:
        nodes = step["nodes"]
        assert nodes[0]["parent"] == -1 and nodes[0]["creator"] == "target" and nodes[0]["logprobs"] == {}
        for place, node in enumerate(nodes[1:], start=1):
            parent = nodes[node["parent"]]
            assert 0 <= node["parent"] < place
            assert node["depth"] == parent["depth"] + 1
            own = node["logprobs"][node["scorer"]]
            assert math.isclose(node["path_logprob"], parent["path_logprob"] + own, abs_tol=1e-3)
            assert node["rescored"] == (node["scorer"] != node["creator"])
            assert (node["target_logprob"] is not None) == node["verified"]
            assert node["verified"] or not node["accepted"]
            assert parent["verified"] or not node["verified"]
            kinds |= {("rescored", node["rescored"]), ("verified", node["verified"]), ("accepted", node["accepted"])}
    assert {("rescored", True), ("verified", False), ("accepted", True), ("accepted", False)} <= kinds


def test_target_logprobs_of_a_trace_are_those_that_logprobs_report(traced: dict[str, Any]) -> None:
    """Two numbers for one thing that differ would both be doubted."""
    told = []
    for step in traced["graft"]["steps"]:
        block = [node["target_logprob"] for node in step["nodes"][1:] if node["accepted"]]
        told += [*block, step["bonus"]["target_logprob"]][: step["num_tokens"]]
    assert told == pytest.approx(traced["logprobs"]["token_logprobs"], abs=1e-3)


@pytest.mark.parametrize("path", ["complete", "chat"])
@pytest.mark.parametrize("options", [{}, {"stop": ["q"]}, {"temperature": 1, "seed": 5}])
def test_chunks_joined_are_the_whole_answer(server: Server, path: str, options: dict[str, Any]) -> None:
    """What a page collects live must be what the whole answer says; only the times are measured anew."""
    ask, body = getattr(server, path), {**ASK, **options}
    if path == "chat":
        del body["prompt"]
    whole = ask(**body).json()["choices"][0]["graft"]
    joined: dict[str, Any] = {"tokens": [], "steps": [], "truncated": False}
    for chunk in events(ask(**body, stream=True)):
        for choice in chunk["choices"]:
            if "graft" in choice:
                text = choice.get("text", choice.get("delta", {}).get("content", ""))
                assert "".join(token["text"] for token in choice["graft"]["tokens"]) == text
                joined["tokens"] += choice["graft"]["tokens"]
                joined["steps"] += choice["graft"]["steps"]
                joined["truncated"] = choice["graft"]["truncated"]
    assert _alike(_timeless(joined), _timeless(whole))


def test_trees_come_while_the_answer_is_written(server: Server) -> None:
    """A live picture needs the step with its text, not a heap of steps at the end."""
    chunks = [chunk["choices"][0] for chunk in events(server.complete(**ASK, stream=True))]
    with_text = [chunk for chunk in chunks if chunk["text"]]
    assert len(with_text) > 3
    assert all(len(chunk["graft"]["steps"]) >= 1 for chunk in with_text)


def test_nobody_gets_a_trace_unasked(server: Server) -> None:
    """Untraced answers keep their shape and cost nothing; `false` is the same as silence."""
    for speculative in ({"schedule": "treegraft"}, {"schedule": "treegraft", "trace": False}, None):
        body = {**ASK, "speculative": speculative}
        assert "graft" not in server.complete(**body).json()["choices"][0]
        chunks = events(server.complete(**body, stream=True))
        assert all("graft" not in choice for chunk in chunks for choice in chunk["choices"])


def test_a_trace_changes_no_text(server: Server) -> None:
    """Looking must not disturb."""
    plain = server.complete(**{**ASK, "speculative": {"schedule": "treegraft"}}, temperature=1, seed=3).json()
    looked = server.complete(**ASK, temperature=1, seed=3).json()
    assert plain["choices"][0]["text"] == looked["choices"][0]["text"]
    assert plain["metrics"]["speculative_decoding"] == looked["metrics"]["speculative_decoding"]


def test_every_choice_has_its_own_trace(server: Server) -> None:
    """Several answers share a budget of bytes, not their trees."""
    choices = server.complete(**{**ASK, "prompt": ["ab", "cd"]}).json()["choices"]
    for choice in choices:
        assert "".join(token["text"] for token in choice["graft"]["tokens"]) == choice["text"]
        assert choice["graft"]["steps"][0]["step"] == 0


def test_plain_decoding_has_steps_of_a_root_alone(server: Server) -> None:
    """Also the baseline of a comparison can be looked at."""
    graft = server.complete(**{**ASK, "speculative": {"enabled": False, "trace": True}}).json()["choices"][0]["graft"]
    assert {token["creator"] for token in graft["tokens"]} == {"target"}
    assert [len(step["nodes"]) for step in graft["steps"]] == [1] * 24


def test_a_trace_is_cut_after_a_number_of_steps_and_says_so(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer of thousands of tokens must not drag megabytes along; the tokens' creators go on."""
    monkeypatch.setattr("app.submission.MAX_STEPS", 2)
    choice = server.complete(**ASK).json()["choices"][0]
    assert len(choice["graft"]["steps"]) == 2
    assert choice["graft"]["truncated"]
    assert "".join(token["text"] for token in choice["graft"]["tokens"]) == choice["text"]


def test_a_trace_is_cut_after_a_number_of_bytes_and_says_so(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide trees reach the bound of bytes first; what is sent stays below it."""
    monkeypatch.setattr(answer_trace, "ByteBound", lambda: ByteBound(6000))
    choice = server.complete(**ASK).json()["choices"][0]
    steps = choice["graft"]["steps"]
    assert 1 <= len(steps) and len(json.dumps(steps, separators=(",", ":"))) <= 6000 + len(steps) + 1
    assert choice["graft"]["truncated"]


def test_a_bound_that_was_passed_admits_nothing_smaller() -> None:
    """Steps with a hole between them would be read as consecutive."""
    bound = ByteBound(40)
    assert [bound.admits({"x": "y" * n}) for n in (10, 100, 1)] == [True, False, False]


def test_a_trace_counts_only_steps_that_wrote_something_as_missing() -> None:
    """A request that ends between steps has lost no step."""
    tokenizer = byte_tokenizer()
    one = ChoiceTrace(TokenAuthors(tokenizer.decode), TokenTexts(tokenizer), ByteBound())
    one.take(Delta("r"))
    assert not one.give()["truncated"]
    one.take(Delta("r", (97,), ("target",), "a"))
    assert one.give() == {"tokens": [{"index": 0, "text": "a", "creator": "target"}], "steps": [], "truncated": True}


def test_trace_must_be_a_truth_value(server: Server) -> None:
    """Bad input is refused by name."""
    response = server.complete(**{**ASK, "speculative": {"trace": 1}})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "speculative.trace"


def _alike(one: Any, other: Any) -> bool:
    """Equal, numbers up to one in the last digit shown: two runs of a question are not computed in the same groups of rows."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) < 1.5e-4
    return bool(one == other)


def _timeless(graft: dict[str, Any]) -> dict[str, Any]:
    times = {"draft_ms", "verify_ms"}
    steps = [{name: value for name, value in step.items() if name not in times} for step in graft["steps"]]
    return {**graft, "steps": steps}
