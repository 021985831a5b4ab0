"""Log-probabilities through the engine: for every emitted token the target's own, whatever the drafters guessed."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

import engine.commit
from engine.logprobs import LEAST, token_logprobs
from engine.request import RequestError, TokenLogprob
from tests.engine_world import Reply, World

TinyModel = Callable[..., PreTrainedModel]

SCHEDULES = ("ar", "ngram", "small", "medium", "talon", "treegraft")
VOCAB, LENGTH, TOP = 40, 16, 3


def prompts(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randrange(2, 20))] for _ in range(count)]


def told(reply: Reply) -> list[TokenLogprob]:
    return [one for delta in reply.deltas for one in delta.logprobs]


def transformers_rows(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """[len(answer), vocab] log-probabilities by one plain pass over the whole text."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0]
    return logits.double().log_softmax(-1)[len(prompt) - 1 : -1]


def worst(reply: Reply, rows: torch.Tensor) -> float:
    """The largest difference between what was told and `rows`, tokens themselves and alternatives; infinite if any is wrong."""
    difference = 0.0
    for token, one, row in zip(reply.tokens, told(reply), rows, strict=True):
        best = row.topk(TOP).values.tolist()
        if one.token_id != token or len(one.alternatives) != TOP:
            return float("inf")
        pairs = [(one.logprob, row[token].item())]
        pairs += [(value, row[other].item()) for other, value in one.alternatives]
        pairs += [(value, other) for (_, value), other in zip(one.alternatives, best, strict=True)]
        difference = max(difference, *(abs(mine - other) for mine, other in pairs))
    return difference


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_those_of_transformers_under_every_schedule(tiny_model: TinyModel, temperature: float) -> None:
    """Accepted drafts get the target's number, not the drafter's, and not that of another node's row."""
    target, hostile = tiny_model("llama", VOCAB, 1), tiny_model("llama", VOCAB, 9)
    asked = prompts(2, 4)
    options = {"temperature": temperature, "seed": 5, "max_tokens": LENGTH, "num_logprobs": TOP}
    with World(target, small=hostile, medium=target) as world:
        replies = {schedule: world.run_all(asked, schedule, **options) for schedule in SCHEDULES}
        silent = world.run_all(asked, "treegraft", **{**options, "num_logprobs": None})
    for schedule, answers in replies.items():
        for prompt, reply, plain in zip(asked, answers, replies["ar"], strict=True):
            assert reply.tokens == plain.tokens
            assert all(len(delta.logprobs) == len(delta.token_ids) for delta in reply.deltas)
            difference = worst(reply, transformers_rows(target, prompt, reply.tokens))
            assert difference < 1e-4, f"{schedule}: off by {difference}"
            assert [one.text_offset for one in told(reply)] == [one.text_offset for one in told(plain)]
    for schedule in ("medium", "talon", "treegraft"):
        assert sum(reply.stats.num_accepted for reply in replies[schedule]) > 0, f"{schedule} accepted nothing"
    assert [reply.tokens for reply in silent] == [reply.tokens for reply in replies["treegraft"]]
    assert not any(told(reply) for reply in silent)


