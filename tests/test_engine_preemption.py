"""Rows that run out: someone gives way and comes back with the same text, and nobody who asked gets an error."""

from __future__ import annotations

import queue
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

import engine.draft
import engine.engine
import engine.memory
from engine.admission import Limits
from engine.question import Draft
from engine.request import Delta, FinishReason, Request, RequestStats
from engine.turn import divide, fitting_nodes
from models.sampling import SamplingParams
from scheduler.definitions import define_schedule
from tests.engine_world import Pending, Reply, World, greedy_reference, self_draft_chain
from tests.test_draft_head_engine import all_knowing, forgetful
from tests.toy_heads import forgetful_below, knowing_tail, tail_head, toy_head

TinyModel = Callable[..., PreTrainedModel]
VOCAB = 40
SCHEDULES = ("ar", "ngram", "small", "medium", "talon", "treegraft")


def prompts(count: int, seed: int = 0, longest: int = 30) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randrange(2, longest))] for _ in range(count)]


@pytest.fixture
def rash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are let in with room for four tokens of answer, so that they run out of rows soon and often."""
    monkeypatch.setattr(engine.memory, "_SOON", 4)


@pytest.mark.parametrize(("temperature", "prefix_cache"), [(0.0, True), (1.0, False)])
def test_who_gave_way_goes_on_with_the_same_text(
    tiny_model: TinyModel, temperature: float, prefix_cache: bool, rash: None
) -> None:
    """Six answers in rows for two of them, every schedule: no token lost, repeated or changed in the stream, no error."""
    target = tiny_model("llama", VOCAB, 1)
    asked = prompts(6, seed=3)
    options: dict[str, Any] = {"max_tokens": 40, "temperature": temperature}
    with World(target) as roomy:
        wanted = [roomy.run(prompt, "ar", seed=i, **options) for i, prompt in enumerate(asked)]
        assert all(reply.stats.num_preemptions == 0 for reply in wanted)
    limits = Limits(prefix_cache=prefix_cache, prefill_chunk=16)
    small, medium = tiny_model("llama", VOCAB, 9), tiny_model("llama", VOCAB, 1)
    with World(target, small=small, medium=medium, num_rows=110, budget=8, limits=limits) as world:
        pending = [
            world.submit(prompt, SCHEDULES[i % len(SCHEDULES)], seed=i, **options) for i, prompt in enumerate(asked)
        ]
        replies = [one.result() for one in pending]
    for reply, want in zip(replies, wanted, strict=True):
        assert (reply.finish, reply.tokens, reply.text) == (FinishReason.LENGTH, want.tokens, want.text)
        assert "".join(delta.text for delta in reply.deltas) == want.text
        stats = reply.stats
        assert stats.num_output_tokens == 40 == stats.num_steps + stats.num_accepted - (stats.num_trimmed > 0)
    assert sum(reply.stats.num_preemptions for reply in replies) >= 2, "there were rows for all: the test tests nothing"
    assert replies[0].stats.num_preemptions == 0, "the oldest never gives way"


def test_a_prompt_is_rated_once_however_often_it_is_read(tiny_model: TinyModel, rash: None) -> None:
    """Who gives way in the middle of a prompt, or behind it, reads it again; its numbers come with the first token, once."""
    target = tiny_model("llama", VOCAB, 1)
    asked = prompts(6, seed=4, longest=40)
    options: dict[str, Any] = {"max_tokens": 30, "num_logprobs": 0, "prompt_logprobs": True}
    limits = Limits(prefill_chunk=7)
    with World(target) as roomy:
        wanted = [_of_prompt(roomy.run(prompt, "ar", **options)) for prompt in asked]
    with World(target, medium=target, num_rows=80, budget=8, limits=limits) as world:
        replies = world.run_all(asked, "medium", **options)
    assert sum(reply.stats.num_preemptions for reply in replies) >= 2, "there were rows for all: the test tests nothing"
    for prompt, reply, want in zip(asked, replies, wanted, strict=True):
        assert len(want) == len(prompt) - 1
        assert _of_prompt(reply) == pytest.approx(want, abs=1e-4)


def _of_prompt(reply: Reply) -> list[float]:
    (told,) = [delta.prompt_logprobs for delta in reply.deltas if delta.prompt_logprobs]
    assert told == next(delta for delta in reply.deltas if delta.token_ids).prompt_logprobs
    return [one.logprob or 0.0 for one in told]


@pytest.mark.parametrize("kind", ["head", "tail"])
def test_heads_go_on_drafting_after_their_sequence_gave_way(tiny_model: TinyModel, kind: str, rash: None) -> None:
    """A head that is handed hidden states from the middle of a text must neither stop nor stumble; out of rows, it pauses."""
    target = tiny_model("llama", VOCAB, 1, layers=4)
    medium = toy_head(target) if kind == "head" else tail_head(target)
    asked = prompts(5, seed=7)
    with World(target, medium=medium, num_rows=90, budget=8) as world:
        replies = world.run_all(asked, "medium", max_tokens=30)
    assert [reply.tokens for reply in replies] == [greedy_reference(target, prompt, 30) for prompt in asked]
    assert sum(reply.stats.num_preemptions for reply in replies) > 0
    assert {why for reply in replies for why in reply.stats.halts.values()} <= {"rows"}
    assert all(reply.stats.drafters["medium"].drafted > 0 for reply in replies)


@pytest.mark.parametrize("kind", ["model", "head", "tail"])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_drafter_short_of_rows_drafts_again_when_there_are_some(
    kind: str, prefix_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are short for moments now; a drafter that stopped for good would leave a long answer without speculation."""
    monkeypatch.setattr(engine.draft, "_RETRY_AFTER", 8)
    target = forgetful(3) if kind == "head" else forgetful_below(1, vocab=VOCAB, seed=3)
    medium: Any = target
    if kind != "model":
        medium = all_knowing(target) if kind == "head" else knowing_tail(target, 1)
    limits = Limits(prefix_cache=prefix_cache)
    with World(target, medium=medium, schedules=[self_draft_chain(4)], limits=limits, num_rows=2000) as world:
        pool = world.drafters["medium"].lm.pool  # type: ignore[attr-defined]
        taken = pool.allocate(pool.num_free)
        pending = world.submit([1, 2, 3], "chain", max_tokens=120)
        heard = [pending.next() for _ in range(20)]
        assert all(len(delta.token_ids) == 1 for delta in heard)
        pool.release(taken)
        reply = pending.result(before=heard)
    assert reply.stats.halts == {"medium": "rows"}
    assert reply.tokens == greedy_reference(target, [1, 2, 3], 120)
    assert reply.stats.num_steps < 100 and reply.stats.num_accepted >= 0.99 * reply.stats.num_drafted > 0


