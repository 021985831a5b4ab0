"""What breaks, who leaves, what is too much: the others go on, everything is given back, every request ends once."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from drafters.base import DraftRequest, Halt
from drafters.causal_lm import CausalLMDrafter
from engine.admission import Limits
from engine.request import EngineStopped, FinishReason, QueueFull, RequestError, RequestStats, StepStats
from tests.engine_world import World, greedy_reference
from tree.growth import Answer, Candidates

TinyModel = Callable[..., PreTrainedModel]
VOCAB = 120


class Flaky:
    """A drafter that raises at its `fail_at`-th call."""

    name = "medium"
    runs_model = True
    layers: tuple[int, ...] = ()

    def __init__(self, fail_at: int) -> None:
        self.calls, self.fail_at, self.closed = 0, fail_at, 0

    def open(self) -> object:
        return object()

    def observe(self, state: object, start: int, hidden: torch.Tensor) -> None: ...

    def propose(self, requests: Sequence[DraftRequest]) -> list[Answer | Halt]:
        self.calls += 1
        if self.calls >= self.fail_at:
            raise RuntimeError("out of luck")
        return [Answer({}, {}) for _ in requests]

    def commit(self, *_: Any) -> None: ...

    def close(self, state: object) -> None:
        self.closed += 1


def test_a_drafter_that_raises_costs_speed_and_nothing_else(tiny_model: TinyModel, caplog: pytest.LogCaptureFixture) -> None:
    """Drafting is optional: its failure is a count and one log line per sequence, never an error answer."""
    target = tiny_model("llama", VOCAB, 11)
    flaky = Flaky(fail_at=3)
    with World(target, medium=flaky) as world:
        replies = world.run_all(["abc", "def"], "medium", max_tokens=20)
    for prompt, reply in zip(["abc", "def"], replies, strict=True):
        assert reply.tokens == greedy_reference(target, prompt.encode(), 20)
        assert reply.stats.halts == {"medium": "error"}
    assert flaky.closed == 2
    assert "out of luck" in caplog.text


def test_a_drafter_whose_weights_hold_nan_is_given_up(tiny_model: TinyModel) -> None:
    """NaN scores must not reach the tree: a sort by NaN drops parents and keeps their children."""
    target, broken = tiny_model("llama", VOCAB, 11), tiny_model("llama", VOCAB, 12)
    with World(target, medium=broken) as world:
        drafter = world.drafters["medium"]
        assert isinstance(drafter, CausalLMDrafter)
        with torch.no_grad():
            drafter.lm.model.get_output_embeddings().weight[5] = float("nan")
        reply = world.run("abc", "treegraft", max_tokens=20)
    assert reply.tokens == greedy_reference(target, b"abc", 20)
    assert reply.stats.halts["medium"] == "nan"


def test_a_drafter_with_a_shorter_context_stops_and_the_answer_goes_on(tiny_model: TinyModel) -> None:
    """A small drafter's context is often shorter than the target's; its end is not the answer's end."""
    target = tiny_model("llama", VOCAB, 11)
    short = tiny_model("llama", VOCAB, 11, max_positions=32)
    with World(target, medium=short) as world:
        reply = world.run("abc", "medium", max_tokens=60)
    assert reply.tokens == greedy_reference(target, b"abc", 60)
    assert reply.stats.halts == {"medium": "context"}
    assert reply.stats.drafters["medium"].accepted > 0


def test_a_drafter_out_of_rows_stops_and_the_answer_goes_on(tiny_model: TinyModel) -> None:
    """A drafter's cache is sized by itself and may be smaller than the texts that the target can hold."""
    target = tiny_model("llama", VOCAB, 11)
    with World(target, medium=target) as world:
        drafter = world.drafters["medium"]
        assert isinstance(drafter, CausalLMDrafter)
        taken = drafter.lm.pool.allocate(drafter.lm.pool.num_free - 30)
        reply = world.run("abc", "medium", max_tokens=60)
        drafter.lm.pool.release(taken)
    assert reply.tokens == greedy_reference(target, b"abc", 60)
    assert reply.stats.halts == {"medium": "rows"}


