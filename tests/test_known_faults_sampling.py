"""Faults that other speculative servers had with the verification rule and log-probabilities, tried on this one.

trial                                                   test
B2  drafted from one distribution, weighed with another test_engine_lossless.py (law of two tokens, acceptance)
B3  the token after a whole accepted path is wrong      test_b3_no_repeats_that_plain_decoding_does_not_have
B4  a sibling of the argmax accepted at temperature 0   test_b4_wide_trees_keep_to_the_argmax
B5  another text in half precision                      test_proof.py (near ties are told from failures); `graftserve prove`
B6  tiny temperatures                                   test_b6_tiny_temperatures_are_greedy_and_finite
B7  a seed without effect, or with the wrong one        test_b7_h6_a_seed_is_a_text
B9  bias and min_p on the last token only               test_b9_a_banned_token_…, test_b9_min_p_holds_…
G2  prompt log-probabilities corrupted                  test_g2_echo_with_logprobs_is_right_or_refused
G3  infinite log-probabilities                          test_g3_every_number_is_finite_json
H6  two requests share a random state                   test_b7_h6_a_seed_is_a_text
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from transformers import PreTrainedModel

from tests.real_server import Real, real_server

TinyModel = Callable[..., PreTrainedModel]
OFF = {"enabled": False}
TREES = ["treegraft", "small"]


@pytest.fixture(scope="module")
def real(tiny_model: TinyModel) -> Iterator[Real]:
    target = tiny_model("llama", 259, 5, max_positions=1000)
    with real_server(target, small=tiny_model("llama", 259, 99, max_positions=1000), medium=target, num_rows=20_000) as real:
        yield real


def picked(real: Real, prompt: Any = "abc", **body: Any) -> list[str]:
    """The tokens of an answer."""
    return list(real.ask(prompt, logprobs=0, **body)["choices"][0]["logprobs"]["tokens"])


@pytest.mark.parametrize("temperature", [0, 1])
def test_b3_no_repeats_that_plain_decoding_does_not_have(real: Real, temperature: float) -> None:
    """The token behind a fully accepted path must come from that path's last row; taken one row early it repeats a word."""
    for seed in range(2):
        asked = {"max_tokens": 30, "temperature": temperature, "seed": seed}
        drafted = picked(real, **asked, speculative={"schedule": "chain-medium", "budget": 6})
        assert drafted == picked(real, **asked, speculative=OFF)


@pytest.mark.parametrize("schedule", ["talon", "treegraft", "small"])
def test_b4_wide_trees_keep_to_the_argmax(real: Real, schedule: str) -> None:
    """With several children a node, only the argmax may be taken, whatever else would be acceptable."""
    wide = {"schedule": schedule, "budget": 40}
    for prompt in range(8):
        ids = [prompt * 7 % 256, 97 + prompt % 5, prompt]
        assert picked(real, ids, max_tokens=16, speculative=wide) == picked(real, ids, max_tokens=16, speculative=OFF)


@pytest.mark.parametrize("schedule", ["ar", *TREES])
def test_b6_tiny_temperatures_are_greedy_and_finite(real: Real, schedule: str) -> None:
    """Logits divided by 1e-5 overflow half precision; blank or repeated text follows."""
    greedy = picked(real, max_tokens=20, speculative=OFF)
    for temperature in (0, 1e-12, 1e-6, 1e-5, 1e-4):
        body = real.ask("abc", max_tokens=20, temperature=temperature, seed=3, logprobs=3, speculative={"schedule": schedule})
        told = body["choices"][0]["logprobs"]
        assert told["tokens"] == greedy, temperature
        assert all(map(math.isfinite, told["token_logprobs"]))
    assert real.client.get("/health").status_code == 200


@pytest.mark.parametrize("schedule", TREES)
def test_b7_h6_a_seed_is_a_text(real: Real, schedule: str) -> None:
    """The same alone, in company and without drafting; another seed, another text."""
    asked = {"max_tokens": 20, "temperature": 1, "speculative": {"schedule": schedule}}
    alone = picked(real, **asked, seed=7)
    assert picked(real, **asked, seed=7) == alone
    assert picked(real, **{**asked, "speculative": OFF}, seed=7) == alone
    with ThreadPoolExecutor(8) as pool:
        others = [pool.submit(picked, real, **asked, seed=seed) for seed in (1, 2, 3, 4, 5, 7)]
        texts = [other.result() for other in others]
    assert texts[-1] == alone
    assert len({tuple(text) for text in texts}) == 6


@pytest.mark.parametrize("schedule", TREES)
def test_b9_a_banned_token_never_appears(real: Real, schedule: str) -> None:
    """At no position, drafted or not; a bias looked at for the last token of a block only lets it through."""
    ids = list(real.ask("abc", max_tokens=16)["choices"][0]["text"].encode())[:4]
    bias = {str(token): -100 for token in set(ids)}
    asked = {"max_tokens": 40, "logit_bias": bias, "logprobs": 0}
    drafted = real.ask("abc", **asked, speculative={"schedule": schedule})
    banned = {chr(token) for token in ids if token < 128}
    assert not banned & set(drafted["choices"][0]["logprobs"]["tokens"])
    plain = real.ask("abc", **asked, speculative=OFF)
    assert drafted["choices"][0]["logprobs"]["tokens"] == plain["choices"][0]["logprobs"]["tokens"]


@pytest.mark.parametrize("schedule", TREES)
def test_b9_min_p_holds_for_every_token(real: Real, schedule: str) -> None:
    """Each token is at least half as likely as the likeliest one at its place, in the distribution it was drawn from."""
    body = real.ask("abc", max_tokens=30, temperature=1.5, min_p=0.5, seed=5, logprobs=1, speculative={"schedule": schedule})
    told = body["choices"][0]["logprobs"]
    for logprob, likeliest in zip(told["token_logprobs"], told["top_logprobs"], strict=True):
        assert (max(likeliest.values()) - logprob) / 1.5 <= math.log(2) + 1e-4


def test_g2_echo_with_logprobs_tells_of_every_token_of_the_prompt(real: Real) -> None:
    """Of a prompt longer than a chunk, and the second time too, when its rows are in the cache."""
    first, second = (
        real.complete("x" * 600, echo=True, logprobs=1, max_tokens=1).json()["choices"][0]["logprobs"] for _ in range(2)
    )
    assert len(first["tokens"]) == len(first["token_logprobs"]) == 601
    assert first["token_logprobs"][0] is None and all(map(math.isfinite, first["token_logprobs"][1:]))
    assert second["token_logprobs"][1:] == pytest.approx(first["token_logprobs"][1:], abs=1e-4)


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 0.01}, {"logit_bias": {str(i): -100 for i in range(200)}},
                                     {"min_p": 1}, {"repetition_penalty": 2}])
@pytest.mark.parametrize("schedule", ["ar", "treegraft"])
def test_g3_every_number_is_finite_json(real: Real, schedule: str, options: dict[str, Any]) -> None:
    """A logarithm of 0 is no JSON and made other servers answer 500."""
    response = real.complete(max_tokens=10, temperature=1, logprobs=5, **options, speculative={"schedule": schedule})
    assert response.status_code == 200

    def strict(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    body = json.loads(response.text, parse_constant=strict)
    assert all(map(math.isfinite, body["choices"][0]["logprobs"]["token_logprobs"]))
    for name, value in real.samples().items():
        assert math.isfinite(value), name