def test_penalties_log_probabilities_and_ends_survive_giving_way(tiny_model: TinyModel, rash: None) -> None:
    """What hangs on the answer so far is not forgotten with the rows."""
    target = tiny_model("llama", VOCAB, 1)
    sampling = SamplingParams(temperature=0.0, frequency_penalty=0.6, repetition_penalty=1.2)

    def answers(num_rows: int) -> list[Reply]:
        with World(target, medium=target, num_rows=num_rows, budget=8) as world:
            pending = []
            for number, prompt in enumerate(prompts(5, seed=11)):
                deltas: queue.Queue[Delta] = queue.Queue()
                ends: dict[str, Any] = {"min_tokens": 20, "stop_token_ids": frozenset({3})}
                ends |= {"num_logprobs": 2, "schedule": "treegraft"}
                request = Request(f"r{number}", tuple(prompt), sampling, 60, deltas.put, **ends)
                world.engine.submit(request)
                pending.append(Pending(request.id, deltas))
            return [one.result() for one in pending]

    roomy, tight = answers(6000), answers(100)
    assert sum(reply.stats.num_preemptions for reply in tight) > 0
    for one, other in zip(roomy, tight, strict=True):
        assert (one.tokens, one.text, one.finish) == (other.tokens, other.text, other.finish)
        told = [[entry for delta in reply.deltas for entry in delta.logprobs] for reply in (one, other)]
        assert [entry.token_id for entry in told[0]] == [entry.token_id for entry in told[1]] == one.tokens
        assert max(abs(a.logprob - b.logprob) for a, b in zip(*told, strict=True)) < 1e-3


