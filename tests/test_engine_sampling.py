"""Parameters of sampling through the engine: every schedule writes what one token at a time would have been."""

from __future__ import annotations

import queue
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from transformers import PreTrainedModel

import engine.decide
import engine.sequence
from engine.adjust import Tally, adjusted
from engine.noise import TargetNoise
from engine.request import Delta, FinishReason, Request
from models.sampling import SamplingParams, probabilities
from scheduler.schedule import Action, Schedule, Word
from tests.engine_world import Pending, Reply, World
from tests.plain_adjust import plain_adjust
from tree.policies.sampled import Iid
from verify.walk import race

TinyModel = Callable[..., PreTrainedModel]

SCHEDULES = ("ar", "ngram", "small", "medium", "talon", "treegraft")
VOCAB, LENGTH = 40, 24

PARAMETERS: dict[str, dict[str, Any]] = {
    "min_p": {"min_p": 0.3},
    "presence": {"presence_penalty": 1.0},
    "frequency": {"frequency_penalty": 0.6},
    "negative": {"frequency_penalty": -0.3, "presence_penalty": -1.0},
    "repetition": {"repetition_penalty": 1.4},
    "bias": {"logit_bias": {3: 4.0, 5: -100.0, 11: 1.5}},
    "all": {
        "min_p": 0.05,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
        "logit_bias": {3: 2.0, 5: -100.0},
        "top_k": 20,
        "top_p": 0.95,
    },
}
PENALTIES = ("presence", "frequency", "repetition", "all")


def prompts(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randrange(2, 20))] for _ in range(count)]


def submit(
    world: World, prompt: list[int], schedule: str, sampling: SamplingParams, max_tokens: int = LENGTH
) -> Pending:
    deltas: queue.Queue[Delta] = queue.Queue()
    name = f"{schedule}-{prompt}-{random.random()}"
    world.engine.submit(Request(name, tuple(prompt), sampling, max_tokens, deltas.put, schedule=schedule))
    return Pending(name, deltas)


def run(world: World, prompt: list[int], schedule: str, sampling: SamplingParams) -> Reply:
    return submit(world, prompt, schedule, sampling).result()


def one_at_a_time(model: PreTrainedModel, prompt: list[int], sampling: SamplingParams) -> list[int]:
    """transformers' logits of the whole text for each token anew; no cache, no tree, plain penalties."""
    answer: list[int] = []
    for position in range(LENGTH):
        row = _row(model, prompt, answer, sampling)
        noise = TargetNoise(sampling.seed, position).exponentials(0, VOCAB)
        answer.append(int(row.argmax()) if sampling.greedy else int(race(row, noise)))
    return answer


def _row(model: PreTrainedModel, prompt: list[int], answer: list[int], sampling: SamplingParams) -> torch.Tensor:
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0, -1].tolist()
    return probabilities(torch.tensor([plain_adjust(logits, sampling, prompt, answer)]), sampling)[0]


def _with_the_roots_history(
    logits: torch.Tensor, params: SamplingParams, tally: Tally, paths: Sequence[Sequence[int]]
) -> torch.Tensor:
    return adjusted(logits, params, tally, [()] * len(paths))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", PARAMETERS)
def test_text_is_that_of_one_token_at_a_time(tiny_model: TinyModel, name: str, temperature: float) -> None:
    """A node judged by another history than its own path changes the text as soon as two tokens are accepted at once."""
    target, hostile = tiny_model("llama", VOCAB, 1), tiny_model("llama", VOCAB, 9)
    asked = [(p, SamplingParams(temperature=temperature, seed=i, **PARAMETERS[name])) for i, p in enumerate(prompts(2, 4))]
    wanted = [one_at_a_time(target, *question) for question in asked]
    plain = [one_at_a_time(target, p, SamplingParams(temperature=temperature, seed=i)) for i, (p, _) in enumerate(asked)]
    if not (name == "min_p" and temperature == 0.0):
        assert wanted != plain, "the parameter changes nothing here, so nothing is tested"
    with World(target, small=hostile, medium=target) as world:
        waiting = {s: [submit(world, p, s, sampling) for p, sampling in asked] for s in SCHEDULES}
        replies = {schedule: [pending.result() for pending in pendings] for schedule, pendings in waiting.items()}
    for schedule, answers in replies.items():
        assert [reply.tokens for reply in answers] == wanted, schedule
    for schedule in ("medium", "talon", "treegraft"):
        assert sum(reply.stats.num_accepted for reply in replies[schedule]) > 0, f"{schedule} accepted nothing"


