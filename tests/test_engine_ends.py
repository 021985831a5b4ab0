"""Where an answer may end: stop tokens, ignored end tokens and a least length, under trees as with one token at a time."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

import engine.decide
from engine.adjust import without_ends
from engine.noise import TargetNoise
from engine.request import FinishReason, RequestError
from engine.text import TextStream
from models.sampling import SamplingParams, probabilities
from scheduler.schedule import Action, Schedule, Word
from tests.engine_world import World
from tree.policies.sampled import Iid
from verify.walk import race

TinyModel = Callable[..., PreTrainedModel]

SCHEDULES = ("ar", "ngram", "small", "medium", "talon", "treegraft")
VOCAB, LENGTH = 40, 16
ENDS = frozenset({0, 3, 7, 12, 25, 31})  # the model's own; many, so that they come often

RULES: dict[str, dict[str, Any]] = {
    "min_tokens": {"min_tokens": 9},
    "min_tokens_is_the_limit": {"min_tokens": LENGTH},
    "ignore_eos": {"ignore_eos": True},
    "stop_token_ids": {"stop_token_ids": frozenset({1, 2, 4, 5, 6, 14, 16})},
    "only_stop_token_ids": {"ignore_eos": True, "stop_token_ids": frozenset({9, 10, 11, 16, 17, 18})},
    "all": {"ignore_eos": True, "stop_token_ids": frozenset({9, 10, 11, 16, 17, 18}), "min_tokens": 5},
}


def prompts(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randrange(2, 20))] for _ in range(count)]


def one_at_a_time(model: PreTrainedModel, prompt: list[int], sampling: SamplingParams, rule: dict[str, Any]) -> list[int]:
    """transformers' logits of the whole text for each token anew, and the rule in its own words."""
    ends = (frozenset() if rule.get("ignore_eos") else ENDS) | rule.get("stop_token_ids", frozenset())
    answer: list[int] = []
    for position in range(LENGTH):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *answer]])).logits[:, -1]
        logits = logits.clone()  # out of inference mode, so that it can be written to
        if position < rule.get("min_tokens", 0):
            for token in ends:
                logits[0, token] = -torch.inf
        row = probabilities(logits, sampling)[0]
        noise = TargetNoise(sampling.seed, position).exponentials(0, VOCAB)
        answer.append(int(row.argmax()) if sampling.greedy else int(race(row, noise)))
        if answer[-1] in ends:
            break
    return answer


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", RULES)
def test_answers_end_where_one_token_at_a_time_ends(tiny_model: TinyModel, name: str, temperature: float) -> None:
    """A rule that only the root's row obeys lets a drafted end through; one that a whole tree obeys comes too late."""
    rule = RULES[name]
    target, hostile = tiny_model("llama", VOCAB, 1), tiny_model("llama", VOCAB, 9)
    asked = prompts(3, 11)
    wanted, plain = (
        [one_at_a_time(target, p, SamplingParams(temperature=temperature, seed=5), r) for p in asked] for r in (rule, {})
    )
    assert wanted != plain, "the rule changes nothing here, so nothing is tested"
    with World(target, small=hostile, medium=target, stop_tokens=ENDS) as world:
        for schedule in SCHEDULES:
            replies = world.run_all(asked, schedule, temperature=temperature, seed=5, max_tokens=LENGTH, **rule)
            assert [reply.tokens for reply in replies] == wanted, schedule
            for reply in replies:
                assert reply.finish is (FinishReason.LENGTH if len(reply.tokens) == LENGTH else FinishReason.STOP)
                assert len(reply.tokens) >= rule.get("min_tokens", 0)
            if schedule in ("medium", "treegraft"):
                assert sum(reply.stats.num_accepted for reply in replies) > 0, f"{schedule} accepted nothing"