def test_a_step_that_raises_fails_its_requests_and_not_the_next_ones(tiny_model: TinyModel) -> None:
    """Every request ends in exactly one final event, rows come back, and the engine serves on."""
    target = tiny_model("llama", VOCAB, 11)
    with World(target) as world:
        forward = world.lm.forward
        calls = 0

        def broken(segments: Any) -> Any:
            nonlocal calls
            calls += 1
            if 4 <= calls <= 6:  # together, and each of the two alone
                raise MemoryError("no memory for this forward")
            return forward(segments)

        world.lm.forward = broken  # type: ignore[method-assign]
        failed = world.run_all(["abc", "def"], max_tokens=20)
        assert [reply.finish for reply in failed] == [FinishReason.ERROR] * 2
        assert all(reply.error for reply in failed)
        assert world.lm.pool.num_used == len("abcdef"), "what was read before the fault is kept, and nothing else"
        assert world.run("abc", max_tokens=20).tokens == greedy_reference(target, b"abc", 20)
        assert world.engine.health() == "ok"


def test_a_target_that_answers_nan_is_an_error_and_not_a_token(tiny_model: TinyModel) -> None:
    """The argmax of NaN is some token id; sending it would look like a healthy answer."""
    target = tiny_model("llama", VOCAB, 11)
    with World(target) as world:
        with torch.no_grad():
            world.lm.model.get_output_embeddings().weight.fill_(float("nan"))
        replies = [world.run("abc", max_tokens=5) for _ in range(2)]
        assert [(r.finish, r.tokens) for r in replies] == [(FinishReason.ERROR, [])] * 2


def test_an_engine_whose_every_step_fails_says_so_and_takes_no_more(tiny_model: TinyModel) -> None:
    """A server that answers health checks while every answer is an error is never restarted."""
    with World(tiny_model("llama", VOCAB, 11)) as world:

        def broken(_: Any) -> Any:
            raise RuntimeError("device lost")

        world.lm.forward = broken  # type: ignore[method-assign]
        for _ in range(3):
            assert world.run("abc").finish is FinishReason.ERROR
        deadline = time.monotonic() + 10
        while not world.engine.health().startswith("failed") and time.monotonic() < deadline:
            time.sleep(0.01)
        assert world.engine.health().startswith("failed")
        with pytest.raises(EngineStopped):
            world.submit("abc")


def test_whoever_leaves_frees_rows_and_place_at_once(tiny_model: TinyModel) -> None:
    """Running or waiting; the others' answers stay what they were, and unknown ids are nobody's trouble."""
    target = tiny_model("llama", VOCAB, 11, max_positions=2000)
    with World(target, medium=target, limits=Limits(max_num_seqs=2)) as world:
        long = [world.submit("abc", "treegraft", max_tokens=1900) for _ in range(4)]
        first = long[0].next()
        assert first.finish_reason is None
        world.engine.abort("nobody")
        world.engine.abort(long[0].id)
        world.engine.abort(long[3].id)  # still waiting
        assert long[0].result(before=[first]).finish is FinishReason.ABORT
        waiting = long[3].result()
        assert (waiting.finish, waiting.tokens) == (FinishReason.ABORT, [])
        world.engine.abort(long[1].id)
        world.engine.abort(long[1].id)
        world.engine.abort(long[2].id)
        assert {long[1].result().finish, long[2].result().finish} == {FinishReason.ABORT}
        assert world.run("abc", "treegraft").tokens == greedy_reference(target, b"abc", 24)


def test_the_queue_has_an_end(tiny_model: TinyModel) -> None:
    """One slot, four places to wait, twenty at once: five are served, fifteen are refused before anything is queued."""
    target = tiny_model("llama", VOCAB, 11)
    with World(target, limits=Limits(max_num_seqs=1, max_waiting=4)) as world:
        accepted, refused = [], 0
        for _ in range(20):
            try:
                accepted.append(world.submit("abc", max_tokens=200))
            except QueueFull as full:
                refused += 1
                assert full.retry_after_s > 0
        assert (len(accepted), refused) == (5, 15)
        assert all(pending.result().finish is FinishReason.LENGTH for pending in accepted)
        assert world.engine.num_waiting == world.engine.num_running == 0


