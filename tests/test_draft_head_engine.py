"""Draft heads in the engine: what they hear is what the target thought, and whatever they say the text stays the target's."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from transformers import PreTrainedModel

import drafters.draft_head
from drafters.base import DraftRequest, Halt
from drafters.draft_head import HeadDrafter, Heard
from engine.admission import Limits
from models import toy
from models.draft_head import DraftHead
from models.head_lm import HeadLM
from tests.engine_world import World, greedy_reference, self_draft_chain
from tests.head_oracle import ComparesAnswers
from tests.toy_heads import Combine, toy_head
from tree.growth import Answer

TinyModel = Callable[..., PreTrainedModel]
VOCAB = 40
SCHEDULES = ("ar", "ngram", "small", "medium", "talon", "treegraft")
SHORT_CHUNKS = Limits(prefill_chunk=8)


def prompts(count: int, seed: int = 0, longest: int = 30) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


def forgetful(seed: int) -> PreTrainedModel:
    """A target whose next token depends on the last one alone: a head can know it perfectly."""
    target = toy.tiny_causal_lm("llama", VOCAB, seed, layers=4)
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return target


def all_knowing(target: PreTrainedModel) -> DraftHead:
    """The head of a forgetful target that repeats its one matrix; what it feeds back to itself is as good as nothing."""
    head = toy_head(target, "add", norm_fed_back=True)
    head.config = type(head.config).from_dict({**head.config.to_dict(), "rms_norm_eps": target.config.rms_norm_eps})
    for name, weight in head.named_parameters():
        if name in ("fuse_proj.weight", "layers.0.o_proj.weight", "layers.0.down_proj.weight"):
            weight.zero_()
    head.embed_proj.weight.copy_(torch.eye(len(head.norm)))
    head.norm.copy_(1e-5 * target.model.norm.weight)
    head.output.weight.copy_(1e5 * target.lm_head.weight[head.id_map])
    return head


class Checked(ComparesAnswers, HeadDrafter):
    """A head whose every answer is compared with the oracle."""

    def __init__(self, name: str, head: DraftHead, target: PreTrainedModel) -> None:
        super().__init__(name, HeadLM(head, target.get_input_embeddings().weight.detach(), num_rows=2000))
        self.watch(head, target)
        self.longest = 0  # tokens entered in one go after a commit

    def propose(self, requests: Sequence[DraftRequest]) -> list[Answer | Halt]:
        for request in requests:
            self.longest = max(self.longest, len(request.context) - 1 - len(request.state.rows))
        return super().propose(requests)


@pytest.mark.parametrize("role", ["small", "medium", "both"])
def test_greedy_text_is_the_targets_with_heads_in_any_role(tiny_model: TinyModel, role: str) -> None:
    """Every schedule, alone and four at once, prompts of one token and of several chunks; all rows are given back."""
    target = tiny_model("llama", VOCAB, 1, layers=4)
    small = toy_head(target, "add", num_draft=25) if role != "medium" else tiny_model("llama", VOCAB, 9)
    medium = toy_head(target, "concat", seed=1) if role != "small" else target
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


@pytest.mark.parametrize("combine", ["add", "concat"])
def test_in_the_engine_every_answer_is_that_of_the_oracle(
    tiny_model: TinyModel, combine: Combine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunked prompts, entries in pieces, whole accepted paths of the small drafter, two requests at once.

    Hidden states that come late, twice, or of the wrong tokens never change the text: only this comparison shows them.
    """
    monkeypatch.setattr(drafters.draft_head, "_CATCH_UP", 5)
    target = tiny_model("llama", VOCAB, 1, layers=4)
    checked = Checked("medium", toy_head(target, combine), target)
    with World(target, small=target, medium=checked, limits=SHORT_CHUNKS, word="SSM", budget=8) as world:
        replies = world.run_all([[3], list(range(20))], "treegraft", max_tokens=11)
    assert all(not reply.stats.halts for reply in replies), replies[0].stats.halts
    assert any(reply.stats.num_accepted >= reply.stats.num_steps for reply in replies), "no path was accepted as a whole"
    assert checked.longest > 5 and checked.compared > 200
    assert checked.wrong < 1e-3


def test_hidden_states_of_the_wrong_tokens_are_seen(tiny_model: TinyModel) -> None:
    """Negative control of the comparison above: one accepted path whose hidden states are in the wrong order."""

    class Confused(Checked):
        def observe(self, state: Heard, start: int, hidden: torch.Tensor) -> None:
            super().observe(state, start, hidden if start == 0 else hidden.flip(0))

    target = tiny_model("llama", VOCAB, 1, layers=4)
    confused = Confused("medium", toy_head(target), target)
    with World(target, small=target, medium=confused, word="SSM", budget=8) as world:
        reply = world.run([3, 4], "treegraft", max_tokens=9)
    assert reply.tokens == greedy_reference(target, [3, 4], 9), "the text is the target's in any case"
    assert confused.wrong > 0.1