def test_rows_are_taken_as_they_are_needed(tiny_model: TinyModel) -> None:
    """Answers that may become long but do not, all at once in rows for two long ones: nobody waits."""
    target = tiny_model("llama", VOCAB, 1, max_positions=1000)
    with World(target, num_rows=900, budget=8) as world:
        forward, together = world.lm.forward, 0

        def watched(segments: Sequence[Any]) -> Any:
            nonlocal together
            together = max(together, len(segments))
            return forward(segments)

        world.lm.forward = watched  # type: ignore[method-assign]
        replies = world.run_all(prompts(8), max_tokens=250, ignore_eos=True, stop_token_ids=frozenset(range(2)))
    assert all(reply.stats.num_preemptions == 0 for reply in replies if len(reply.tokens) < 100)
    assert together >= 6, "with all 288 rows set aside that one may need, three run at once"


def test_trees_shrink_before_anyone_gives_way(tiny_model: TinyModel) -> None:
    """A sequence that loses its place for another one's guesses loses time for nothing."""
    target = tiny_model("llama", VOCAB, 1)
    with World(target, medium=target, num_rows=94, budget=40, max_model_len=60) as world:
        outside = world.lm.pool.allocate(30)  # fewer than the door assumes
        reply = world.run([1, 2, 3], "treegraft", max_tokens=50)
        world.lm.pool.release(outside)
    assert reply.tokens == greedy_reference(target, [1, 2, 3], 50)
    assert reply.stats.num_preemptions == 0
    assert min(reply.stats.drafted[:-1]) < 20 < max(reply.stats.drafted)