@pytest.mark.parametrize("name", PENALTIES)
def test_one_history_for_all_nodes_would_be_noticed(
    tiny_model: TinyModel, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: with the root's history at every node the same comparison fails."""
    monkeypatch.setattr(engine.decide, "adjusted", _with_the_roots_history)
    target = tiny_model("llama", VOCAB, 1)
    differs = 0
    with World(target, medium=target) as world:
        for prompt in prompts(3, 4):
            sampling = SamplingParams(temperature=0.0, **PARAMETERS[name])
            assert run(world, prompt, "ar", sampling).tokens == one_at_a_time(target, prompt, sampling)
            differs += run(world, prompt, "medium", sampling).tokens != one_at_a_time(target, prompt, sampling)
    assert differs > 0


@pytest.mark.parametrize("history", ["own", "root"])
def test_ratio_rules_on_sampled_trees_keep_the_penalized_law(
    tiny_model: TinyModel, history: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chi-square of 480 answers of three tokens against enumeration, seeds fixed; false alarm 0.001.

    Negative control: with the root's history at every node the same statistic is far beyond the bar.
    """
    vocab, length, prompt = 3, 3, [1]
    penalties = {"frequency_penalty": 1.5, "repetition_penalty": 1.5}
    target, medium = tiny_model("llama", vocab, 6), tiny_model("llama", vocab, 7)
    law = {(): 1.0}
    for _ in range(length):
        law = {
            (*text, token): p * q
            for text, p in law.items()
            for token, q in enumerate(_row(target, prompt, list(text), SamplingParams(**penalties)).tolist())
        }
    if history == "root":
        monkeypatch.setattr(engine.decide, "adjusted", _with_the_roots_history)
    drawn = Schedule(
        "drawn", "test", Iid(2, 2), Word("M*"), {Action.MEDIUM: "medium"}, sampling_verifier="traversal"
    )
    seen: Counter[tuple[int, ...]] = Counter()
    with World(target, medium=medium, schedules=[drawn]) as world:
        for start in range(0, 480, 60):
            params = [SamplingParams(seed=start + i, **penalties) for i in range(60)]
            waiting = [submit(world, prompt, "drawn", sampling, length) for sampling in params]
            seen.update(tuple(pending.result().tokens) for pending in waiting)
    statistic = sum((seen[text] - 480 * p) ** 2 / (480 * p) for text, p in law.items())
    p_value = chi2.sf(statistic, len(law) - 1)
    assert p_value > 0.001 if history == "own" else p_value < 1e-6, f"p = {p_value:.2g}"


def test_a_banned_token_never_appears(tiny_model: TinyModel) -> None:
    """Not at any position of a tree, and not only in the token that the target adds."""
    target = tiny_model("llama", VOCAB, 1)
    with World(target, medium=target) as world:
        for prompt in prompts(3, 6):
            usual = run(world, prompt, "medium", SamplingParams(temperature=0.0)).tokens
            banned = SamplingParams(temperature=0.0, logit_bias=dict.fromkeys(usual, -100.0))
            assert not set(run(world, prompt, "medium", banned).tokens) & set(usual)
            only = SamplingParams(logit_bias={7: 100.0}, repetition_penalty=1.5)
            assert run(world, prompt, "treegraft", only).tokens == [7] * LENGTH


def test_requests_without_penalties_pay_nothing(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The common case: no counting, no copy of the logits."""

    def never(*_: object) -> None:
        raise AssertionError("adjusted for nothing")

    monkeypatch.setattr(engine.decide, "adjusted", never)
    monkeypatch.setattr(engine.sequence.Sequence, "tallied", never)
    target = tiny_model("llama", VOCAB, 1)
    with World(target, medium=target) as world:
        for sampling in (SamplingParams(temperature=0.0), SamplingParams(min_p=0.2, top_k=5, top_p=0.9)):
            assert run(world, [1, 2, 3], "medium", sampling).finish is FinishReason.LENGTH


def test_neighbors_keep_their_own_parameters(tiny_model: TinyModel) -> None:
    """In one batch each sequence counts its own text; a shared table would punish one for another's words."""
    target = tiny_model("llama", VOCAB, 1)
    with World(target, medium=target) as world:
        asked = [
            (prompt, SamplingParams(temperature=1.0, seed=7, **options))
            for prompt, options in zip(prompts(7, 8), PARAMETERS.values(), strict=True)
        ]
        alone = [run(world, prompt, "medium", sampling).tokens for prompt, sampling in asked]
        waiting = [submit(world, prompt, "medium", sampling) for prompt, sampling in asked]
        assert [pending.result().tokens for pending in waiting] == alone