def test_a_seed_gives_the_same_text_with_heads_as_without(tiny_model: TinyModel) -> None:
    """At temperature 1 random numbers belong to (seed, position), whatever a head drafts."""
    target = tiny_model("llama", VOCAB, 1, layers=4)
    asked = list(enumerate(prompts(4, seed=1)))
    with World(target, small=toy_head(target, "concat"), medium=toy_head(target, "add", seed=2), budget=8) as world:
        plain = [world.run(p, "ar", temperature=1.0, seed=i, max_tokens=12).tokens for i, p in asked]
        for schedule in SCHEDULES[2:]:
            pending = [world.submit(p, schedule, temperature=1.0, seed=i, max_tokens=12) for i, p in asked]
            assert [waiting.result().tokens for waiting in pending] == plain, schedule


def test_a_head_that_knows_its_target_is_accepted_over_a_long_text() -> None:
    """Entries that pile up, lag behind or lose their place show only as a head that gets worse."""
    target = forgetful(3)
    with World(target, medium=all_knowing(target), schedules=[self_draft_chain(5)], num_rows=4000) as world:
        long = world.run([1, 2, 3], "chain", max_tokens=200)
        many = world.run_all(prompts(6, seed=2), "chain", max_tokens=30)
    for reply in [long, *many]:
        assert reply.stats.num_accepted >= 0.99 * reply.stats.num_drafted > 0
    assert long.stats.num_steps <= 35, "six tokens per step"
    assert long.tokens == greedy_reference(target, [1, 2, 3], 200)


class Failing(HeadDrafter):
    """A head that raises at its `fail_at`-th call of one method."""

    def __init__(self, where: str, fail_at: int, head: DraftHead, target: PreTrainedModel) -> None:
        super().__init__("medium", HeadLM(head, target.get_input_embeddings().weight.detach(), num_rows=2000))
        self.where, self.left = where, fail_at

    def observe(self, state: Heard, start: int, hidden: torch.Tensor) -> None:
        self._maybe("observe")
        super().observe(state, start, hidden)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Answer | Halt]:
        self._maybe("propose")
        return super().propose(requests)

    def _maybe(self, where: str) -> None:
        if self.where == where:
            self.left -= 1
            if self.left < 0:
                raise RuntimeError("out of luck")


@pytest.mark.parametrize("where", ["observe", "propose"])
@pytest.mark.parametrize("fail_at", [0, 1, 6])
def test_a_head_that_raises_is_given_up_and_the_answer_goes_on(
    tiny_model: TinyModel, where: str, fail_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    """At once, in the middle of a prompt, and in the middle of an answer; its rows come back, the reason is counted."""
    target = tiny_model("llama", VOCAB, 1, layers=4)
    failing = Failing(where, fail_at, toy_head(target), target)
    with World(target, medium=failing, limits=SHORT_CHUNKS) as world:
        asked = [[2], list(range(30))]
        replies = world.run_all(asked, "treegraft", max_tokens=20)
        assert failing.lm.pool.num_used == 0
    for prompt, reply in zip(asked, replies, strict=True):
        assert reply.tokens == greedy_reference(target, prompt, 20)
        assert reply.stats.halts == {"medium": "error"}
    assert "out of luck" in caplog.text


def test_a_target_that_captures_nothing_costs_the_head_not_the_request(tiny_model: TinyModel) -> None:
    """A wiring fault: the head listens to layers that nobody hooked."""
    target = tiny_model("llama", VOCAB, 1, layers=4)
    head = HeadDrafter("medium", HeadLM(toy_head(target), target.get_input_embeddings().weight.detach(), num_rows=200))
    with World(target) as world:
        world.engine._drafters["medium"] = world.drafters["medium"] = head
        world.engine.schedules["chain"] = self_draft_chain(3)
        reply = world.run([1, 2, 3], "chain", max_tokens=12)
    assert reply.tokens == greedy_reference(target, [1, 2, 3], 12)
    assert reply.stats.halts == {"medium": "error"}


def test_a_head_with_a_shorter_context_stops_and_the_answer_goes_on(tiny_model: TinyModel) -> None:
    """Heads are often trained on shorter texts than their target."""
    target = tiny_model("llama", VOCAB, 1, layers=4)
    with World(target, medium=toy_head(target, max_positions=24)) as world:
        reply = world.run([1, 2, 3], "medium", max_tokens=60)
    assert reply.tokens == greedy_reference(target, [1, 2, 3], 60)
    assert reply.stats.halts == {"medium": "context"}
    assert reply.stats.drafters["medium"].drafted > 0


def test_heads_without_rows_for_all_stop_for_some(tiny_model: TinyModel) -> None:
    """A pool that is too small is a matter of speed, not of answers."""
    target = tiny_model("llama", VOCAB, 1, layers=4)
    head = HeadDrafter("medium", HeadLM(toy_head(target), target.get_input_embeddings().weight.detach(), num_rows=70))
    with World(target, medium=head) as world:
        asked = prompts(4, seed=6)
        replies = world.run_all(asked, "medium", max_tokens=20)
    assert [reply.tokens for reply in replies] == [greedy_reference(target, prompt, 20) for prompt in asked]
    assert "rows" in {reason for reply in replies for reason in reply.stats.halts.values()}
