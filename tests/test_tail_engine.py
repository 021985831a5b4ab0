"""Heads on the target's own cache in the engine: whatever they say the text stays the target's, and their rows come back."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from drafters.base import DraftRequest, Halt
from drafters.tail import Tail, TailDrafter
from engine.admission import Limits
from engine.request import FinishReason
from models.draft_head import DraftHead
from models.tail_lm import TailLM
from tests.engine_world import World, greedy_reference, self_draft_chain
from tests.head_oracle import ComparesAnswers
from tests.toy_heads import forgetful_below, knowing_tail, tail_head, toy_head
from tree.growth import Answer

TinyModel = Callable[..., PreTrainedModel]
VOCAB = 40
SCHEDULES = ("ar", "ngram", "small", "medium", "talon", "treegraft")
SHORT_CHUNKS = Limits(prefill_chunk=8)


def prompts(count: int, seed: int = 0, longest: int = 30) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


class Moved(TailDrafter):
    """A tail drafter made before its world, whose target's cache it gets once there is one."""

    def __init__(self, name: str, head: DraftHead, target: PreTrainedModel, *, num_rows: int = 2000) -> None:
        self.name, self.head, self.target, self.num_rows = name, head, target, num_rows
        self.layers = head.config.target_layers

    def settle(self, world: World) -> None:
        """Before the engine is asked anything."""
        embedding = self.target.get_input_embeddings().weight.detach()
        self.lm = TailLM(self.head, embedding, world.lm.pool, num_rows=self.num_rows)


class Checked(ComparesAnswers, Moved):
    """A head whose every answer is compared with the oracle."""

    def __init__(self, name: str, head: DraftHead, target: PreTrainedModel) -> None:
        super().__init__(name, head, target)
        self.watch(head, target)


@pytest.mark.parametrize("role", ["small", "medium", "both", "beside another head"])
def test_greedy_text_is_the_targets_with_tail_heads_in_any_role(tiny_model: TinyModel, role: str) -> None:
    """Every schedule, alone and four at once, prompts of one token and of several chunks; all rows are given back."""
    target = tiny_model("llama", VOCAB, 1, layers=4)
    small: Any = tail_head(target, num_draft=25) if role != "medium" else tiny_model("llama", VOCAB, 9)
    medium: Any = tail_head(target, num_layers=2, seed=1) if role != "small" else target
    if role == "beside another head":
        small = toy_head(target, "add", num_draft=25)
    asked = [[7], *prompts(3, seed=3)]
    wanted = [greedy_reference(target, prompt, 10) for prompt in asked]
    with World(target, small=small, medium=medium, limits=SHORT_CHUNKS, budget=8) as world:
        for schedule in SCHEDULES:
            alone = world.run(asked[1], schedule, max_tokens=10)
            together = world.run_all(asked, schedule, max_tokens=10)
            assert alone.tokens == wanted[1], schedule
            assert [reply.tokens for reply in together] == wanted, schedule
            assert not any(reply.stats.halts for reply in [alone, *together]), schedule
            for name in set(world.schedules[schedule].drafters.values()) - {"ngram"}:
                assert all(reply.stats.drafters[name].forwards for reply in together), f"{name} was not asked in {schedule}"


@pytest.mark.parametrize("num_layers", [1, 2])
def test_in_the_engine_every_answer_is_that_of_the_oracle(tiny_model: TinyModel, num_layers: int) -> None:
    """Chunked prompts, accepted paths of the small drafter, two requests at once.

    A cache row or a hidden state of the wrong token never changes the text: only this comparison shows it.
    """
    target = tiny_model("llama", VOCAB, 1, layers=4)
    checked = Checked("medium", tail_head(target, num_layers=num_layers), target)
    world = World(target, small=target, medium=checked, limits=SHORT_CHUNKS, word="SSM", budget=8)
    checked.settle(world)
    with world:
        replies = world.run_all([[3], list(range(20))], "treegraft", max_tokens=11)
    assert all(not reply.stats.halts for reply in replies), replies[0].stats.halts
    longest = max(len(delta.token_ids) for reply in replies for delta in reply.deltas)
    assert longest > 2, "no path of several nodes was accepted"
    assert checked.compared > 200
    assert checked.wrong < 1e-3


