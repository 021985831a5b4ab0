"""The promise: with any schedule and any drafter the engine writes what the target alone would have written."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from scipy.stats import chi2
from transformers import PreTrainedModel

from tests.engine_world import World, greedy_reference, self_draft_chain

TinyModel = Callable[..., PreTrainedModel]

SCHEDULES = ("ar", "ngram", "small", "medium", "talon", "treegraft")
VOCAB = 40  # small enough for repetitions, so that n-gram drafts are accepted now and then


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30))] for _ in range(count)]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma"])
def test_greedy_text_is_that_of_transformers_for_every_family(tiny_model: TinyModel, family: str) -> None:
    """A family's own quirk (norms, biases, scaled embeddings) that our attention or cache missed would change the text."""
    target = tiny_model(family, VOCAB, 1)
    with World(target, small=tiny_model("llama", VOCAB, 2), medium=target) as world:
        for prompt in prompts(3):
            want = greedy_reference(target, prompt, 40)
            assert world.run(prompt, "treegraft", max_tokens=40).tokens == want


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("drafters", ["hostile", "self", "grafted"])
def test_greedy_text_is_that_of_transformers(tiny_model: TinyModel, schedule: str, drafters: str) -> None:
    """Hostile drafters: every rollback. The target as its own drafter: every multi-token commit. A hostile small under a
    perfect medium: the accepted path is scattered over grafted branches. Alone and eight at once."""
    target, hostile = tiny_model("llama", VOCAB, 1), tiny_model("llama", VOCAB, 9)
    small = target if drafters == "self" else hostile
    medium = hostile if drafters == "hostile" else target
    with World(target, small=small, medium=medium) as world:
        asked = prompts(8, seed=3)
        wanted = [greedy_reference(target, prompt, 48) for prompt in asked]
        alone = [world.run(prompt, schedule, max_tokens=48) for prompt in asked]
        together = world.run_all(asked, schedule, max_tokens=48)
    assert [reply.tokens for reply in alone] == wanted
    assert [reply.tokens for reply in together] == wanted
    if drafters == "grafted" and schedule == "treegraft":
        assert sum(reply.stats.num_grafts for reply in alone) > 0
        assert sum(reply.stats.drafters["medium"].accepted for reply in alone) > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_target_as_its_own_chain_drafter_is_nearly_always_accepted(tiny_model: TinyModel, temperature: float) -> None:
    """At T=0 each drafted token is the target's choice; less than 99 % means drafter and target disagree about the context.

    At T=1 a greedy chain is accepted as often as the target samples its own best token, so only T=0 has this bar.
    """
    target = tiny_model("llama", VOCAB, 1)
    with World(target, medium=target, schedules=[self_draft_chain(5)]) as world:
        replies = [world.run(p, "chain", max_tokens=120, temperature=temperature, seed=5) for p in prompts(4, seed=8)]
    accepted = sum(reply.stats.num_accepted for reply in replies)
    drafted = sum(reply.stats.num_drafted for reply in replies)
    if temperature == 0.0:
        assert accepted >= 0.99 * drafted
    assert 0 < accepted <= drafted


