"""The engine: one thread that owns the models, the caches and the sequences, and one loop over them.

Requests come in through a door (:mod:`engine.door`) and leave as deltas (:mod:`engine.outlet`). Each step admits what fits,
drafts for every decoding sequence, lets the target score prefill chunks and trees in one forward, and commits. When rows run
out, the youngest sequence gives way and is taken up again later. Speculation being off, or one arm of a comparison, is an
attribute of a sequence, not a branch here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import replace

from drafters.base import Drafter, KeepsRows
from engine.admission import Limits, check_request, check_rules, choose_schedule, is_lossless
from engine.commit import Block
from engine.door import Door
from engine.draft import close_drafters, grow_trees, show_hidden
from engine.isolate import NothingScored, can_score, is_out_of_memory, score_apart
from engine.logprobs import rate_prompt
from engine.memory import Memory
from engine.outlet import Observer, Outlet
from engine.request import FinishReason, Request, RequestStats, StepStats, StepTimes
from engine.sequence import Sequence, open_sequence
from engine.settle import FAILED, settle
from engine.size import Given, begin_step, choose_nodes, end_step
from engine.steering import PriceState, Steering
from engine.step_stats import by_schedule, close_step
from engine.text import TextStream
from engine.turn import Turn, fitting_nodes, plan_turn
from models.causal_lm import CausalLM
from models.kv_cache import RowPool
from scheduler.auto_budget import AutoBudget
from scheduler.registry import PLAIN
from scheduler.schedule import Schedule

log = logging.getLogger(__name__)

_NO_MEMORY = "The server ran out of memory while it worked on this request."
_FAILURES_TO_DIE = 3  # failed steps in a row after which the engine gives up


class Engine:
    """Serves one target with named schedules over named drafters. `start` it; then `submit` from any thread."""

    def __init__(
        self,
        *,
        target: CausalLM,
        drafters: Mapping[str, Drafter],
        schedules: Mapping[str, Schedule],
        default_schedule: str,
        decode: Callable[[Items[int]], str],
        stop_tokens: frozenset[int],
        byte_ids: frozenset[int] = frozenset(),
        model_id: str,
        max_model_len: int | None = None,
        limits: Limits | None = None,
        max_budget: int = 512,
        allow_lossy: bool = False,
    ) -> None:
        if PLAIN not in schedules or default_schedule not in schedules:
            raise ValueError(f"schedule {default_schedule!r} is not one of {', '.join(schedules)}")
        for schedule in schedules.values():
            check_rules(schedule, allow_lossy=allow_lossy)
        if not is_lossless(schedules[default_schedule]):
            raise ValueError(f"schedule {default_schedule} changes the text; it cannot be the default, requests must name it")
        self.schedules = dict(schedules)
        self.default_schedule = default_schedule
        self.drafter_names = list(drafters)
        self.model_id = model_id
        self.max_model_len = min(max_model_len or target.max_positions, target.max_positions)
        self.vocab_size = target.num_tokens
        self.limits = limits or Limits()
        self._max_budget = max_budget
        self.target = target
        self._drafters = dict(drafters)
        self._decode = decode
        self._byte_ids = byte_ids
        self.stop_tokens = stop_tokens
        self.auto: AutoBudget | None = None
        """Decides for schedules that leave their budget to the server; None: they take all that their policies chose."""
        self.steering: Steering | None = None
        """Takes schedules that lose against plain decoding out of use for a while; None: nobody does."""
        self.outlet = Outlet()
        """Tells observers and callers."""
        self._door = Door(self.limits)
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # oldest first
        self._memory = Memory(target.pool, self._drafters, keeps_prefixes=self.limits.prefix_cache)
        self._failed_steps = 0
        self._counted_until = time.perf_counter()  # what the engine did up to then is in some record, or was idling
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # ---- any thread -------------------------------------------------------------------------------------------------

    @property
    def drafters(self) -> Mapping[str, Drafter]:
        """The drafters themselves, to be measured; the engine thread's alone while it runs."""
        return self._drafters

    @property
    def max_num_seqs(self) -> int:
        """Sequences that advance together."""
        return self.limits.max_num_seqs

    @property
    def max_waiting(self) -> int:
        """Requests that may wait besides the running ones."""
        return self.limits.max_waiting

    @property
    def num_running(self) -> int:
        """Sequences that advance now."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests accepted but not admitted yet."""
        return max(self._door.num_inside - len(self._running), 0)

    @property
    def row_use(self) -> dict[str, tuple[int, int]]:
        """Cache rows of texts in flight, and all, by owner: "target", and the drafters that keep some of their own.

        Rows that are only kept for texts to come count as free.
        """
        return {name: (pool.num_rows - pool.num_available, pool.num_rows) for name, pool in self._pools.items()}

    @property
    def row_bytes(self) -> dict[str, int]:
        """Bytes of cache rows that have been used at least once, by owner as in `row_use`."""
        return {name: pool.num_bytes for name, pool in self._pools.items()}

    @property
    def _pools(self) -> dict[str, RowPool]:
        pools = {"target": self.target.pool}
        return pools | {name: drafter.lm.pool for name, drafter in self._drafters.items() if isinstance(drafter, KeepsRows)}

    def price_state(self) -> PriceState | None:
        """What prices and breakers say now; None where neither decides anything."""
        if self.auto is None or self.steering is None:
            return None
        return self.steering.price_state(self.auto)

    def subscribe(self, observer: Observer) -> None:
        """Tell `observer` of every step and every ended request; before `start`."""
        self.outlet.subscribe(observer)

    def start(self) -> None:
        """Start the worker thread."""
        self._thread.start()
        self._door.open()

    def health(self) -> str:
        """ "ok", "stalled", "stopping" while accepted requests finish, "stopped" or "failed: why"."""
        return self._door.health(is_alive=self._thread.is_alive())

    def submit(self, request: Request) -> None:
        """Queue a request. Raises RequestError, QueueFull or EngineStopped, and then nothing was queued."""
        schedule = choose_schedule(
            request,
            self.schedules,
            self.default_schedule,
            max_budget=self._max_budget,
            has_prices=self.auto is not None,
        )
        check_request(
            request,
            schedule,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            num_rows=self.target.pool.num_rows,
            stop_tokens=self.stop_tokens,
        )
        text = TextStream(self._decode, request.stop, byte_ids=self._byte_ids, num_deaf=request.min_tokens)
        sequence = open_sequence(
            request,
            schedule,
            text,
            stop_tokens=self.stop_tokens,
            max_model_len=self.max_model_len,
            vocab_size=self.target.vocab_size,
        )
        self._door.enter(sequence)

    def abort(self, request_id: str) -> None:
        """End a request early; it gets its last delta unless it has ended already. Unknown ids are ignored."""
        self._door.abort(request_id)

    def stop(self, *, drain_s: float = 0.0) -> None:
        """Refuse new requests, let accepted ones finish for `drain_s` seconds, abort the rest, end the thread."""
        self._door.shut(drain_s)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    # ---- engine thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # a fault outside of any step; nobody may be left waiting for a dead thread
            log.exception("the engine died")
            self._door.fail(f"the loop failed with {type(error).__name__}")
        reason = FinishReason.ABORT if self._door.failure is None else FinishReason.ERROR
        self._take_mail(wait=False)  # nothing can be put behind this: no request is accepted any more
        for sequence in [*self._running, *self._waiting]:
            self._finish(sequence, reason, self._door.failure)
        self._memory.clear()

    def _serve(self) -> None:
        while self._door.failure is None:
            is_idle = not (self._running or self._waiting)
            self._take_mail(wait=is_idle)
            if is_idle:
                self._counted_until = time.perf_counter()
            if self._door.is_over:
                return
            if self._running or self._waiting:
                self._step_or_fail()

    def _take_mail(self, *, wait: bool) -> None:
        for mail in self._door.mail(wait=wait):
            if isinstance(mail, Sequence):
                self._waiting.append(mail)
                continue
            for sequence in [s for s in (*self._running, *self._waiting) if s.request.id == mail]:
                self._finish(sequence, FinishReason.ABORT)

    def _step_or_fail(self) -> None:
        """One step; if it raises, its sequences fail, and after a few failures in a row so does the engine.

        Unless it can still score: one caller whose request cannot be served must not end the server by asking three times.
        """
        try:
            self.step()
            self._failed_steps = 0
        except Exception as error:
            log.exception("engine step failed; %d running requests end with an error", len(self._running))
            self._failed_steps += 1
            self._counted_until = time.perf_counter()
            for sequence in list(self._running):
                self._finish(sequence, FinishReason.ERROR, _why(error))
            if self._failed_steps >= _FAILURES_TO_DIE and not (isinstance(error, NothingScored) and can_score(self.target)):
                cause = type(error.__cause__ or error).__name__
                self._door.fail(f"{self._failed_steps} steps in a row failed, the last with {cause}")
        self._door.sign()

    def step(self) -> None:
        """Admit, draft, score, commit, emit."""
        self._admit()
        begin, draft_ns, auto = time.perf_counter(), time.time_ns(), self.auto
        records = self._memory.begin_ready(self._running)
        turn = self._make_room(records)
        if self.steering is not None:
            self.steering.begin(len(turn.decoding))
            for sequence in turn.decoding:
                self.steering.steer(sequence)
        if auto is not None:
            begin_step(auto, turn.prefills, turn.decoding)
        drafts = grow_trees(turn.decoding, self._drafters, vocab_size=self.vocab_size, auto=auto)
        chosen = fitting_nodes(drafts, choose_nodes(drafts, auto), self._memory.num_available - turn.num_rows)
        verify_ns = time.time_ns()
        parts = score_apart(self.target, turn.prefills, drafts, chosen)
        commit_ns = time.time_ns()
        for sequence, error in parts.failed:
            self._finish(sequence, FinishReason.ERROR, _why(error))
        share = parts.verify_s / max(len(parts.fed) + len(parts.scored), 1)
        num_rows = sum(len(item.rows) for item in parts.scored) + sum(count for _, count in turn.prefills)
        was_decoding = not turn.prefills and all(draft.sequence.num_pending == 1 for draft in drafts)
        for part in parts.fed:
            sequence = part.sequence
            step = StepStats(sequence.asked.name, arm=sequence.request.arm, verify_s=share)
            step.num_prompt_tokens = sequence.newly_read()
            fed = range(len(sequence.rows) - part.start)
            rate_prompt(sequence, part.start, part.prompt_logits)
            step.halts = tuple(show_hidden(sequence, self._drafters, part.start, part.hidden, fed))
            self._memory.share(sequence)
            records.append((sequence.stats, step))
        blocks: list[tuple[Sequence, Block]] = []
        given: list[Given] = []
        for item in parts.scored:
            sequence, has_read = item.draft.sequence, item.draft.sequence.num_pending > 1
            settled = settle(item, share, pool=self.target.pool, drafters=self._drafters, auto=auto)
            if isinstance(settled, str):
                self._finish(sequence, FinishReason.ERROR, settled)
                continue
            if has_read:
                self._memory.share(sequence)
            records.append((sequence.stats, settled.counted))
            blocks.append((sequence, settled.block))
            own_ms = 1000 * (settled.counted.draft_s + settled.counted.tree_s)
            given.append(Given(sequence, len(settled.block.token_ids), len(item.nodes) - 1, own_ms))
        if auto is not None and parts.num_passes == 1:  # what several passes took is the price of none
            auto.forwarded(num_rows, 1000 * parts.verify_s)
            if was_decoding and given:
                end_step(auto, self.steering, given, 1000 * (time.perf_counter() - begin))
        since, self._counted_until = self._counted_until, time.perf_counter()
        close_step(records, self._counted_until - since, time.monotonic())
        times = StepTimes(draft_ns, verify_ns, commit_ns, time.time_ns())
        # Observers first: whoever reads the counters right after an answer should find it counted.
        self.outlet.on_step(by_schedule(step for _, step in records))
        for sequence, block in blocks:
            block = replace(block, times=times)
            if block.finish is None:
                self.outlet.send(sequence, block)
            else:
                self._finish(sequence, block.finish, block=block)

    def _admit(self) -> None:
        """Move waiting sequences to the running ones, in order of arrival, as far as slots and rows go."""
        while self._waiting and len(self._running) < self.limits.max_num_seqs:
            if not self._memory.has_room_for(self._waiting[0], self._running):
                return
            sequence = self._waiting.popleft()
            sequence.stats.admitted_s = sequence.stats.admitted_s or time.monotonic()
            self._memory.look_around(sequence, self._running)
            self._running.append(sequence)

    def _make_room(self, records: list[tuple[RequestStats, StepStats]]) -> Turn:
        """What this step does. While there are not the rows for it, the youngest sequence goes back to the queue."""
        while True:
            turn = plan_turn(self._running, self.limits.prefill_chunk)
            if turn.num_rows <= self._memory.num_available or len(self._running) == 1:
                return turn
            sequence = self._running.pop()
            self._waiting.appendleft(sequence)
            if sequence.has_begun:
                sequence.stats.num_preemptions += 1
                step = StepStats(sequence.asked.name, arm=sequence.request.arm, num_preemptions=1)
                records.append((sequence.stats, step))
            close_drafters(sequence, self._drafters, keep=True)
            self._memory.leave(sequence, keep=True)

    def _finish(
        self, sequence: Sequence, reason: FinishReason, error: str | None = None, block: Block | None = None
    ) -> None:
        """End a request: free all it holds, send its last delta, tell the observers."""
        (self._running if sequence in self._running else self._waiting).remove(sequence)
        is_sound = reason is not FinishReason.ERROR
        close_drafters(sequence, self._drafters, keep=is_sound)
        self._memory.leave(sequence, keep=is_sound)
        sequence.stats.finished_s = time.monotonic()
        self._door.leave(sequence.request.id)
        self.outlet.on_finish(sequence.stats, reason)
        self.outlet.send_last(sequence, reason, error, block)


def _why(error: BaseException) -> str:
    """What the caller is told of an error of ours; the rest is in the log."""
    return _NO_MEMORY if is_out_of_memory(error.__cause__ or error) else FAILED
