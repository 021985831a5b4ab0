"""Bias and penalties: each row by its own context, as the API's definitions say."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.adjust import Tally, adjusted
from models.sampling import ParamError, SamplingParams, probabilities
from tests.plain_adjust import plain_adjust

VOCAB = 8
TOKENS = st.integers(0, VOCAB - 1)
TEXTS = st.lists(TOKENS, max_size=12)
PARAMS = st.builds(
    SamplingParams,
    presence_penalty=st.sampled_from([0.0, 0.0, 0.7, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.3, 2.0, -1.5]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.5]),
    logit_bias=st.dictionaries(TOKENS, st.sampled_from([-100.0, -1.5, 0.0, 2.0, 100.0]), max_size=4),
)


def tally(params: SamplingParams, prompt: list[int], answer: list[int], vocab_size: int = VOCAB) -> Tally:
    result = Tally.begin(params, vocab_size)
    result.follow([*prompt, *answer], len(prompt))
    return result


def random_logits(rows: int, vocab_size: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def test_golden_values() -> None:
    """By hand: token 0 in the prompt only, 1 once in the answer, 2 twice and once more on the path, 3 biased and unseen."""
    params = SamplingParams(
        presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0, logit_bias={2: 1.0, 3: -1.0}
    )
    logits = torch.tensor([[4.0, -1.0, 1.0, 0.5, 7.0]]).repeat(2, 1)
    got = adjusted(logits, params, tally(params, [0, 0], [1, 2, 2], 5), [[], [2]])
    assert got.tolist() == [
        [2.0, -2.75, 0.0, -0.5, 7.0],  # 4/2; -1*2 - .25 - .5; (1+1)/2 - 2*.25 - .5; .5-1; untouched
        [2.0, -2.75, -0.25, -0.5, 7.0],  # a third 2 costs another .25
    ]


@settings(max_examples=150)
@given(PARAMS, TEXTS, TEXTS, st.lists(TEXTS, min_size=1, max_size=5), st.integers(0, 9))
def test_every_row_equals_a_plain_python_reference(
    params: SamplingParams, prompt: list[int], answer: list[int], paths: list[list[int]], seed: int
) -> None:
    """A row judged by another context than its own makes the text depend on what was drafted."""
    logits = random_logits(len(paths), seed=seed)
    before = logits.clone()
    got = adjusted(logits, params, tally(params, prompt, answer), paths)
    for row, path, x in zip(got.tolist(), paths, logits.tolist(), strict=True):
        assert row == pytest.approx(plain_adjust(x, params, prompt, [*answer, *path]), rel=1e-6, abs=1e-6)
    assert torch.equal(logits, before), "the raw logits are read again, for log-probabilities"


@settings(max_examples=100)
@given(PARAMS, TEXTS, TEXTS, st.lists(st.integers(0, 5), max_size=4), TEXTS)
def test_a_tally_that_grew_with_the_text_equals_one_made_at_once(
    params: SamplingParams, prompt: list[int], answer: list[int], pieces: list[int], path: list[int]
) -> None:
    """Counted twice or not at all, a token would be punished for how many steps the text took. A path is like an answer."""
    text = [*prompt, *answer, *path]
    grown = Tally.begin(params, VOCAB)
    end = 0
    for size in pieces:
        end = min(end + size, len(text))
        grown.follow(text[:end], len(prompt))
    grown.follow(text, len(prompt))
    logits = random_logits(1)
    want = adjusted(logits, params, tally(params, prompt, answer), [path])
    assert torch.equal(adjusted(logits, params, grown, [[]]), want)


def test_following_a_text_costs_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting 30,000 tokens again at every step would cost more than the model."""

    class Text(list[int]):
        read = 0

        def __getitem__(self, index):  # type: ignore[no-untyped-def]
            part = super().__getitem__(index)
            Text.read += len(part)
            return part

    text = Text(i % VOCAB for i in range(30_000))
    counted = Tally.begin(SamplingParams(presence_penalty=1.0), VOCAB)
    counted.follow(text, 29_000)
    text.extend([1, 2, 3])
    Text.read = 0
    counted.follow(text, 29_000)
    assert Text.read == 3
    assert int(counted.num_in_answer.sum()) == 1003


def test_a_text_that_shrank_is_noticed() -> None:
    """Only appending is allowed; a text taken back would leave its counts behind."""
    counted = tally(SamplingParams(), [1], [2, 3])
    with pytest.raises(AssertionError, match="3 tokens were counted"):
        counted.follow([1, 2], 1)


