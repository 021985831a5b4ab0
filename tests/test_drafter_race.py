"""Drafters that enter the target's race: what a token's chance is, that guesses get better, and that no text changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

import engine.noise
from drafters.base import DraftRequest
from drafters.ngram import NgramDrafter
from drafters.race import chance_to_win, race_log_probs
from engine.noise import TargetNoise
from engine.sequence import Sequence as TokenSequence
from models.draft_vocab import DraftVocab
from scheduler.schedule import Action, Schedule, Word
from tests.engine_world import World
from tests.toy_heads import tail_head
from tree.growth import Answer, Ask
from tree.policies.sampled import Iid
from tree.tree import TokenTree
from verify.walk import race

TinyModel = Callable[..., PreTrainedModel]

PROMPT = "one two three one two"
SCHEDULES = ("ngram", "small", "medium", "chain-medium", "talon", "adaptive", "treegraft")


# ---- a token's chance -----------------------------------------------------------------------------------------------


def test_a_chance_is_the_part_of_the_speed() -> None:
    """Golden: 0.6/3 : 0.3/1 : 0.1/0.5 = 2 : 3 : 2; what the drafter excludes cannot win; a NaN stays visible."""
    q = torch.tensor([[0.6, 0.3, 0.1, 0.0], [math.nan, 0.5, 0.5, 0.0]])
    found = race_log_probs(q, torch.tensor([[3.0, 1.0, 0.5, 1e-9], [1.0, 1.0, 1.0, 1.0]]))
    assert found[0, :3].exp().tolist() == pytest.approx([2 / 7, 3 / 7, 2 / 7]) and found[0, 3] == -math.inf
    assert found[1].isnan().any()


@given(st.lists(st.floats(0.01, 1.0), min_size=2, max_size=9), st.integers(0, 10**6))
def test_the_best_guess_wins_where_the_drafter_is_right(weights: list[float], seed: int) -> None:
    """The first candidate is the winner of the target's own race, whenever q is p; and chances sum to one."""
    q = torch.tensor([weights]) / sum(weights)
    exponentials = TargetNoise(seed, 0).exponentials(0, len(weights))[None]
    found = race_log_probs(q, exponentials)
    assert int(found.argmax()) == int(race(q, exponentials)) and float(found.exp().sum()) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("chance", [0.9, 0.5, 0.1, 0.01])
def test_over_all_numbers_a_token_wins_as_often_as_it_is_likely(chance: float) -> None:
    """The chance given the number, averaged over numbers, is the chance; and it falls with the number."""
    at = np.linspace(0, 40, 400_001)
    win = np.exp([chance_to_win(chance, value) for value in at])
    assert np.trapezoid(win * np.exp(-at), at) == pytest.approx(chance, rel=1e-3)
    assert np.all(np.diff(win) <= 0) and chance_to_win(0.0, 1.0) == -math.inf


def test_lookups_are_scored_by_the_number_of_their_token() -> None:
    """Also the tokens of a chain, each by the numbers of its own position."""
    drafter = NgramDrafter()
    text = [1, 2, 3, 4, 1, 2]

    def ask(race: Callable[[int, int], torch.Tensor] | None) -> Answer:
        request = DraftRequest(drafter.open(), text, TokenTree(2), Ask((0,), 1), race=race)
        (answer,) = drafter.propose([request])
        assert isinstance(answer, Answer)
        return answer

    noise = TargetNoise(5, 7)
    plain, raced = ask(None).candidates[0], ask(noise.exponentials).candidates[0]
    assert plain.tokens == raced.tokens == (3,)
    chains = [[(plain.tokens[0], plain.lps[0]), *plain.suffixes[0]], [(raced.tokens[0], raced.lps[0]), *raced.suffixes[0]]]
    assert [token for token, _ in chains[0]] == [token for token, _ in chains[1]] and len(chains[0]) >= 3
    for depth, ((token, likely), (_, score)) in enumerate(zip(*chains, strict=True)):
        number = float(noise.exponentials(depth, 9)[token])
        assert score == pytest.approx(chance_to_win(math.exp(likely), number))


def test_a_vocabulary_of_ones_own_goes_there_and_back() -> None:
    """Columns in an order of their own, over a larger vocabulary."""
    vocab = DraftVocab([4, 0, 2], torch.device("cpu"))
    rows = torch.tensor([[0.5, 0.3, 0.2]])
    spread = vocab.spread(rows, 6)
    assert spread.tolist() == [pytest.approx([0.3, 0, 0.2, 0, 0.5, 0])]
    assert torch.equal(vocab.known(spread), rows) and [vocab.columns[token] for token in vocab.ids] == [0, 1, 2]