def test_admission_waits_for_rows_and_never_runs_out(tiny_model: TinyModel) -> None:
    """More requests than rows: they take turns; what could never fit is refused at the door."""
    target = tiny_model("llama", VOCAB, 11)
    with World(target, medium=target, num_rows=120, max_model_len=100) as world:
        replies = world.run_all(["abc"] * 12, "treegraft", max_tokens=40)
        assert all(reply.tokens == greedy_reference(target, b"abc", 40) for reply in replies)
        with pytest.raises(Exception, match="rows"):
            world.submit("abc", "treegraft", max_tokens=90, budget=60)


def test_stop_drains_and_then_cuts_off(tiny_model: TinyModel) -> None:
    """A stop with time lets answers finish; without time every open request still gets its last delta."""
    target = tiny_model("llama", VOCAB, 11, max_positions=4000)
    with World(target, limits=Limits(max_num_seqs=2), num_rows=20000) as world:
        quick = [world.submit("abc", max_tokens=30) for _ in range(4)]
        stopper = threading.Thread(target=world.engine.stop, kwargs={"drain_s": 30.0})
        stopper.start()
        assert all(pending.result().finish is FinishReason.LENGTH for pending in quick)
        stopper.join(10)
        assert not stopper.is_alive()
        with pytest.raises(EngineStopped):
            world.submit("abc")
        assert world.engine.health() == "stopped"
    with World(target, limits=Limits(max_num_seqs=2), num_rows=20000) as world:
        slow = [world.submit("abc", max_tokens=3900) for _ in range(4)]
        slow[0].next()
        world.engine.stop()
        assert {pending.result().finish for pending in slow} == {FinishReason.ABORT}


def test_health_tells_of_a_step_that_never_ends(tiny_model: TinyModel) -> None:
    """Work is waiting and nothing moves: the balancer must learn of it. An idle engine is not stalled."""
    with World(tiny_model("llama", VOCAB, 11), limits=Limits(stall_s=0.2)) as world:
        time.sleep(0.4)
        assert world.engine.health() == "ok"
        gate, forward = threading.Event(), world.lm.forward
        world.lm.forward = lambda segments: (gate.wait(10), forward(segments))[1]  # type: ignore[method-assign]
        pending = world.submit("abc", max_tokens=3)
        time.sleep(0.6)
        assert world.engine.health() == "stalled"
        gate.set()
        pending.result()
        assert world.engine.health() == "ok"


class Counting:
    """An observer that adds up, and breaks now and then."""

    def __init__(self) -> None:
        self.steps: list[StepStats] = []
        self.finished: list[RequestStats] = []

    def on_step(self, steps: list[StepStats]) -> None:
        self.steps += steps
        if len(self.steps) % 5 == 0:
            raise ZeroDivisionError("metrics are broken")

    def on_finish(self, stats: RequestStats, reason: FinishReason) -> None:
        self.finished.append(stats)
        raise ZeroDivisionError("metrics are broken")


def test_observers_add_up_to_the_requests_and_cannot_hurt_them(tiny_model: TinyModel) -> None:
    """Counters and per-request statistics are two views of the same records."""
    target = tiny_model("llama", 40, 1)
    counting = Counting()
    rng = random.Random(4)
    with World(target, small=tiny_model("llama", 40, 2), medium=target) as world:
        world.engine.subscribe(counting)
        names = list(world.schedules)
        waiting = [
            world.submit([rng.randrange(40) for _ in range(5)], rng.choice(names), max_tokens=rng.randrange(1, 30))
            for _ in range(40)
        ]
        replies = [pending.result() for pending in waiting]
    assert all(reply.finish is FinishReason.LENGTH for reply in replies)
    for schedule in names:
        steps = [s for s in counting.steps if s.schedule == schedule]
        stats = [r.stats for r in replies if r.stats.schedule == schedule]
        assert sum(s.num_output_tokens for s in steps) == sum(s.num_output_tokens for s in stats)
        assert sum(s.num_prompt_tokens for s in steps) == sum(s.num_prompt_tokens for s in stats)
        assert sum(s.num_drafts for s in steps) == sum(s.num_spec_steps for s in stats)
        assert sum(s.num_grafts for s in steps) == sum(s.num_grafts for s in stats)
        assert sum(s.num_verified_nodes for s in steps) == sum(s.num_verified_nodes for s in stats)
        for drafter in world.drafters:
            for field in ("drafted", "accepted", "forwards"):
                left = sum(getattr(s.drafters[drafter], field) for s in steps if drafter in s.drafters)
                right = sum(getattr(s.drafters[drafter], field) for s in stats if drafter in s.drafters)
                assert left == right, (schedule, drafter, field)
        assert sum(s.num_drafted for s in stats) == sum(c.drafted for s in stats for c in s.drafters.values())


