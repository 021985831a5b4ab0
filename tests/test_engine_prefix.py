"""Answers to prompts whose beginning is cached: the text of a server that knows nothing, by less work, drafters not blinded."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import engine.memory
from drafters.causal_lm import CausalLMDrafter
from drafters.draft_head import HeadDrafter
from engine.admission import Limits
from engine.request import FinishReason, StepStats
from models import prefix_cache
from tests.engine_world import Reply, World, greedy_reference, self_draft_chain
from tests.test_draft_head_engine import Checked, all_knowing, forgetful
from tests.toy_heads import forgetful_below, knowing_tail, tail_head, toy_head

TinyModel = Callable[..., PreTrainedModel]
VOCAB = 40
SCHEDULES = ("ar", "ngram", "small", "medium", "talon", "treegraft")


def texts(count: int, seed: int = 0, length: int = 24) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(length)] for _ in range(count)]


def family(seed: int) -> list[list[int]]:
    """Prompts that share all, all but one token, a half, or one token, and one that is another's beginning."""
    base, other = texts(2, seed)
    changed = [*base[:12], (base[12] + 1) % VOCAB, *base[13:]]
    return [base, base, [*base[:-1], (base[-1] + 1) % VOCAB], changed, [base[0], *other], base[:9], [*base, *other], [base[0]]]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_text_with_a_hit_is_the_text_without(tiny_model: TinyModel, schedule: str) -> None:
    """A row of another text, or one at another position, changes an answer at once. One after the other, and all at once."""
    target, hostile = tiny_model("llama", VOCAB, 1), tiny_model("llama", VOCAB, 9)
    asked = family(2)
    wanted = [greedy_reference(target, prompt, 12) for prompt in asked]
    drawn: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 8}
    with World(target, small=hostile, medium=target, limits=Limits(prefill_chunk=7)) as world:
        together = world.run_all(asked, schedule, max_tokens=12)
        alone = [world.run(prompt, schedule, max_tokens=12) for prompt in asked]
        seeded = [world.run(prompt, schedule, **drawn).tokens for prompt in asked]
    with World(target, limits=Limits(prefix_cache=False)) as cold:
        assert [cold.run(prompt, "ar", **drawn).tokens for prompt in asked] == seeded
    assert [reply.tokens for reply in together] == wanted
    assert [reply.tokens for reply in alone] == wanted
    assert [reply.stats.num_cached_tokens for reply in alone] == [len(prompt) - 1 for prompt in asked]


