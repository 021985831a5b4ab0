"""Whole answers of ``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.http_engine import MAX_MODEL_LEN, MODEL, NOTHING_CACHED, Server, alphabet, serve


@pytest.fixture(scope="module", name="running")
def _running() -> Iterator[Server]:
    with serve() as server:
        yield server


@pytest.fixture
def server(running: Server) -> Server:
    running.engine.reset()
    return running


def test_answer_has_the_shape_clients_parse(server: Server) -> None:
    """A missing or misplaced key would break every client library."""
    response = server.complete(max_tokens=5)
    body = response.json()
    assert response.status_code == 200
    assert response.headers["x-request-id"]
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["model"] == MODEL
    assert isinstance(body["created"], int)
    assert body["choices"] == [{"index": 0, "text": alphabet(5), "logprobs": None, "finish_reason": "length"}]
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7, **NOTHING_CACHED}


@pytest.mark.parametrize("schedule", ["ar", "chain", "graft"])
def test_billed_delivered_and_counted_tokens_agree_for_every_limit(server: Server, schedule: str) -> None:
    """Steps of several tokens are cut at the limit; a counter fed before the cut would bill tokens nobody got."""
    for limit in range(1, 21):
        before = server.sums("generation_tokens_total")
        body = server.complete(max_tokens=limit, speculative={"schedule": schedule}).json()
        assert body["choices"][0]["text"] == alphabet(limit)
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["usage"]["completion_tokens"] == limit
        assert server.sums("generation_tokens_total") - before == limit


def test_default_limit_is_sixteen_tokens_and_never_beyond_the_context(server: Server) -> None:
    """A body without a limit must not be refused because the default does not fit behind its prompt."""
    assert server.complete().json()["usage"]["completion_tokens"] == 16
    long = server.complete(prompt="x" * (MAX_MODEL_LEN - 3))
    assert long.status_code == 200
    assert long.json()["usage"]["completion_tokens"] == 3
    assert server.complete(max_tokens=None).json()["usage"]["completion_tokens"] == 16


def test_both_names_of_the_limit_work_if_they_agree(server: Server) -> None:
    """Newer clients send only the newer name, some send both."""
    assert server.complete(max_completion_tokens=7).json()["usage"]["completion_tokens"] == 7
    assert server.complete(max_tokens=7, max_completion_tokens=7).json()["usage"]["completion_tokens"] == 7


@pytest.mark.parametrize("stop", ["de", ["zzz", "de"]])
def test_stop_strings_end_the_text_and_reach_the_engine(server: Server, stop: object) -> None:
    """A stop string sent as a plain string must not be taken for a list of letters."""
    body = server.complete(stop=stop).json()
    assert body["choices"][0]["text"] == "abc"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert server.engine.submitted[0].stop == (("de",) if stop == "de" else ("zzz", "de"))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", ["hi"]),
        (["one", "two", "three"], ["one", "two", "three"]),
        ([104, 105], ["hi"]),
        ([[104, 105], [111]], ["hi", "o"]),
    ],
)
def test_each_prompt_of_each_form_becomes_one_choice_at_its_place(
    server: Server, prompt: object, expected: list[str]
) -> None:
    """A list of ids read as many prompts, or choices in order of completion, would mix up answers."""
    body = server.complete(prompt=prompt, max_tokens=4).json()
    assert [bytes(request.prompt).decode() for request in server.engine.submitted] == expected
    assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))
    assert [choice["text"] for choice in body["choices"]] == [alphabet(4)] * len(expected)
    assert body["usage"]["prompt_tokens"] == sum(map(len, expected))
    assert body["usage"]["completion_tokens"] == 4 * len(expected)


def test_same_seed_gives_the_same_answer_and_no_seed_a_new_one(server: Server) -> None:
    """A dropped seed makes experiments irreproducible; a constant default makes all answers one."""

    def text(**body: object) -> str:
        return str(server.complete(temperature=1, max_tokens=30, **body).json()["choices"][0]["text"])

    assert text(seed=7) == text(seed=7)
    assert len({text(seed=seed) for seed in range(5)}) == 5
    assert len({text() for _ in range(3)}) == 3
    texts = server.complete(prompt=["a", "b"], temperature=1, max_tokens=30).json()["choices"]
    assert texts[0]["text"] != texts[1]["text"], "prompts without a seed share one"


def test_a_seeded_list_of_prompts_answers_as_the_prompts_alone(server: Server) -> None:
    """Otherwise batching prompts into one call would change their answers."""
    alone = server.complete(prompt="a", temperature=1, seed=3, max_tokens=20).json()["choices"][0]["text"]
    together = server.complete(prompt=["b", "a"], temperature=1, seed=3, max_tokens=20).json()["choices"]
    assert together[1]["text"] == alone


@pytest.mark.parametrize("temperature", [0, 1e-12, 1e-6, 1e-5, 1e-4, 1e-3, 2])
def test_tiny_temperatures_are_served(server: Server, temperature: float) -> None:
    """Temperatures just above zero have overflowed elsewhere; the edge must pass them on unharmed."""
    response = server.complete(temperature=temperature, seed=1)
    assert response.status_code == 200
    assert server.engine.submitted[0].sampling.temperature == temperature
    if temperature < 1e-5:
        assert response.json()["choices"][0]["text"] == alphabet(16)


def test_sampling_parameters_reach_the_engine_as_sent(server: Server) -> None:
    """An accepted parameter that is not honored is a lie."""
    server.complete(temperature=0.5, top_p=0.9, top_k=5, seed=-3, user="someone")
    sampling = server.engine.submitted[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 5, -3)


def test_unset_and_null_parameters_mean_the_defaults_of_the_api(server: Server) -> None:
    """Clients send explicit nulls; the API's defaults sample at temperature 1."""
    names = "model temperature top_p top_k seed stop stream stream_options user speculative max_tokens".split()
    response = server.client.post("/v1/completions", json={"prompt": "hi", **dict.fromkeys(names)})
    assert response.status_code == 200
    sampling = server.engine.submitted[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)