def test_rows_of_the_wrong_nodes_would_be_noticed(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: each accepted token read off its own node's row instead of the one in front of it."""

    def shifted(
        logits: torch.Tensor, tokens: tuple[int, ...], offsets: list[int], count: int
    ) -> tuple[TokenLogprob, ...]:
        return token_logprobs(logits.roll(-1, 0), tokens, offsets, count)

    monkeypatch.setattr(engine.commit, "token_logprobs", shifted)
    target = tiny_model("llama", VOCAB, 1)
    with World(target, medium=target) as world:
        reply = world.run([1, 2, 3], "medium", max_tokens=LENGTH, num_logprobs=TOP)
    assert worst(reply, transformers_rows(target, [1, 2, 3], reply.tokens)) > 0.1


def test_bias_and_penalties_do_not_show(tiny_model: TinyModel) -> None:
    """They are the caller's wish, not the model's opinion; a banned end would otherwise be reported as impossible."""
    target = tiny_model("llama", VOCAB, 1)
    with World(target, medium=target, stop_tokens=range(20)) as world:
        reply = world.run([1, 2, 3], "medium", max_tokens=LENGTH, min_tokens=LENGTH, num_logprobs=TOP, temperature=0.5)
        assert worst(reply, transformers_rows(target, [1, 2, 3], reply.tokens)) < 1e-4
        assert any(token < 20 for one in told(reply) for token, _ in one.alternatives)


@pytest.mark.parametrize("schedule", ["ar", "medium"])
@pytest.mark.parametrize("num_tokens", range(1, 8))
def test_as_many_as_tokens_for_every_limit(tiny_model: TinyModel, schedule: str, num_tokens: int) -> None:
    """A step cut by the limit has verified more tokens than it may tell of."""
    target = tiny_model("llama", VOCAB, 1)
    with World(target, medium=target) as world:
        reply = world.run([1, 2, 3], schedule, max_tokens=num_tokens, num_logprobs=0)
    assert len(told(reply)) == len(reply.tokens) == num_tokens
    assert all(one.alternatives == () for one in told(reply))


def test_an_end_token_has_one_too(tiny_model: TinyModel) -> None:
    """It is counted in usage, so a list without it would not line up."""
    target = tiny_model("llama", VOCAB, 1)
    with World(target, medium=target) as world:
        usual = world.run([1, 2, 3], "medium", max_tokens=LENGTH).tokens
    with World(target, medium=target, stop_tokens=[usual[5]]) as world:
        reply = world.run([1, 2, 3], "medium", max_tokens=LENGTH, num_logprobs=1)
    assert reply.tokens == usual[: usual.index(usual[5]) + 1]
    assert [one.token_id for one in told(reply)] == reply.tokens


def test_offsets_are_where_a_tokens_text_begins(tiny_model: TinyModel) -> None:
    """An editor marks characters by them. A token that continues a split character is placed at that character."""
    target = tiny_model("llama", 259, 3)
    with World(target, medium=target) as world:
        reply = world.run("ab", "medium", max_tokens=60, num_logprobs=0, temperature=1.0, seed=2)
        decode = world.tokenizer.decode
    for index, one in enumerate(told(reply)):
        before = decode(reply.tokens[:index], clean_up_tokenization_spaces=False, skip_special_tokens=False)
        assert len(before.rstrip("\ufffd")) <= one.text_offset <= len(before)
        assert one.text_offset <= len(reply.text)


def test_numbers_are_finite_and_padding_is_no_alternative() -> None:
    """JSON has no infinity, and an id behind the vocabulary has no text."""
    rows = torch.tensor([[0.0, -torch.inf, 1.0, -torch.inf], [5.0, 5.0, 5.0, -torch.inf]])
    first, second = token_logprobs(rows, [1, 2], [0, 4], 20)
    assert first.logprob == LEAST
    assert [token for token, _ in first.alternatives] == [2, 0]
    assert [token for token, _ in second.alternatives] == [0, 1, 2]
    assert second.logprob == pytest.approx(-1.0986123)
    assert (first.text_offset, second.text_offset) == (0, 4)
    half = token_logprobs(torch.tensor([[0.0, 1.0]], dtype=torch.bfloat16), [0], [0], 1)[0]
    assert half.logprob == pytest.approx(-1.3132617, abs=1e-6)


def test_more_than_twenty_alternatives_are_refused(tiny_model: TinyModel) -> None:
    """Each costs a sort of the vocabulary and a line of JSON per token."""
    with World(tiny_model("llama", VOCAB, 1)) as world:
        for count in (-1, 21):
            with pytest.raises(RequestError) as refused:
                world.submit([1], num_logprobs=count)
            assert refused.value.param == "logprobs"
