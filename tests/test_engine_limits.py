"""Where an answer ends inside a block of several tokens: exactly where a decoder of single tokens would have ended it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from transformers import PreTrainedModel

from engine.request import FinishReason, RequestError
from scheduler.schedule import Action, Schedule, Word
from tests.engine_world import World, greedy_reference, self_draft_chain
from tree.graft import TreeGraft

TinyModel = Callable[..., PreTrainedModel]
DRAFTERS = ("hostile", "self")


def world_of(tiny_model: TinyModel, drafter: str, **options: object) -> World:
    target = tiny_model("llama", 120, 11)
    medium = target if drafter == "self" else tiny_model("llama", 120, 12)
    return World(target, medium=medium, schedules=[self_draft_chain(8)], **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_never_more_tokens_than_asked_for_and_every_count_agrees(tiny_model: TinyModel, drafter: str) -> None:
    """Tokens delivered, tokens counted and max_tokens are one number, however many a step could have committed."""
    with world_of(tiny_model, drafter) as world:
        full = world.run("hello", "ar", max_tokens=20).tokens
        for count in range(1, 21):
            reply = world.run("hello", "chain", max_tokens=count)
            assert reply.tokens == full[:count]
            assert reply.finish is FinishReason.LENGTH
            stats = reply.stats
            assert stats.num_output_tokens == count == len(reply.creators)
            assert count == stats.num_steps + stats.num_accepted - (stats.num_trimmed > 0)
            assert sum(c != "target" for c in reply.creators) == stats.num_accepted
            assert sum(c.drafted for c in stats.drafters.values()) == stats.num_drafted


@pytest.mark.parametrize("schedule", ["ar", "chain", "talon", "treegraft", "ngram"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_an_end_token_inside_a_block_ends_the_answer_there(tiny_model: TinyModel, drafter: str, schedule: str) -> None:
    """Tokens drafted behind an end token must not leak out, nor be counted."""
    target = tiny_model("llama", 120, 11)
    free = greedy_reference(target, b"start", 40)
    for end in (free[3], free[11], free[17]):
        with world_of(tiny_model, drafter, stop_tokens=[end]) as world:
            reply = world.run("start", schedule, max_tokens=40)
        assert reply.tokens == free[: free.index(end) + 1]
        assert reply.finish is FinishReason.STOP
        assert chr(end) not in reply.text or end in free[: free.index(end)]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_stop_string_cuts_text_and_tokens_alike(tiny_model: TinyModel, drafter: str) -> None:
    """Text without the stop string, tokens up to the one that completed it, whatever block it was completed in."""
    rng = random.Random(1)
    with world_of(tiny_model, drafter) as world:
        for _ in range(12):
            prompt = [rng.randrange(32, 120) for _ in range(6)]
            free = world.run(prompt, "ar", max_tokens=40)
            start = rng.randrange(1, 30)
            stop = free.text[start : start + rng.randrange(1, 5)]
            if not stop:
                continue
            plain = world.run(prompt, "ar", max_tokens=40, stop=[stop])
            fast = world.run(prompt, "chain", max_tokens=40, stop=[stop])
            assert (fast.tokens, fast.text, fast.finish) == (plain.tokens, plain.text, plain.finish)
            assert fast.text == free.text[: free.text.index(stop)]
            assert fast.finish is FinishReason.STOP
            assert fast.stats.num_output_tokens == len(fast.tokens)


@pytest.mark.parametrize("schedule", ["ar", "chain", "treegraft", "talon"])
def test_the_context_end_is_a_length_finish(tiny_model: TinyModel, schedule: str) -> None:
    """A prompt one short of the context gives one token; no position beyond the context is ever forwarded."""
    target = tiny_model("llama", 120, 11, max_positions=64)
    with World(target, medium=target, schedules=[self_draft_chain(8)]) as world:
        for length in (63, 62, 58, 1):
            reply = world.run([7] * length, schedule, max_tokens=None)
            assert len(reply.tokens) == 64 - length
            assert reply.finish is FinishReason.LENGTH
        for length in (64, 65, 640):
            with pytest.raises(RequestError) as refused:
                world.run([7] * length, schedule, max_tokens=None)
            assert refused.value.code == "context_length_exceeded"
            assert "64" in str(refused.value) and str(length) in str(refused.value)
        with pytest.raises(RequestError, match="60 and 10 new"):
            world.run([7] * 60, schedule, max_tokens=10)


@pytest.mark.parametrize("chunk", [1, 3, 16, 256])
def test_prompts_are_read_in_chunks_without_changing_the_answer(tiny_model: TinyModel, chunk: int) -> None:
    """A chunk border that loses or repeats a row changes the first token already."""
    from engine.admission import Limits

    target = tiny_model("llama", 120, 11)
    limits = Limits(prefill_chunk=chunk)
    rng = random.Random(chunk)
    asked = [[rng.randrange(120) for _ in range(n)] for n in (1, 2, 16, 17, 18, 50)]
    with World(target, medium=target, limits=limits) as world:
        replies = world.run_all(asked, "treegraft", max_tokens=16)
    assert [reply.tokens for reply in replies] == [greedy_reference(target, p, 16) for p in asked]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, 2, 999_999_999]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"schedule": "fastest"}, "speculative.schedule"),
        ({"budget": 0}, "speculative.budget"),
        ({"budget": 10**9}, "speculative.budget"),
    ],
)
def test_an_impossible_request_is_refused_by_name_and_harms_nobody(
    tiny_model: TinyModel, options: dict[str, object], param: str
) -> None:
    """A refused request must leave no trace, and its neighbor's answer must stay what it was."""
    target = tiny_model("llama", 120, 11)
    with World(target, medium=target) as world:
        neighbor = world.submit("near door", "treegraft", max_tokens=40)
        values = {"prompt": [1], "schedule": "ar", **options}
        with pytest.raises(RequestError) as refused:
            world.submit(values.pop("prompt"), values.pop("schedule"), **values)  # type: ignore[arg-type]
        assert refused.value.param == param
        assert neighbor.result().tokens == greedy_reference(target, b"near door", 40)
        assert world.engine.num_waiting == 0


def test_budget_one_is_plain_decoding(tiny_model: TinyModel) -> None:
    """A budget of the root alone leaves nothing to draft for."""
    target = tiny_model("llama", 120, 11)
    with World(target, medium=target) as world:
        for schedule in ("treegraft", "talon", "ngram"):
            stats = world.run("abc", schedule, budget=1).stats
            assert stats.num_drafted == 0 and stats.num_verified_nodes == stats.num_steps
            wide = world.run("abc", schedule, budget=3).stats
            assert all(drafted <= 2 for drafted in wide.drafted)


def test_a_plan_that_names_one_of_two_drafters_for_ever_ends(tiny_model: TinyModel) -> None:
    """A drafter that is turned away again and again must not keep the engine asking: nobody else would be served."""
    target = tiny_model("llama", 40, 1)
    both = {Action.SMALL: "ngram", Action.MEDIUM: "medium"}
    stubborn = Schedule("stubborn", "test", TreeGraft(small="ngram", steps=2), Word("M*"), both)
    with World(target, medium=target, schedules=[stubborn]) as world:
        assert len(world.run([1, 2, 3], "stubborn", max_tokens=12).tokens) == 12