def test_presence_and_frequency_do_not_count_the_prompt() -> None:
    """The OpenAI definition: a question's own words may be used in its answer."""
    params = SamplingParams(presence_penalty=2.0, frequency_penalty=2.0)
    logits = random_logits(1)
    assert torch.equal(adjusted(logits, params, tally(params, [1, 1, 2], []), [[]]), logits)
    assert not torch.equal(adjusted(logits, params, tally(params, [], [1, 1, 2]), [[]]), logits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_extreme_values_leave_a_distribution(dtype: torch.dtype) -> None:
    """A penalty of 1e-300 overflows, and inf - inf in a softmax is a failed request."""
    logits = torch.tensor([[40.0, 0.0, -40.0, 1.0, -math.inf]]).to(dtype)
    for repetition in (5e-324, 1e-300, 1e-30, 1e30, 1e300):
        for bias in ({}, {0: -100.0, 4: 100.0}):
            params = SamplingParams(repetition_penalty=repetition, frequency_penalty=2.0, logit_bias=bias)
            got = adjusted(logits, params, tally(params, [0, 1, 2, 4], [0] * 99, 5), [[2, 2, 4]])
            assert got.dtype == torch.float32
            assert got[0, :4].isfinite().all() and got[0, 4] == -math.inf, f"{repetition}, {bias}: {got}"
            p = probabilities(got, params)
            assert p.isfinite().all() and p[0, 4] == 0 and p.sum().item() == pytest.approx(1)


def test_broken_rows_stay_broken() -> None:
    """A clamp that mends NaN or +inf would serve a broken model's row as text."""
    params = SamplingParams(repetition_penalty=1.5, presence_penalty=1.0, logit_bias={0: 100.0})
    for bad in (math.nan, math.inf):
        got = adjusted(torch.tensor([[bad, bad, 0.0]]), params, tally(params, [0], [1], 3), [[0]])
        assert probabilities(got, params).isnan().all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_but_one_token_banned_leaves_that_one(temperature: float) -> None:
    """The usual way to force a choice; -100 is far beyond the spread of a model's logits."""
    logits = random_logits(4, 300)
    for bias in ({t: -100.0 for t in range(300) if t != 7}, {7: 100.0}):
        params = SamplingParams(temperature=temperature, logit_bias=bias)
        p = probabilities(adjusted(logits, params, tally(params, [1], [7], 300), [[]] * 4), params)
        assert p[:, 7].tolist() == [1.0] * 4


def test_a_bias_outside_the_vocabulary_never_becomes_a_row() -> None:
    """It would be an index into a neighbor's logits."""
    with pytest.raises(ParamError):
        Tally.begin(SamplingParams(logit_bias={VOCAB: 1.0}), VOCAB)


@pytest.mark.parametrize("penalty", [0.6, 1.2, 3.0])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    """Differential, prompt and answer included, as both count them."""
    params = SamplingParams(repetition_penalty=penalty)
    text = [3, 1, 3, 60, 17, 2]
    logits = random_logits(1, 64)
    want = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([text]), logits.clone())
    for cut in range(len(text) + 1):
        got = adjusted(logits, params, tally(params, text[:3], text[3:cut], 64), [text[max(cut, 3) :]])
        torch.testing.assert_close(got, want)


def test_bias_is_that_of_transformers_for_single_tokens() -> None:
    """Their bias may also name sequences, which the API knows nothing of."""
    bias = {3: 5.0, 9: -100.0}
    params = SamplingParams(logit_bias=bias)
    logits = random_logits(1, 64)
    want = SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()])(torch.tensor([[1]]), logits)
    torch.testing.assert_close(adjusted(logits, params, tally(params, [1], [], 64), [[]]), want)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
@pytest.mark.parametrize(("min_p", "top_k", "top_p"), [(0.1, 0, 1.0), (0.05, 9, 1.0), (0.05, 0, 0.8), (0.1, 12, 0.7)])
def test_cuts_are_those_of_transformers_in_our_order(temperature: float, min_p: float, top_k: int, top_p: float) -> None:
    """Differential. Their warpers agree one by one; `generate` chains them with min-p last, we put it first.

    Rows are random, so neither ties nor masses on the edge occur, where the definitions differ.
    """
    logits = random_logits(20, 64)
    chain = [TemperatureLogitsWarper(temperature), MinPLogitsWarper(min_p)]
    chain += [TopKLogitsWarper(top_k)] if top_k else []
    chain += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    want = logits.clone()
    for warp in chain:
        want = warp(None, want)  # type: ignore[arg-type]
    params = SamplingParams(temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p)
    torch.testing.assert_close(probabilities(logits, params), torch.softmax(want, -1))


def test_min_p_last_would_be_another_distribution() -> None:
    """Negative control of the order: with top-p before it, min-p leaves more tokens in some row."""
    logits = random_logits(20, 64)
    want = TopPLogitsWarper(0.7)(None, logits)  # type: ignore[arg-type]
    want = MinPLogitsWarper(0.2)(None, want)  # type: ignore[arg-type]
    assert not torch.equal(want.isfinite(), probabilities(logits, SamplingParams(min_p=0.2, top_p=0.7)) > 0)
