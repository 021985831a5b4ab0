"""The books of a whole engine that is often out of rows: exact after every step, whatever comes, goes or breaks."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from drafters.causal_lm import CausalLMDrafter
from drafters.draft_head import HeadDrafter
from engine.admission import Limits
from engine.request import Delta, FinishReason
from engine.sequence import Sequence
from models import toy
from models.kv_cache import OutOfRows, RowPool
from models.prefix_cache import PrefixCache
from tests.engine_world import Pending, World
from tests.toy_heads import tail_head, toy_head

VOCAB, NUM_ROWS = 12, 90
TARGET = toy.tiny_causal_lm("llama", VOCAB, 1, layers=3)
NAMES = ("ar", "ngram", "small", "medium", "talon", "treegraft")
FAULTS: dict[str, type[BaseException]] = {"memory": MemoryError, "rows": OutOfRows, "other": RuntimeError}
_plain: dict[tuple[int, ...], list[int]] = {}  # greedy answers, as a roomy engine gives them


class Running(World):
    """A world whose engine has no thread: the test makes each step."""

    def __init__(self, kind: str, **options: Any) -> None:
        small: Any = {"lm": TARGET, "head": toy_head(TARGET), "tail": tail_head(TARGET)}[kind]
        super().__init__(TARGET, small=small, medium=TARGET, budget=6, max_model_len=60, **options)
        self.engine._door.open()

    def step(self) -> None:
        self.engine._take_mail(wait=False)
        if self.engine._running or self.engine._waiting:
            self.engine._step_or_fail()

    @property
    def sequences(self) -> list[Sequence]:
        return [*self.engine._running, *self.engine._waiting]

    def check(self) -> None:
        """Every row's owners are those who have it; the cache's leases are those of the sequences and drafter states."""
        sequences = self.sequences
        rows = [row for sequence in sequences for row in sequence.rows.view().tolist()]
        leases = [sequence.lease for sequence in sequences if sequence.lease is not None]
        _check_pool(self.lm.pool, rows, leases)
        for sequence in sequences:
            assert sequence.num_pending >= 1 and (sequence.has_begun or not len(sequence.rows))
        for name, drafter in self.drafters.items():
            states = [sequence.drafter_states[name] for sequence in sequences if name in sequence.drafter_states]
            if isinstance(drafter, CausalLMDrafter | HeadDrafter):
                held = [row for state in states for row in (*state.rows.view().tolist(), *state.node_rows.values())]
                _check_pool(drafter.lm.pool, held, [state.lease for state in states if state.lease is not None])


def _check_pool(pool: RowPool, held: list[int], leases: list[Any]) -> None:
    pool.check()
    owners = [0] * pool.num_rows
    if isinstance(pool.reserve, PrefixCache):
        pool.reserve.check(leases)
        held = [*held, *pool.reserve.rows()]
    for row in held:
        owners[row] += 1
    assert owners == pool.owners().tolist()


class Life(RuleBasedStateMachine):
    """Requests of few tokens over a small vocabulary, so that they share beginnings; rows for two or three of them."""

    kind = "lm"

    def __init__(self) -> None:
        super().__init__()
        self.world = Running(self.kind, num_rows=NUM_ROWS, limits=Limits(max_num_seqs=4, prefill_chunk=5))
        self.forward = self.world.lm.forward
        self.pending: list[tuple[Pending, list[int], int]] = []
        self.faults = 0

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=20),
        schedule=st.sampled_from(NAMES),
        count=st.integers(1, 30),
        again=st.integers(1, 3),
    )
    def submit(self, prompt: list[int], schedule: str, count: int, again: int) -> None:
        for _ in range(again):
            self.pending.append((self.world.submit(prompt, schedule, max_tokens=count), prompt, count))

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.world.step()

    @precondition(lambda self: self.pending)
    @rule(which=st.integers(0))
    def abort(self, which: int) -> None:
        self.world.engine.abort(self.pending[which % len(self.pending)][0].id)

    @rule(fault=st.sampled_from(sorted(FAULTS)), after=st.booleans())
    def break_a_step(self, fault: str, after: bool) -> None:
        def broken(segments: Any) -> Any:
            if after:
                self.forward(segments)
            raise FAULTS[fault]("no luck")

        self.world.lm.forward = broken  # type: ignore[method-assign]
        self.world.step()
        self.world.lm.forward = self.forward  # type: ignore[method-assign]
        self.world.engine._failed_steps = 0

    @rule(share=st.floats(0, 1))
    def evict(self, share: float) -> None:
        for pool in [self.world.lm.pool, *(d.lm.pool for d in self.world.drafters.values() if hasattr(d, "lm"))]:
            if pool.reserve is not None:
                pool.reserve.evict(int(share * pool.reserve.num_unused))

    @precondition(lambda self: len(self.world.engine._running) > 1)
    @rule()
    def give_way(self) -> None:
        """As if rows had run out."""
        engine = self.world.engine
        taken = engine.target.pool.allocate(engine.target.pool.num_available)
        engine._make_room([])
        engine.target.pool.release(taken)

    @invariant()
    def the_books_are_exact(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        for _ in range(3000):
            if not self.world.sequences and not self.world.engine._door.has_mail:
                break
            self.world.step()
        assert not self.world.sequences, "a request never ended"
        for one, prompt, count in self.pending:
            reply = one.result(timeout=1)
            want = plain(prompt, count)
            assert reply.finish is not FinishReason.LENGTH or reply.tokens == want
            assert reply.tokens == want[: len(reply.tokens)]
        self.world.check()
        self.world.engine._memory.clear()
        self.world.check_books()


def plain(prompt: list[int], count: int) -> list[int]:
    """What an engine with all the rows it wants and no cache answers."""
    key = (*prompt, -count)
    if key not in _plain:
        world = Running("lm", num_rows=1000, limits=Limits(prefix_cache=False))
        pending = world.submit(prompt, "ar", max_tokens=count)
        while world.sequences or world.engine._door.has_mail:
            world.step()
        _plain[key] = pending.result(timeout=1).tokens
    return _plain[key]


class LifeWithHead(Life):
    kind = "head"


class LifeWithTail(Life):
    kind = "tail"


for machine in (Life, LifeWithHead, LifeWithTail):
    machine.TestCase.settings = settings(max_examples=6, stateful_step_count=14)
TestBooksWithModels = Life.TestCase
TestBooksWithAHead = LifeWithHead.TestCase
TestBooksWithATail = LifeWithTail.TestCase


def test_the_books_notice_a_row_that_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a sequence that ends without giving its rows back."""
    world = Running("lm", num_rows=NUM_ROWS)
    pending = world.submit([1, 2, 3], "ar", max_tokens=3)
    monkeypatch.setattr(world.engine._memory, "leave", lambda sequence, keep: None)
    for _ in range(4):
        world.step()
    deltas: list[Delta] = [pending.next(timeout=1) for _ in range(3)]
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    with pytest.raises(AssertionError):
        world.check()