# ---- in the engine --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lm", "head"])
def test_no_text_changes_and_more_is_accepted(kind: str, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every schedule writes plain decoding's text for its seed, with the race and without; with it more guesses are right."""
    target = tiny_model("llama", 259, 6)
    medium = tiny_model("llama", 259, 6) if kind == "lm" else tail_head(target, num_draft=120)
    accepted = {}
    for is_raced in (True, False):
        if not is_raced:
            monkeypatch.setattr(TokenSequence, "is_raced", False)
        with World(target, small=tiny_model("llama", 259, 7), medium=medium) as world:
            for seed in range(3):
                options = {"temperature": 0.8, "seed": seed, "max_tokens": 40}
                plain = world.run(PROMPT, "ar", **options)
                for schedule in SCHEDULES:
                    reply = world.run(PROMPT, schedule, **options)
                    assert reply.tokens == plain.tokens, (schedule, seed)
                    accepted[schedule, is_raced] = accepted.get((schedule, is_raced), 0) + reply.stats.num_accepted
    for schedule in ("chain-medium", "talon", "treegraft"):
        assert accepted[schedule, True] > accepted[schedule, False], accepted
    if kind == "lm":  # the drafter is the target: of forty tokens only those that a step's last position adds are not guessed
        assert accepted["chain-medium", True] > 2 * accepted["chain-medium", False]


class Overhears(NgramDrafter):
    """Lookup that writes down what it was told of the race."""

    def __init__(self) -> None:
        super().__init__()
        self.races: list[bool] = []

    def propose(self, requests: Sequence[DraftRequest]) -> list[Answer]:  # type: ignore[override]
        self.races += [request.race is not None for request in requests]
        return super().propose(requests)  # type: ignore[return-value]


def test_only_a_rule_that_draws_from_the_target_alone_shows_its_numbers(tiny_model: TinyModel) -> None:
    """Not to ratio rules, whose law needs drafts that do not know them; and there are none at temperature 0."""
    target = tiny_model("llama", 259, 6)
    rules = ("walk", "naive", "specinfer", "spectr", "khisti", "traversal")
    schedules = [
        Schedule(rule, "test", Iid(2, 2), Word("S*"), {Action.SMALL: "small"}, sampling_verifier=rule) for rule in rules
    ]
    with World(target, small=Overhears(), schedules=schedules) as world:
        drafter = world.drafters["small"]
        assert isinstance(drafter, Overhears)
        told = {}
        for rule in rules:
            for temperature in (0.0, 1.0):
                drafter.races.clear()
                world.run(PROMPT, rule, temperature=temperature, max_tokens=6)
                (told[rule, temperature],) = set(drafter.races)
    assert [key for key, is_told in told.items() if is_told] == [("walk", 1.0)]


def test_numbers_are_made_once_for_drafts_and_target(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vector per output position, whoever asks for it first, and none is kept for positions that are written."""
    made: list[tuple[int, int]] = []
    exact = engine.noise.random_exponentials

    def counted(seed: int, position: int, purpose: str, size: int) -> torch.Tensor:
        made.append((position, size))
        return exact(seed, position, purpose, size)

    monkeypatch.setattr(engine.noise, "random_exponentials", counted)
    kept: list[int] = []
    commit = engine.settle.commit  # type: ignore[attr-defined]

    def watched(scored, verdict, pool, drafters):  # type: ignore[no-untyped-def]
        kept.append(len(scored.draft.sequence.exponentials))
        return commit(scored, verdict, pool, drafters)

    monkeypatch.setattr("engine.settle.commit", watched)
    target = tiny_model("llama", 259, 6)
    with World(target, small=tiny_model("llama", 259, 7), medium=tiny_model("llama", 259, 6)) as world:
        reply = world.run(PROMPT, "treegraft", temperature=1.0, max_tokens=40)
        width = world.lm.vocab_size
    positions = [position for position, _ in made]
    assert len(positions) == len(set(positions)) and max(positions) < 40 and {size for _, size in made} == {width}
    assert set(range(40)) >= set(positions) >= set(range(39)) and len(reply.tokens) == 40
    assert max(kept) <= 12, "the depth of a tree, not the length of the answer"