def test_acceptance_does_not_decay_over_a_long_text_and_many_requests(tiny_model: TinyModel) -> None:
    """A drafter cache that is not rolled back exactly shows only as a drafter that gets worse: the target hides it."""
    target = tiny_model("llama", VOCAB, 1, max_positions=2400)
    with World(target, medium=target, schedules=[self_draft_chain(5)], num_rows=8000, max_model_len=2400) as world:
        long = world.run([1, 2, 3], "chain", max_tokens=2000).stats
        many = [world.run(p, "chain", max_tokens=12).stats for p in prompts(200, seed=2)]
    tail = slice(-len(long.drafted) // 10, None)
    assert sum(long.accepted[tail]) >= 0.98 * sum(long.drafted[tail])
    last = many[-20:]
    assert sum(s.num_accepted for s in last) >= 0.98 * sum(s.num_drafted for s in last)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_seed_gives_the_same_text_with_every_schedule_alone_and_under_load(tiny_model: TinyModel, schedule: str) -> None:
    """Random numbers belong to (seed, position): batch mates, tree shapes and schedules must not shift them."""
    target = tiny_model("llama", VOCAB, 1)
    with World(target, small=tiny_model("llama", VOCAB, 4), medium=target) as world:
        plain = [world.run(p, "ar", temperature=1.0, seed=i).tokens for i, p in enumerate(prompts(6, seed=1))]
        again = [world.run(p, schedule, temperature=1.0, seed=i).tokens for i, p in enumerate(prompts(6, seed=1))]
        crowd = [world.submit(p, "treegraft", temperature=1.3, seed=99) for p in prompts(8, seed=30)]
        loaded = [
            world.submit(p, schedule, temperature=1.0, seed=i) for i, p in enumerate(prompts(6, seed=1))
        ]
        assert [pending.result().tokens for pending in loaded] == plain
        for pending in crowd:
            pending.result()
        different = {tuple(world.run([5], schedule, temperature=1.0, seed=s).tokens) for s in range(5)}
    assert again == plain
    assert len(different) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_law_of_two_sampled_tokens_is_the_targets(tiny_model: TinyModel, schedule: str) -> None:
    """Chi-square of 2,000 two-token answers against exact enumeration; false alarm 0.001 per schedule, seeds fixed."""
    vocab, count, prompt = 5, 2000, [3]  # of one token, so that the first step drafts already
    target = tiny_model("llama", vocab, 6)
    law = _two_token_law(target, prompt)
    small, medium = tiny_model("llama", vocab, 7), tiny_model("llama", vocab, 8)
    with World(target, small=small, medium=medium, budget=8) as world:
        seen = Counter()
        for start in range(0, count, 50):
            waiting = [
                world.submit(prompt, schedule, temperature=1.0, seed=1000 + start + i, max_tokens=2) for i in range(50)
            ]
            seen.update(tuple(pending.result().tokens) for pending in waiting)
    statistic = sum((seen[pair] - count * p) ** 2 / (count * p) for pair, p in law.items())
    assert set(seen) <= set(law)
    assert chi2.sf(statistic, len(law) - 1) > 0.001, f"{schedule}: chi-square {statistic:.1f} over {len(law)} cells"


def test_the_law_test_notices_a_wrong_temperature(tiny_model: TinyModel) -> None:
    """Negative control: the same statistic over text sampled at T=1.5 is far beyond the bar."""
    vocab, count, prompt = 5, 600, [1, 3]
    target = tiny_model("llama", vocab, 6)
    law = _two_token_law(target, prompt)
    with World(target) as world:
        waiting = [world.submit(prompt, "ar", temperature=1.5, seed=i, max_tokens=2) for i in range(70)]
        seen = Counter(tuple(p.result().tokens) for p in waiting)
        for start in range(70, count, 70):
            waiting = [world.submit(prompt, "ar", temperature=1.5, seed=start + i, max_tokens=2) for i in range(70)]
            seen.update(tuple(p.result().tokens) for p in waiting)
    total = sum(seen.values())
    statistic = sum((seen[pair] - total * p) ** 2 / (total * p) for pair, p in law.items())
    assert chi2.sf(statistic, len(law) - 1) < 1e-6


def _two_token_law(model: PreTrainedModel, prompt: list[int]) -> dict[tuple[int, int], float]:
    with torch.inference_mode():
        def row(ids: list[int]) -> list[float]:
            return [float(p) for p in torch.softmax(model(torch.tensor([ids])).logits[0, -1].double(), -1)]

        first = row(prompt)
        law = {
            (a, b): first[a] * second
            for a in range(len(first))
            for b, second in enumerate(row([*prompt, a]))
        }
    assert math.isclose(sum(law.values()), 1.0, rel_tol=1e-9)
    return law


def test_switching_schedules_between_requests_changes_nothing(tiny_model: TinyModel) -> None:
    """Mixed schedules in one batch: each sequence has its own plan, and an unspeculated one drafts nothing."""
    target = tiny_model("llama", VOCAB, 1)
    with World(target, small=tiny_model("llama", VOCAB, 4), medium=target) as world:
        asked = prompts(24, seed=5)
        wanted = [greedy_reference(target, prompt, 24) for prompt in asked]
        waiting = [
            world.submit(prompt, schedule) for prompt, schedule in zip(asked, itertools.cycle(SCHEDULES), strict=False)
        ]
        replies = [pending.result() for pending in waiting]
    assert [reply.tokens for reply in replies] == wanted
    for reply in replies:
        if reply.stats.schedule == "ar":
            assert reply.stats.num_drafted == 0 and set(reply.creators) == {"target"}
    assert sum(r.stats.num_accepted for r in replies if r.stats.schedule == "medium") > 0