@pytest.mark.parametrize("lasting", [False, True])
def test_a_step_without_the_rows_it_counted_on_keeps_the_books(lasting: bool) -> None:
    """Rows that vanish between the count and the forward, our own fault: once, and it is tried again; for good, and it ends."""
    world = Running("lm", num_rows=NUM_ROWS, limits=Limits(max_num_seqs=4))
    pending = [world.submit([1, 2, n], "treegraft", max_tokens=20) for n in range(3)]
    for _ in range(3):
        world.step()
    pool = world.lm.pool
    allocate, calls = pool.allocate, 0

    def stingy(count: int) -> list[int]:
        nonlocal calls
        calls += 1
        if calls == 2 or (lasting and calls > 1):
            raise OutOfRows("gone")
        return allocate(count)

    pool.allocate = stingy  # type: ignore[method-assign]
    world.step()
    pool.allocate = allocate  # type: ignore[method-assign]
    world.check()
    while world.sequences:
        world.step()
        world.check()
    replies = [one.result(timeout=1) for one in pending]
    assert {reply.finish for reply in replies} == {FinishReason.ERROR if lasting else FinishReason.LENGTH}
    for n, reply in enumerate(replies):
        assert reply.tokens == plain([1, 2, n], 20)[: len(reply.tokens)]
    world.engine._memory.clear()
    world.check_books()


def test_a_cache_that_breaks_costs_hits_and_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeping rows is a favor to later requests; that it fails is a line in the log of this one."""
    world = Running("lm", num_rows=NUM_ROWS)
    monkeypatch.setattr(world.lm.pool, "num_sound", lambda rows: (_ for _ in ()).throw(MemoryError("full")))
    pending = world.submit([1, 2, 3, 4], "treegraft", max_tokens=10)
    deadline = time.monotonic() + 60
    while world.sequences or world.engine._door.has_mail:
        assert time.monotonic() < deadline
        world.step()
        world.check()
    assert pending.result(timeout=1).tokens == plain([1, 2, 3, 4], 10)
    assert world.lm.pool.num_used == 0