def test_a_receiver_that_raises_hurts_only_itself(tiny_model: TinyModel) -> None:
    """The engine thread must survive a closed event loop on the other side."""
    target = tiny_model("llama", VOCAB, 11)
    with World(target) as world:
        from engine.request import Request
        from models.sampling import SamplingParams

        def broken(_: object) -> None:
            raise RuntimeError("Event loop is closed")

        world.engine.submit(Request("x", (1, 2), SamplingParams(temperature=0.0), 5, broken))
        assert world.run("abc").tokens == greedy_reference(target, b"abc", 24)


def test_mixed_load_ends_with_nothing_left(tiny_model: TinyModel) -> None:
    """Short, long, stopped, cancelled and bad requests together: each ends once, gauges and pools return to zero."""
    target = tiny_model("llama", VOCAB, 11)
    rng = random.Random(7)
    with World(target, small=tiny_model("llama", VOCAB, 3), medium=target, limits=Limits(4, 200, 7)) as world:
        names = list(world.schedules)
        pending = []
        for i in range(64):
            options: dict[str, Any] = {"max_tokens": rng.choice([1, 5, 30, 80]), "temperature": rng.choice([0.0, 1.0])}
            if i % 5 == 0:
                options["stop"] = ["a", "Q"]
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 40))]
            pending.append(world.submit(prompt, rng.choice(names), **options))
            if i % 7 == 0:
                world.engine.abort(pending[-1].id)
        replies = [p.result() for p in pending]
        assert world.engine.num_running == world.engine.num_waiting == 0
    assert {reply.finish for reply in replies} <= {FinishReason.LENGTH, FinishReason.STOP, FinishReason.ABORT}
    assert all(reply.deltas[-1].finish_reason and not any(d.finish_reason for d in reply.deltas[:-1]) for reply in replies)


class Broken(Flaky):
    """A drafter that drafts token 1 below every node and raises, or answers nonsense, in one chosen method."""

    def __init__(self, where: str) -> None:
        super().__init__(fail_at=10**9)
        self.where = where

    def _maybe(self, where: str) -> None:
        if self.where == where:
            raise RuntimeError(f"broken in {where}")

    def open(self) -> object:
        self._maybe("open")
        return object()

    def propose(self, requests: Sequence[DraftRequest]) -> list[Answer | Halt]:
        self._maybe("propose")
        lp = 0.5 if self.where == "answer" else -0.5
        answers: list[Answer | Halt] = [
            Answer({node: Candidates((1,), (lp,)) for node in request.ask.nodes}, {}) for request in requests
        ]
        return answers[1:] if self.where == "count" else answers

    def commit(self, *_: Any) -> None:
        self._maybe("commit")

    def close(self, state: object) -> None:
        self.closed += 1
        self._maybe("close")


@pytest.mark.parametrize("where", ["open", "propose", "answer", "count", "commit", "close"])
def test_a_drafter_may_break_anywhere(tiny_model: TinyModel, where: str) -> None:
    """Wherever a drafter breaks, its own requests and their neighbors get their answers, and no row is lost."""
    target = tiny_model("llama", VOCAB, 11)
    with World(target, medium=Broken(where)) as world:
        pending = [world.submit("abc", schedule, max_tokens=20) for schedule in ("medium", "treegraft", "ar", "talon")]
        replies = [p.result() for p in pending]
        assert world.engine.health() == "ok"
    want = greedy_reference(target, b"abc", 20)
    assert [reply.tokens for reply in replies] == [want] * 4
    if where != "close":
        assert [reply.stats.halts for reply in replies] == [{"medium": "error"}, {"medium": "error"}, {}, {"medium": "error"}]