def test_top_k_beyond_the_vocabulary_means_all_of_it(server: Server) -> None:
    """Such a value crashed a sampling kernel elsewhere."""
    assert server.complete(top_k=10**9).status_code == 200
    assert server.complete(top_k=10**30).status_code == 200
    assert server.engine.submitted[0].sampling.top_k == server.engine.vocab_size


@pytest.mark.parametrize(
    ("speculative", "schedule", "budget"),
    [
        ({}, "graft", None),
        ({"enabled": True}, "graft", None),
        ({"enabled": False}, "ar", None),
        ({"enabled": False, "schedule": "ar", "budget": 1}, "ar", 1),
        ({"schedule": "chain"}, "chain", None),
        ({"budget": 3}, "graft", 3),
    ],
)
def test_speculation_is_chosen_per_request_and_reported(
    server: Server, speculative: dict[str, object], schedule: str, budget: int | None
) -> None:
    """A switch accepted but not enforced, or an answer that does not say what served it, makes tests worthless."""
    body = server.complete(speculative=speculative).json()
    assert (server.engine.submitted[0].schedule, server.engine.submitted[0].budget) == (schedule, budget)
    graft = body["metrics"]["graft"]
    assert graft["schedule"] == schedule
    assert graft["budget"] == (budget or server.engine.schedules[schedule].budget)
    assert (body["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0) == (schedule != "ar")


def test_answer_metrics_satisfy_their_identities(server: Server) -> None:
    """Tools compute speed-ups from these; identities that fail make their numbers wrong without a sign."""
    metrics = server.complete(max_tokens=10).json()["metrics"]
    speculation, graft = metrics["speculative_decoding"], metrics["graft"]
    assert speculation["num_spec_steps"] == sum(speculation["acceptance_histogram"]) == 4
    assert speculation["mean_acceptance_length"] == 1 + speculation["num_accepted_draft_tokens"] / 4
    assert speculation["draft_acceptance_rate"] == (
        speculation["num_accepted_draft_tokens"] / speculation["num_draft_tokens"]
    )
    assert len(speculation["acceptance_histogram"]) == speculation["num_spec_tokens"] + 1 == 8
    assert speculation["acceptance_histogram_by_draft_length"] == {"4": [0, 1, 3, 0, 0]}
    assert speculation["per_step_accepted"] == [2, 2, 2, 1]
    assert speculation["per_step_drafted"] == [4, 4, 4, 4]
    assert sum(d["accepted"] for d in graft["drafters"].values()) == speculation["num_accepted_draft_tokens"]
    assert sum(d["drafted"] for d in graft["drafters"].values()) == speculation["num_draft_tokens"]
    small = {"drafted": 8, "accepted": 3, "accepted_per_position": [0, 3], "forwards": 8, "calls": 8}
    assert graft["drafters"]["small"] == {**small, "skipped_steps": {}, "draft_ms": 3.6}
    assert graft["num_verified_nodes"] == 20
    assert (graft["num_steps"], graft["num_grafts"], graft["trimmed"]) == (4, 4, 2)
    assert (graft["draft_ms"], graft["verify_ms"], graft["halts"]) == (4.0, 8.0, {})
    assert graft["declined"] == {"small": 4}


def test_answer_metrics_without_drafting_have_no_undefined_numbers(server: Server) -> None:
    """A rate over zero steps must be null, not NaN, which is no JSON."""
    response = server.complete(speculative={"enabled": False}, max_tokens=2)
    assert "NaN" not in response.text
    speculation = response.json()["metrics"]["speculative_decoding"]
    assert speculation["mean_acceptance_length"] is None
    assert speculation["draft_acceptance_rate"] is None
    assert speculation["acceptance_histogram"] == [0]


def test_answer_metrics_of_a_list_are_the_sums_over_its_prompts(server: Server) -> None:
    """Sums over answers must equal the counters' growth, however prompts were bundled."""
    one = server.complete(max_tokens=10).json()["metrics"]
    three = server.complete(prompt=["a", "b", "c"], max_tokens=10).json()["metrics"]
    for key in ("num_spec_steps", "num_accepted_draft_tokens", "num_draft_tokens"):
        assert three["speculative_decoding"][key] == 3 * one["speculative_decoding"][key]
    assert three["graft"]["drafters"]["ngram"]["drafted"] == 3 * one["graft"]["drafters"]["ngram"]["drafted"]


def test_unsupported_fields_may_carry_the_value_that_changes_nothing(server: Server) -> None:
    """Client libraries send their defaults; refusing those would lock them out."""
    response = server.complete(
        n=1,
        best_of=1,
        echo=False,
        logprobs=None,
        presence_penalty=0,
        frequency_penalty=0.0,
        logit_bias={},
        suffix=None,
        response_format={"type": "text"},
        tools=[],
        tool_choice="none",
    )
    assert response.status_code == 200, response.text


def test_an_engine_failure_before_the_answer_is_a_real_500(server: Server) -> None:
    """A failed request must not look like a short answer."""
    server.engine.fail_after = 1
    response = server.complete()
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "scripted fault" in response.json()["error"]["message"]
    server.engine.reset()
    assert server.complete().status_code == 200