@pytest.mark.parametrize("wrong", ["root only", "whole tree"])
def test_one_depth_for_all_nodes_would_be_noticed(
    tiny_model: TinyModel, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative controls: the ban in the root's row alone, and in every row as long as the root needs it."""

    def judge(logits: torch.Tensor, ends: frozenset[int], depths: list[int], required: int) -> torch.Tensor:
        depths = [0] * len(depths) if wrong == "whole tree" else [0, *[required] * (len(depths) - 1)]
        return without_ends(logits, ends, depths, required)

    monkeypatch.setattr(engine.decide, "without_ends", judge)
    target = tiny_model("llama", VOCAB, 1)
    differs = 0
    with World(target, medium=target, stop_tokens=ENDS) as world:
        for required in (2, 4, 6):
            for prompt in prompts(2, 11):
                rule = {"min_tokens": required}
                want = one_at_a_time(target, prompt, SamplingParams(temperature=0.0), rule)
                assert world.run(prompt, "ar", max_tokens=LENGTH, **rule).tokens == want
                differs += world.run(prompt, "medium", max_tokens=LENGTH, **rule).tokens != want
    assert differs > 0


def test_ratio_rules_write_enough_too(tiny_model: TinyModel) -> None:
    """They divide by what the drafter thought of an end token; the target's zero must win."""
    target = tiny_model("llama", VOCAB, 1)
    drawn = Schedule(
        "drawn", "test", Iid(2, 3), Word("M*"), {Action.MEDIUM: "medium"}, sampling_verifier="traversal"
    )
    with World(target, medium=target, stop_tokens=ENDS, schedules=[drawn]) as world:
        for seed in range(6):
            reply = world.run([1, 2], "drawn", temperature=1.0, seed=seed, max_tokens=LENGTH, min_tokens=15)
            assert len(reply.tokens) >= 15
            assert not set(reply.tokens[:15]) & ENDS
            assert reply.stats.num_accepted > 0


@pytest.mark.parametrize("schedule", ["ar", "medium"])
def test_stop_strings_wait_as_well(tiny_model: TinyModel, schedule: str) -> None:
    """A least length that a stop string undercuts is none."""
    target = tiny_model("llama", 259, 3)
    with World(target, medium=target) as world:
        text = world.run("ab", schedule, max_tokens=40).text
        early, late = text[3:5], text[20:22]
        assert text.find(early) == 3
        reply = world.run("ab", schedule, max_tokens=40, stop=[early])
        assert (reply.text, reply.finish) == (text[:3], FinishReason.STOP)
        reply = world.run("ab", schedule, max_tokens=40, stop=[early], min_tokens=6)
        again = text.find(early, 5)
        assert reply.text == (text if again < 0 else text[:again])
        reply = world.run("ab", schedule, max_tokens=40, stop=[late], min_tokens=1)
        assert reply.text == text[: text.find(late)]


@given(
    st.text("ab", max_size=14), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.integers(0, 10)
)
def test_a_deaf_stream_finds_what_is_completed_later(text: str, stop: list[str], num_deaf: int) -> None:
    """Stop strings that begin among the first tokens count, those that are over by then do not."""
    ends = (end for end in range(num_deaf + 1, len(text) + 1) if any(text[:end].endswith(s) for s in stop))
    end = next(ends, None)
    want = text if end is None else text[: end - max(len(s) for s in stop if text[:end].endswith(s))]
    stream = TextStream(lambda ids: "".join(map(chr, ids)), stop, num_deaf=num_deaf)
    out = ""
    for char in text:
        out += stream.push(ord(char)).text
        assert want.startswith(out), "text was given out that belongs to a stop string"
        if stream.stopped:
            break
    assert out + stream.finish() == want
    assert stream.stopped == (end is not None)


def test_ends_that_cannot_be_are_refused(tiny_model: TinyModel) -> None:
    """An id behind the vocabulary writes into a neighbor's row; a length beyond the limit cannot be kept."""
    with World(tiny_model("llama", VOCAB, 1), max_model_len=50) as world:
        for options, param in (
            ({"stop_token_ids": frozenset({VOCAB})}, "stop_token_ids"),
            ({"stop_token_ids": frozenset({-1})}, "stop_token_ids"),
            ({"min_tokens": -1}, "min_tokens"),
            ({"min_tokens": 25, "max_tokens": 24}, "min_tokens"),
            ({"min_tokens": 48, "max_tokens": None}, "min_tokens"),
            ({"min_tokens": 1, "stop_token_ids": frozenset(range(VOCAB))}, "min_tokens"),
        ):
            with pytest.raises(RequestError) as refused:
                world.submit([1, 2, 3], **options)
            assert refused.value.param == param
        assert len(world.run([1, 2, 3], min_tokens=47, max_tokens=None).tokens) == 47


def test_rows_are_banned_by_their_own_depth() -> None:
    """The row of a node at depth d decides the token after d more; the logits given stay as they are."""
    logits = torch.zeros(4, 5)
    banned = without_ends(logits, {1, 4}, [0, 1, 2, 1], 2)
    assert (banned == -torch.inf).tolist() == [[False, True, False, False, True]] * 2 + [[False] * 5] + [
        [False, True, False, False, True]
    ]
    assert not logits.any()
    assert without_ends(logits, {1}, [2, 3, 4, 5], 2) is logits
    assert without_ends(logits, frozenset(), [0, 0, 0, 0], 2) is logits