@pytest.mark.parametrize("where", ["decide", "commit"])
def test_a_fault_in_one_sequence_is_its_own(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Rows taken for a tree come back whichever line after the forward raised; batch mates do not notice."""
    from engine import settle as module

    target = tiny_model("llama", VOCAB, 11)
    with World(target, medium=target) as world:
        original = getattr(module, where)

        def raise_for_the_first(scored: Any, *rest: Any) -> Any:
            if scored.draft.sequence.request.prompt[0] == 66 and scored.draft.sequence.num_output > 3:
                raise RuntimeError("broken")
            return original(scored, *rest)

        monkeypatch.setattr(module, where, raise_for_the_first)
        pending = [world.submit(prompt, "treegraft", max_tokens=20) for prompt in ("Bad", "abc", "def")]
        bad, *good = [p.result() for p in pending]
        assert bad.finish is FinishReason.ERROR and bad.error
        assert [r.tokens for r in good] == [greedy_reference(target, p, 20) for p in (b"abc", b"def")]
        assert world.engine.health() == "ok"


def test_a_prompt_that_poisons_the_forward_harms_only_itself(tiny_model: TinyModel) -> None:
    """One request that makes the model answer NaN must not end its batch mates, nor, sent often, the server."""
    target = tiny_model("llama", VOCAB, 11)
    with World(target, medium=target) as world:
        with torch.no_grad():
            world.lm.model.get_input_embeddings().weight[7] = float("nan")
        good = world.submit("abc", "treegraft", max_tokens=60)
        bad = [world.run([7, 3], "treegraft").finish for _ in range(5)]
        assert bad == [FinishReason.ERROR] * 5
        reply = good.result()
        assert world.engine.health() == "ok"
    want = greedy_reference(target, b"abc", 60)
    assert reply.tokens == want or 7 in want


def test_the_loop_itself_may_break_and_nobody_waits_for_ever(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead thread with a healthy face is the worst of all: whoever waits gets an answer, health says it, no one is let in."""
    target = tiny_model("llama", VOCAB, 11)
    with World(target) as world:
        monkeypatch.setattr(world.engine, "_step_or_fail", lambda: (_ for _ in ()).throw(RuntimeError("gone")))
        reply = world.run("abc")
        assert reply.finish is FinishReason.ERROR
        assert world.engine.health().startswith("failed")
        with pytest.raises(EngineStopped):
            world.submit("abc")


def test_a_stop_asked_for_on_the_engine_thread_does_not_wait_for_itself(tiny_model: TinyModel) -> None:
    """An observer that stops the engine, say at a fatal count, must not deadlock it."""

    class Stopper(Counting):
        def on_finish(self, stats: RequestStats, reason: FinishReason) -> None:
            world.engine.stop()

    with World(tiny_model("llama", VOCAB, 11)) as world:
        world.engine.subscribe(Stopper())
        assert world.run("abc").finish is FinishReason.LENGTH


@pytest.mark.parametrize(("option", "value"), [("stop", ("",)), ("keep_trees", -1), ("trace_steps", -1)])
def test_values_that_only_break_later_are_refused_at_the_door(tiny_model: TinyModel, option: str, value: object) -> None:
    """What the sequence's own parts would choke on must be refused on the caller's thread."""
    with World(tiny_model("llama", VOCAB, 11)) as world:
        with pytest.raises(RequestError) as refused:
            world.submit("abc", **{option: value})  # type: ignore[arg-type]
        assert refused.value.param == option
        assert world.run("abc").finish is FinishReason.LENGTH


def test_a_drafter_reads_a_long_prompt_bit_by_bit(tiny_model: TinyModel) -> None:
    """While a drafter catches up with a long prompt, others keep getting tokens; the long answer is right all along."""
    target = tiny_model("llama", VOCAB, 11, max_positions=4000)
    rng = random.Random(3)
    long = [rng.randrange(VOCAB) for _ in range(2000)]
    with World(target, medium=target, num_rows=12000) as world:
        drafter = world.drafters["medium"]
        assert isinstance(drafter, CausalLMDrafter)
        sizes: list[int] = []
        forward = drafter.lm.forward

        def watched(segments: Any) -> Any:
            sizes.append(sum(len(s.tokens) for s in segments))
            return forward(segments)

        drafter.lm.forward = watched  # type: ignore[method-assign]
        other = world.submit("abc", "medium", max_tokens=100)
        reply = world.run(long, "medium", max_tokens=40)
        other.result()
    assert max(sizes) <= 512 + 60
    assert reply.tokens == greedy_reference(target, long, 40)
    assert reply.stats.drafters["medium"].accepted > 0