def test_a_cache_that_returns_another_texts_rows_is_noticed(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above: a match that looks at the first token only."""
    target = tiny_model("llama", VOCAB, 1)
    base, other = texts(2, seed=2)
    monkeypatch.setattr(prefix_cache, "common_length", lambda run, keys, start, limit: min(len(run), limit - start))
    with World(target) as world:
        world.run(base)
        reply = world.run([base[0], *other])
    assert reply.stats.num_cached_tokens == len(other)
    assert reply.tokens != greedy_reference(target, [base[0], *other], 24)


def test_a_hit_saves_the_targets_and_the_drafters_work(tiny_model: TinyModel) -> None:
    """Tokens reported but computed all the same would be a lie; a drafter that reads all again costs what was saved."""
    target = tiny_model("llama", VOCAB, 1, max_positions=1000)
    [prompt] = texts(1, length=400)
    with World(target, medium=target) as world:
        medium = world.drafters["medium"]
        assert isinstance(medium, CausalLMDrafter)
        fed = []
        for _ in range(2):
            before = world.lm.num_rows_forwarded, medium.lm.num_rows_forwarded
            reply = world.run(prompt, "medium", max_tokens=12)
            fed.append((world.lm.num_rows_forwarded - before[0], medium.lm.num_rows_forwarded - before[1]))
        assert reply.stats.num_cached_tokens == 399
    # The drafter is asked first when the root is known, and reads that one anew: one token more is cached.
    assert (fed[0][0] - fed[1][0], fed[0][1] - fed[1][1]) == (399, 400), fed


def turns(world: World, schedule: str, count: int = 4, **options: Any) -> list[tuple[list[int], Reply]]:
    """A conversation: each prompt is the whole text before it and a few tokens more."""
    text, told = texts(1, seed=5, length=20)[0], []
    for question in texts(count, seed=6, length=6):
        text = [*text, *question]
        told.append((text, world.run(text, schedule, max_tokens=16, **options)))
        text = [*text, *told[-1][1].tokens]
    return told


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_next_turn_of_a_conversation_reads_what_is_new(tiny_model: TinyModel, schedule: str) -> None:
    """Answers are kept as well as prompts; only the last token or so, which nobody has been fed, is missing."""
    target = tiny_model("llama", VOCAB, 1)
    with World(target, small=tiny_model("llama", VOCAB, 4), medium=target) as world:
        told = turns(world, schedule)
    for prompt, reply in told:
        assert reply.tokens == greedy_reference(target, prompt, 16)
    for prompt, reply in told[1:]:
        assert len(prompt) - 8 <= reply.stats.num_cached_tokens < len(prompt) - 5, "six tokens are the question"


def test_prompt_lookup_finds_what_earlier_turns_said(tiny_model: TinyModel) -> None:
    """The lookup reads tokens, not rows: a cached beginning must not be missing from it."""
    target = forgetful(3)  # the next token hangs on the last one alone, so it repeats itself as soon as it can
    [prompt] = texts(1, seed=5, length=20)
    with World(target) as world:
        first = world.run(prompt, "ar", max_tokens=40)
        again = world.run([*prompt, *first.tokens, first.tokens[0]], "ngram", max_tokens=8)
    assert again.stats.num_cached_tokens >= 50
    assert again.stats.drafters["ngram"].accepted >= 4


@pytest.mark.parametrize("kind", ["model", "tail", "head"])
def test_a_perfect_drafter_stays_perfect_over_hits(kind: str) -> None:
    """A drafter that a hit leaves blind or one token late shows only in what is accepted: the text hides it."""
    target = forgetful(3) if kind == "head" else forgetful_below(1, vocab=VOCAB, seed=3)
    medium: Any = target
    if kind != "model":
        medium = all_knowing(target) if kind == "head" else knowing_tail(target, 1)
    with World(target, medium=medium, schedules=[self_draft_chain(5)]) as world:
        told = turns(world, "chain", count=6)
    for prompt, reply in told:
        assert reply.tokens == greedy_reference(target, prompt, 16)
        assert not reply.stats.halts
        assert reply.stats.num_accepted >= 0.99 * reply.stats.num_drafted > 0, len(prompt)
    assert all(reply.stats.num_cached_tokens >= len(prompt) - 12 for prompt, reply in told[1:])


def test_kept_entries_of_a_head_are_those_it_would_make_anew(tiny_model: TinyModel) -> None:
    """Every answer of the head after a hit is compared with a head that read the whole text."""
    target = tiny_model("llama", VOCAB, 1, layers=4)
    checked = Checked("medium", toy_head(target, "add"), target)
    with World(target, small=target, medium=checked, limits=Limits(prefill_chunk=8), word="SM", budget=5) as world:
        told = [([1, 2, 3, 4, 5, 6], world.run([1, 2, 3, 4, 5, 6], "treegraft", max_tokens=6))]
        for question in ([7, 8], [9]):
            prompt = [*told[-1][0], *told[-1][1].tokens, *question]
            told.append((prompt, world.run(prompt, "treegraft", max_tokens=4)))
        changed = [*told[1][0][:9], 1, 2, 3]
        told.append((changed, world.run(changed, "treegraft", max_tokens=4)))
    assert all(reply.stats.num_cached_tokens >= 8 for _, reply in told[1:])
    assert all(not reply.stats.halts for _, reply in told)
    assert checked.compared > 50
    assert checked.wrong < 1e-3


def test_a_head_without_entries_of_a_long_cached_text_begins_where_it_hears(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a request under another schedule the features are gone. The head goes on blind, and says nothing wrong of itself.

    What it makes in that state is not kept: the oracle agrees again as soon as the text was read in whole.
    """
    monkeypatch.setattr(engine.memory, "_WORTH_REREADING", 4)
    target = tiny_model("llama", VOCAB, 1, layers=4)
    [prompt] = texts(1, seed=8, length=12)
    checked = Checked("medium", toy_head(target, "add"), target)
    with World(target, medium=checked, budget=4) as world:
        world.run(prompt, "ar", max_tokens=4)
        blind = world.run(prompt, "medium", max_tokens=4)
        assert blind.stats.num_cached_tokens == 11 and not blind.stats.halts
        assert blind.tokens == greedy_reference(target, prompt, 4)
        assert blind.stats.drafters["medium"].drafted > 0
        assert checked.wrong > 0.01, "the head did see the text, or the comparison sees nothing"
        assert checked.num_known([*prompt, 1]) == 0
        checked.wrong = 0.0
        fresh = [(token + 1) % VOCAB for token in prompt]
        for _ in range(2):
            reply = world.run(fresh, "medium", max_tokens=4)
    assert reply.stats.num_cached_tokens >= 8
    assert checked.wrong < 1e-3


def test_heads_of_all_kinds_together_leave_the_text_alone(tiny_model: TinyModel) -> None:
    """Every schedule after every other on one conversation, hits of all lengths."""
    target = tiny_model("llama", VOCAB, 1, layers=4)
    asked = family(4)[:5]
    wanted = [greedy_reference(target, prompt, 6) for prompt in asked]
    with World(target, small=toy_head(target, num_draft=25), medium=tail_head(target, num_layers=2), budget=8) as world:
        for schedule in SCHEDULES:
            replies = world.run_all(asked, schedule, max_tokens=6)
            assert [reply.tokens for reply in replies] == wanted, schedule
            assert not any(reply.stats.halts for reply in replies), schedule


def test_answers_to_one_prompt_share_its_rows(tiny_model: TinyModel) -> None:
    """Eight answers to a prompt that comes in pieces: it is read once, and its rows are there once."""
    target = tiny_model("llama", VOCAB, 1)
    [prompt] = texts(1, length=60)
    with World(target, limits=Limits(prefill_chunk=16)) as world:
        most = 0
        forward = world.lm.forward

        def watched(segments: Sequence[Any]) -> Any:
            nonlocal most
            most = max(most, world.lm.pool.num_used)
            return forward(segments)

        world.lm.forward = watched  # type: ignore[method-assign]
        pending = [world.submit(prompt, temperature=1.0, seed=seed, max_tokens=10) for seed in range(8)]
        replies = [one.result() for one in pending]
        assert world.lm.num_rows_forwarded <= 60 + 8 * 10, "the prompt was read more than once"
    assert len({tuple(reply.tokens) for reply in replies}) > 1
    assert most <= 60 + 8 * 10
    assert sorted(reply.stats.num_cached_tokens for reply in replies) == [0] + [59] * 7


def test_a_prompt_that_shares_little_does_not_wait(tiny_model: TinyModel) -> None:
    """Half a prompt's wait for the first token is too much for one shared system token."""
    target = tiny_model("llama", VOCAB, 1, max_positions=1000)
    long, short = texts(2, length=30)
    with World(target, limits=Limits(prefill_chunk=8)) as world:
        slow = world.submit(long * 10, max_tokens=2)
        quick = world.submit([*long[:4], *short[:8]], max_tokens=2)
        replies = slow.result(), quick.result()
    assert replies[1].stats.first_token_s < replies[0].stats.first_token_s


def test_broken_rows_are_not_kept(tiny_model: TinyModel) -> None:
    """A prompt that makes the model say NaN must break no later answer: not its rows, nor what came in with it."""
    target = tiny_model("llama", VOCAB, 11)
    [prompt] = texts(1, length=20)
    with World(target, limits=Limits(prefill_chunk=6)) as world:
        weight = world.lm.model.get_input_embeddings().weight
        sound = weight[7].clone()
        with torch.no_grad():
            weight[7] = float("nan")
        broken = [*[t for t in prompt if t != 7][:12], 7, 1, 2, 3, 4, 5, 6, 8, 9]
        assert world.run(broken).finish is FinishReason.ERROR
        kept = world.lm.pool.owners().nonzero()[0]
        assert 0 < len(kept) <= 12
        assert np.isfinite(world.lm.pool.keys[:, kept].numpy()).all()
        with torch.no_grad():
            weight[7] = sound
        assert world.run(broken).tokens == greedy_reference(target, broken, 24)


def test_aborted_requests_leave_what_they_computed(tiny_model: TinyModel) -> None:
    """Who stops an answer asks a better question next, with the same beginning."""
    target = tiny_model("llama", VOCAB, 1, max_positions=2000)
    [prompt] = texts(1, length=30)
    with World(target, medium=target, num_rows=4000) as world:
        pending = world.submit(prompt, "treegraft", max_tokens=1900)
        first = pending.next()
        world.engine.abort(pending.id)
        cut = pending.result(before=[first])
        assert cut.finish is FinishReason.ABORT
        again = world.run([*prompt, *cut.tokens, 3], max_tokens=4)
    assert again.stats.num_cached_tokens >= 30 + len(cut.tokens) - 1


def test_without_the_cache_nothing_is_kept_or_reported(tiny_model: TinyModel) -> None:
    """The switch turns it off for target and drafters alike."""
    target = tiny_model("llama", VOCAB, 1, layers=4)
    with World(target, small=target, medium=toy_head(target), limits=Limits(prefix_cache=False)) as world:
        for _ in range(2):
            reply = world.run(texts(1)[0], "treegraft")
            assert reply.stats.num_cached_tokens == 0
            world.check_books()
    assert world.lm.pool.reserve is None


def test_queries_and_hits_are_counted_in_tokens(tiny_model: TinyModel) -> None:
    """The hit rate that operators read is hits over queries, and both belong to prompts, once each."""

    class Summing:
        queries = hits = prompt = 0

        def on_step(self, steps: list[StepStats]) -> None:
            self.queries += sum(step.num_prefix_queries for step in steps)
            self.hits += sum(step.num_prefix_hits for step in steps)
            self.prompt += sum(step.num_prompt_tokens for step in steps)

        def on_finish(self, *_: Any) -> None: ...

    summing, asked = Summing(), family(3)
    with World(tiny_model("llama", VOCAB, 1)) as world:
        world.engine.subscribe(summing)
        replies = [world.run(prompt) for prompt in asked]
    assert summing.queries == summing.prompt == sum(map(len, asked))
    assert summing.hits == sum(reply.stats.num_cached_tokens for reply in replies) > 0


def test_kept_rows_never_stand_in_the_way(tiny_model: TinyModel) -> None:
    """A full cache: each new prompt gets the rows it needs, the least recently used ones, and the right text."""
    target = tiny_model("llama", VOCAB, 1)
    with World(target, small=toy_head(target, layers=(0, 1)), medium=target, num_rows=100, max_model_len=60) as world:
        for prompt in texts(12, seed=9, length=30):
            assert world.run(prompt, "treegraft", max_tokens=12).tokens == greedy_reference(target, prompt, 12)
        assert all(isinstance(world.drafters[name], CausalLMDrafter | HeadDrafter) for name in ("small", "medium"))
        assert world.lm.pool.num_free < 30