@pytest.mark.parametrize("policy", ["iid", "without_replacement", "treegraft"])
def test_a_tree_is_cut_to_a_tree_and_a_drawn_one_to_its_root(
    tiny_model: TinyModel, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To leave out some of the drawn children by what was drawn bends the law of the text that the ratio rules keep."""
    target = tiny_model("llama", VOCAB, 1)
    options: dict[str, Any] = {"iid": {"num_paths": 3, "length": 3}, "without_replacement": {"widths": [3, 2]}, "treegraft": {}}
    definition: dict[str, Any] = {"policy": policy, "options": options[policy], "plan": "M*", "drafters": {}}
    schedule = define_schedule("cut", available=["medium", "ngram"], **definition)
    seen: list[tuple[list[int], list[int], list[int]]] = []

    def cut(drafts: Sequence[Draft], chosen: list[list[int]], room: int) -> list[list[int]]:
        assert fitting_nodes(drafts, chosen, room) == chosen, "there is room"
        some = fitting_nodes(drafts, chosen, 2 * len(drafts))
        seen.extend((list(d.growth.tree.parent), w, s) for d, w, s in zip(drafts, chosen, some, strict=True))
        return some

    monkeypatch.setattr(engine.engine, "fitting_nodes", cut)
    with World(target, medium=target, schedules=[schedule]) as world:
        world.run_all(prompts(3), "cut", temperature=1.0, max_tokens=20)
    large = [(parents, some) for parents, whole, some in seen if len(whole) > 6]
    assert len(large) > 5
    for parents, some in large:
        assert some == sorted(some) and some[0] == 0
        assert all(parents[node] in some for node in some[1:])
        assert (len(some) > 1) == (policy == "treegraft")


def test_whoever_gave_way_may_leave(tiny_model: TinyModel) -> None:
    """Aborted while it waits to be taken up again: one last delta, nothing held."""
    target = tiny_model("llama", VOCAB, 1, max_positions=1000)
    with World(target, num_rows=320, budget=8, max_model_len=300) as world:
        pending = [world.submit(prompt, max_tokens=250) for prompt in prompts(4, seed=2)]
        heard = [[one.next()] for one in pending[:2]]
        while world.engine.num_waiting == 0 or len(heard[1]) < 2:
            heard[1].append(pending[1].next())
        for one in pending[1:]:
            world.engine.abort(one.id)
        first = pending[0].result(before=heard[0])
        others = [pending[1].result(before=heard[1]), *(one.result() for one in pending[2:])]
    assert first.finish is FinishReason.LENGTH and first.stats.num_preemptions == 0
    assert {reply.finish for reply in others} <= {FinishReason.ABORT, FinishReason.LENGTH}


def test_the_youngest_gives_way_and_the_order_stays(tiny_model: TinyModel, rash: None) -> None:
    """First come, first finished, as far as equal answers go: whoever gave way is not overtaken by those who came later."""
    ended: list[str] = []

    class Order:
        def on_step(self, steps: Any) -> None: ...

        def on_finish(self, stats: RequestStats, reason: FinishReason) -> None:
            ended.append(f"{stats.num_prompt_tokens}")

    target = tiny_model("llama", VOCAB, 1)
    asked = [[i] * (i + 2) for i in range(8)]
    with World(target, num_rows=130, budget=8, max_model_len=100) as world:
        world.engine.subscribe(Order())
        replies = world.run_all(asked, max_tokens=50)
    assert ended == [str(len(prompt)) for prompt in asked]
    assert sum(reply.stats.num_preemptions for reply in replies) > 0
    assert [reply.tokens for reply in replies] == [greedy_reference(target, prompt, 50) for prompt in asked]


# ---- reading together -----------------------------------------------------------------------------------------------


@given(st.integers(0, 60), st.lists(st.integers(0, 40), max_size=8))
def test_shares_are_fair(total: int, wants: list[int]) -> None:
    """All is given out, nobody gets more than it wants, and who gets less has no less than anyone, up to one."""
    shares = divide(total, wants)
    assert sum(shares) == min(total, sum(wants))
    assert all(0 <= share <= want for share, want in zip(shares, wants, strict=True))
    for index, (share, want) in enumerate(zip(shares, wants, strict=True)):
        if share < want:
            assert share >= max(shares) - 1
            assert all(share >= other for other in shares[index + 1 :]), "what cannot be divided goes to the oldest"


def test_many_long_prompts_make_no_step_longer_and_decoding_goes_on(tiny_model: TinyModel) -> None:
    """One budget of prompt tokens per step: whoever is being answered gets a token in every step, and steps stay short."""
    target = tiny_model("llama", VOCAB, 1, max_positions=1000)
    rng = random.Random(1)
    long = [[rng.randrange(VOCAB) for _ in range(300)] for _ in range(6)]
    with World(target, limits=Limits(prefill_chunk=32)) as world:
        sizes: list[int] = []
        answering: list[bool] = []
        forward = world.lm.forward

        def watched(segments: Sequence[Any]) -> Any:
            sizes.append(sum(len(segment.tokens) for segment in segments))
            answering.append(any(segment.positions[0] >= 3 and len(segment.tokens) == 1 for segment in segments))
            return forward(segments)

        world.lm.forward = watched  # type: ignore[method-assign]
        first = world.submit([1, 2, 3], max_tokens=120)
        first_delta = first.next()
        others = [world.submit(prompt, max_tokens=3) for prompt in long]
        short = world.submit([5, 6, 7, 8], max_tokens=2)
        quick = short.result()
        replies = [other.result() for other in others]
        whole = first.result(before=[first_delta])
    assert max(sizes) <= 32 + 8
    assert all(answering[1 : sizes.index(max(sizes)) + 20])
    assert all(reply.stats.first_token_s > quick.stats.first_token_s for reply in replies), "a short prompt behind long ones"
    assert whole.tokens == greedy_reference(target, [1, 2, 3], 120)
    assert [reply.tokens for reply in replies] == [greedy_reference(target, prompt, 3) for prompt in long]
