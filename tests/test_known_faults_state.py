"""Faults that other speculative servers had with trees, caches, tokenizers and vocabularies, tried on this one.

trial                                                   test
C1  accepted positions read as a dense prefix           test_c1_grafted_branches_are_accepted_and_the_text_is_plain
C2  NaN in draft scores breaks the tree                 test_c2_a_drafter_of_nan_is_dropped_and_counted
C3  edge values of cutting the cache back               test_c3_nothing_accepted_for_long
C4  a sliding window that has wrapped                   test_models_refusal.py (test_sliding_window_is_refused_and_null_passes)
C5  a cache that is used again                          test_c5_the_same_prompt_again_after_another
C6  a prefix cache makes the drafter blind              test_c6_a_repeated_prompt_changes_nothing
C7  acceptance decays over time                         test_c7_acceptance_does_not_decay; test_engine_lossless.py
C8  placeholders reach the embedding                    test_c8_more_requests_than_places_and_rows
C10 n-gram drafts give nonsense                         test_c10_prompt_lookup_keeps_the_text
D1  a vocabulary padded otherwise                       test_d1_padding_changes_nothing; test_drafter_vocab.py
D2  another tokenizer accepted silently                 test_d2_another_tokenizer_ends_the_start; test_drafter_vocab.py
D3  drafters that tokenize anew                         there are none: D2
D4  ids outside the vocabulary from the client          test_d4_ids_outside_the_vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from app.build import build
from app.config import Settings
from engine.admission import Limits
from models import toy
from tests.engine_world import greedy_reference
from tests.real_server import Real, real_server

TinyModel = Callable[..., PreTrainedModel]
OFF = {"enabled": False}


@pytest.fixture(scope="module")
def target(tiny_model: TinyModel) -> PreTrainedModel:
    return tiny_model("llama", 259, 5, max_positions=2500)


@pytest.fixture(scope="module")
def hostile(tiny_model: TinyModel) -> PreTrainedModel:
    """Another model of the same vocabulary, hardly ever right."""
    return tiny_model("llama", 259, 99, max_positions=2500)


@pytest.fixture(scope="module")
def real(target: PreTrainedModel, hostile: PreTrainedModel) -> Iterator[Real]:
    with real_server(target, small=hostile, medium=target, num_rows=20_000) as real:
        yield real


def drafted(real: Real, prompt: Any, schedule: str, **body: Any) -> dict[str, Any]:
    """The answer of a schedule, whose text is that of plain decoding."""
    answer = real.ask(prompt, logprobs=0, speculative={"schedule": schedule}, **body)
    plain = real.ask(prompt, logprobs=0, speculative=OFF, **body)
    assert answer["choices"][0]["logprobs"]["tokens"] == plain["choices"][0]["logprobs"]["tokens"]
    assert answer["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
    return answer


def test_c1_grafted_branches_are_accepted_and_the_text_is_plain(real: Real) -> None:
    """The small drafter is a stranger, so what is accepted lies scattered among what is not."""
    answer = drafted(real, "abc", "treegraft", max_tokens=120)
    graft = answer["metrics"]["graft"]
    assert graft["num_grafts"] > 0
    assert graft["drafters"]["medium"]["accepted"] > graft["drafters"]["small"]["accepted"]


def test_c2_a_drafter_of_nan_is_dropped_and_counted(target: PreTrainedModel) -> None:
    """A child that survives while its parent is dropped has crashed trees elsewhere."""
    sick = toy.tiny_causal_lm("llama", 259, 99, max_positions=300)
    with torch.no_grad():
        sick.get_input_embeddings().weight[98] = float("nan")
    with real_server(target, medium=sick) as real:
        for _ in range(3):
            answer = drafted(real, "abc", "treegraft", max_tokens=20)
            assert answer["metrics"]["graft"]["halts"] == {"medium": "nan"}
        assert real.total("drafter_halts_total", drafter="medium", reason="nan") == 3


def test_c3_nothing_accepted_for_long(real: Real) -> None:
    """From a prompt of one token, with every draft cut off again at each step."""
    answer = drafted(real, [65], "chain-small", max_tokens=64)
    assert answer["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0


def test_c5_the_same_prompt_again_after_another(real: Real) -> None:
    """Rows that somebody else has used in between are as good as new."""
    first = real.text("abc" * 20, max_tokens=40, speculative={"schedule": "treegraft"})
    real.text("xyz" * 30, max_tokens=60, speculative={"schedule": "treegraft"})
    assert real.text("abc" * 20, max_tokens=40, speculative={"schedule": "treegraft"}) == first


def test_c6_a_repeated_prompt_changes_nothing(real: Real) -> None:
    """Neither the text nor how much is accepted, though what is known of a prompt is used again, or most of it."""
    words = [f"word{i % 37} " for i in range(80)]
    prompt = "".join(words)
    first = drafted(real, prompt, "chain-medium", max_tokens=30)
    again = drafted(real, prompt, "chain-medium", max_tokens=30)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    rate = [answer["metrics"]["speculative_decoding"]["draft_acceptance_rate"] for answer in (first, again)]
    assert abs(rate[0] - rate[1]) < 0.05
    words[40] = "other "
    drafted(real, "".join(words), "treegraft", max_tokens=30)


@pytest.mark.slow
def test_c7_acceptance_does_not_decay(real: Real) -> None:
    """A drafter whose cache is not cut back only looks like a bad drafter, more so by the hour: the target is its own here."""

    def rate(answer: dict[str, Any]) -> float:
        return float(answer["metrics"]["speculative_decoding"]["draft_acceptance_rate"])

    long = real.ask("abc", max_tokens=1500, speculative={"schedule": "chain-medium"})
    told = long["metrics"]["speculative_decoding"]
    last = len(told["per_step_drafted"]) // 10
    assert sum(told["per_step_accepted"][-last:]) >= 0.98 * sum(told["per_step_drafted"][-last:])
    for i in range(60):
        answer = real.ask([i, 66, 67], max_tokens=8, speculative={"schedule": "chain-medium"})
        assert i < 50 or rate(answer) >= 0.98


def test_c8_more_requests_than_places_and_rows(target: PreTrainedModel, hostile: PreTrainedModel) -> None:
    """Sequences that pause between steps, and others that take their rows meanwhile, keep their texts."""
    limits = Limits(max_num_seqs=3, max_waiting=20, prefill_chunk=16)
    prompts = [bytes(range(60 + i, 60 + i + 5 + 9 * (i % 4))).decode() for i in range(12)]
    with real_server(target, small=hostile, medium=target, limits=limits, num_rows=200) as real:

        def one(i: int) -> str:
            schedule = ("treegraft", "small", "ar", "chain-medium")[i % 4]
            return real.text(prompts[i], max_tokens=10 + i, speculative={"schedule": schedule})

        with ThreadPoolExecutor(12) as pool:
            texts = list(pool.map(one, range(12)))
        assert texts == [real.text(prompts[i], max_tokens=10 + i) for i in range(12)]


def test_c10_prompt_lookup_keeps_the_text(real: Real) -> None:
    """What was found in the prompt is a guess like any other."""
    answer = drafted(real, "one two three one two three one two", "ngram", max_tokens=40)
    assert answer["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0


@pytest.mark.parametrize("rows", [256 + 3 + 64, 259])
def test_d1_padding_changes_nothing(tiny_model: TinyModel, rows: int) -> None:
    """Embeddings padded to another multiple are the same vocabulary; a padded id is never written."""
    target = tiny_model("llama", 259, 5)
    with real_server(target, medium=tiny_model("llama", rows, 99)) as real:
        answer = drafted(real, "abc", "treegraft", max_tokens=30)
        assert answer["metrics"]["graft"]["halts"] == {}


def test_d2_another_tokenizer_ends_the_start(tmp_path: Path) -> None:
    """It would run with every guess rejected; the refusal names the first token that differs."""
    for name, tokenizer in (("target", toy.byte_tokenizer()), ("other", toy.sentencepiece_tokenizer())):
        toy.tiny_causal_lm("llama", len(tokenizer), 3).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    settings = Settings(target=str(tmp_path / "target"), small="ngram", medium=str(tmp_path / "other"))
    with pytest.raises(ValueError, match=r"(?i)tok") as refused:
        build(settings, lambda _: None)
    assert "id" in str(refused.value) or "token" in str(refused.value)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [1, 2, 999_999_999]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [259]}, "prompt"),
        ({"stop_token_ids": [10_000_000]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"logit_bias": {"10000000": 5}}, "logit_bias"),
        ({"logit_bias": {"259": 5}}, "logit_bias"),
        ({"logit_bias": {"-1": 5}}, "logit_bias"),
    ],
)
def test_d4_ids_outside_the_vocabulary(real: Real, target: PreTrainedModel, body: dict[str, Any], param: str) -> None:
    """They write into a neighbor's row or end the engine; here they are refused, and a neighbor notices nothing."""
    with ThreadPoolExecutor(1) as pool:
        neighbor = pool.submit(real.text, "abc", max_tokens=40, speculative={"schedule": "treegraft"})
        response = real.complete(**{"prompt": "abc", **body})
        text = neighbor.result()
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith(param)
    assert text == real.world.tokenizer.decode(greedy_reference(target, b"abc", 40), clean_up_tokenization_spaces=False)