@pytest.mark.parametrize("flaw", ["hidden", "rows"])
def test_hidden_states_and_rows_of_the_wrong_tokens_are_seen(tiny_model: TinyModel, flaw: str) -> None:
    """Negative control of the comparison above: the newest hidden state, or a row of the cache, is another token's."""

    class Confused(Checked):
        def observe(self, state: Tail, start: int, hidden: torch.Tensor) -> None:
            super().observe(state, start, hidden.flip(0) if flaw == "hidden" else hidden)

        def propose(self, requests: Sequence[DraftRequest]) -> list[Answer | Halt]:
            if flaw == "rows":
                requests = [replace(request, target_rows=self._confused(request.target_rows)) for request in requests]
            return super().propose(requests)

        def _confused(self, rows: np.ndarray) -> np.ndarray:
            """The newest token's row twice and the oldest one's not at all; a mere exchange would change nothing."""
            return np.concatenate((rows[1:], rows[-1:]))

    target = tiny_model("llama", VOCAB, 1, layers=4)
    confused = Confused("medium", tail_head(target), target)
    world = World(target, small=target, medium=confused, word="SSM", budget=8)
    confused.settle(world)
    with world:
        reply = world.run([3, 4, 5, 6], "treegraft", max_tokens=9)
    assert reply.tokens == greedy_reference(target, [3, 4, 5, 6], 9), "the text is the target's in any case"
    assert confused.wrong > 0.1


def test_a_seed_gives_the_same_text_with_tail_heads_as_without(tiny_model: TinyModel) -> None:
    """At temperature 1 random numbers belong to (seed, position), whatever a head drafts."""
    target = tiny_model("llama", VOCAB, 1, layers=4)
    asked = list(enumerate(prompts(4, seed=1)))
    small, medium = tail_head(target), tail_head(target, num_layers=2, seed=2)
    with World(target, small=small, medium=medium, budget=8) as world:
        plain = [world.run(p, "ar", temperature=1.0, seed=i, max_tokens=12).tokens for i, p in asked]
        for schedule in SCHEDULES[2:]:
            pending = [world.submit(p, schedule, temperature=1.0, seed=i, max_tokens=12) for i, p in asked]
            assert [waiting.result().tokens for waiting in pending] == plain, schedule


@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_head_that_is_the_targets_last_layers_is_accepted_over_a_long_text(num_layers: int) -> None:
    """Rows of the wrong tokens, or entries that stay, show only as a head that gets worse: this one has to stay perfect."""
    target = forgetful_below(num_layers, vocab=VOCAB, seed=3)
    with World(target, medium=knowing_tail(target, num_layers), schedules=[self_draft_chain(5)], num_rows=4000) as world:
        long = world.run([1, 2, 3], "chain", max_tokens=150)
        many = world.run_all(prompts(6, seed=2), "chain", max_tokens=30)
    for reply in [long, *many]:
        assert reply.stats.num_accepted >= 0.99 * reply.stats.num_drafted > 0
    assert long.stats.num_steps <= 27, "six tokens per step"
    assert long.tokens == greedy_reference(target, [1, 2, 3], 150)


class Failing(Moved):
    """A head that raises at its `fail_at`-th call of one method."""

    def __init__(self, where: str, fail_at: int, head: DraftHead, target: PreTrainedModel) -> None:
        super().__init__("medium", head, target)
        self.where, self.left = where, fail_at

    def observe(self, state: Tail, start: int, hidden: torch.Tensor) -> None:
        self._maybe("observe")
        super().observe(state, start, hidden)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Answer | Halt]:
        self._maybe("propose")
        return super().propose(requests)

    def commit(self, state: Tail, context: Sequence[int], tree: Any, path: Sequence[int]) -> None:
        if tree is not None:  # not when it is closed
            self._maybe("commit")
        super().commit(state, context, tree, path)

    def _maybe(self, where: str) -> None:
        if self.where == where:
            self.left -= 1
            if self.left < 0:
                raise RuntimeError("out of luck")


@pytest.mark.parametrize("where", ["observe", "propose", "commit"])
@pytest.mark.parametrize("fail_at", [0, 1, 6])
def test_a_head_that_raises_is_given_up_and_the_answer_goes_on(
    tiny_model: TinyModel, where: str, fail_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    """At once, in the middle of a prompt, and in the middle of an answer; its rows come back, the reason is counted."""
    target = tiny_model("llama", VOCAB, 1, layers=4)
    failing = Failing(where, fail_at, tail_head(target), target)
    world = World(target, medium=failing, limits=SHORT_CHUNKS)
    failing.settle(world)
    with world:
        asked = [[2], list(range(30))]
        replies = world.run_all(asked, "treegraft", max_tokens=20)
        assert failing.lm.pool.num_used == 0
    for prompt, reply in zip(asked, replies, strict=True):
        assert reply.tokens == greedy_reference(target, prompt, 20)
        assert reply.stats.halts == {"medium": "error"}
    assert "out of luck" in caplog.text


def test_a_head_with_a_shorter_context_stops_and_the_answer_goes_on(tiny_model: TinyModel) -> None:
    """Heads are often trained on shorter texts than their target."""
    target = tiny_model("llama", VOCAB, 1, layers=4)
    with World(target, medium=tail_head(target, max_positions=24)) as world:
        reply = world.run([1, 2, 3], "medium", max_tokens=60)
        assert world.drafters["medium"].lm.pool.num_used == 0
    assert reply.tokens == greedy_reference(target, [1, 2, 3], 60)
    assert reply.stats.halts == {"medium": "context"}
    assert reply.stats.drafters["medium"].drafted > 0


def test_heads_without_rows_for_all_stop_for_some(tiny_model: TinyModel) -> None:
    """A pool that is too small is a matter of speed, not of answers."""
    target = tiny_model("llama", VOCAB, 1, layers=4)
    moved = Moved("medium", tail_head(target), target, num_rows=9)
    world = World(target, medium=moved)
    moved.settle(world)
    with world:
        asked = prompts(4, seed=6)
        replies = world.run_all(asked, "medium", max_tokens=20)
    assert [reply.tokens for reply in replies] == [greedy_reference(target, prompt, 20) for prompt in asked]
    assert "rows" in {reason for reply in replies for reason in reply.stats.halts.values()}


def test_requests_that_come_and_go_leave_no_row_behind(tiny_model: TinyModel) -> None:
    """Short, long, stopped and given up, more than run at once; what is left of them is the right beginning of a text."""
    target = tiny_model("llama", VOCAB, 1, layers=4)
    rng = random.Random(7)
    asked = prompts(14, seed=8)
    whole = [greedy_reference(target, prompt, 40, stop_tokens=[11]) for prompt in asked]
    limits = Limits(max_num_seqs=4, prefill_chunk=8)
    small, medium = tail_head(target, num_layers=2), tail_head(target, seed=5)
    with World(target, small=small, medium=medium, limits=limits, budget=8, stop_tokens=[11]) as world:
        pending, heard = [], {}
        for index, prompt in enumerate(asked):
            pending.append(world.submit(prompt, rng.choice(SCHEDULES[2:]), max_tokens=40))
            if index % 3 == 2:
                heard[index - 2] = [pending[-3].next()]  # it has begun
                world.engine.abort(pending[-3].id)
        replies = [waiting.result(before=heard.get(index, ())) for index, waiting in enumerate(pending)]
        for name in ("small", "medium"):
            pool = world.drafters[name].lm.pool  # type: ignore[attr-defined]
            assert pool.num_used == 0, f"{name} still holds {pool.num_used} rows"
            pool.check()
    ends = {reply.finish for reply in replies}
    assert ends == {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT}
    for reply, wanted in zip(replies, whole, strict=True):
        tokens = reply.tokens
        assert tokens == wanted[: len(tokens)] and not reply.stats.halts
        assert reply.finish == FinishReason.ABORT or len(tokens) >= len(wanted) - 1, "the end token may be left out"
