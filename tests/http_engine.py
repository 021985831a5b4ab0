"""A scripted engine and a real server around it, for tests of the HTTP edge.

The engine has its own thread and keeps the contract of the real one, but its answers are made up: at temperature 0 the
alphabet over and over, above it letters drawn from the seed. Under every schedule but "ar" each step drafts four nodes,
two of each drafter, of which one of each is accepted, so it emits three tokens.
"""

from __future__ import annotations

import random
import string
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from app.config import Settings
from app.main import create_app
from app.serving import LoadedEngine
from engine.request import (
    Delta,
    DrafterCount,
    EngineStopped,
    FinishReason,
    QueueFull,
    Request,
    RequestStats,
    StepStats,
)
from engine.step_stats import close_step
from models.toy import byte_tokenizer

MAX_MODEL_LEN = 64
MODEL = "toy/scripted"
NOTHING_CACHED = {"prompt_tokens_details": {"cached_tokens": 0}}  # what the usage of its answers holds besides counts


@dataclass(frozen=True)
class ScriptedSchedule:
    """What the edge reads of a schedule."""

    name: str
    description: str
    budget: int
    drafters: dict[str, str]
    is_auto: bool = False
    greedy_verifier: str = "greedy"
    sampling_verifier: str = "walk"
    is_auto: bool = False


@dataclass
class _Running:
    request: Request
    answer: Iterator[int]
    stats: RequestStats
    text: str = ""
    sent: int = 0


@dataclass
class ScriptedEngine:
    """An engine whose faults can be chosen; :meth:`reset` takes them back."""

    tokenizer: Any = field(default_factory=byte_tokenizer)
    model_id: str = MODEL
    max_model_len: int = MAX_MODEL_LEN
    max_num_seqs: int = 2
    max_waiting: int = 4

    def __post_init__(self) -> None:
        self.vocab_size = len(self.tokenizer)
        self.stop_tokens = frozenset({self.tokenizer.eos_token_id})
        names = (("ar", "one token per step", 1), ("chain", "a chain", 5), ("graft", "a tree", 8))
        both = {"S": "ngram", "M": "small"}
        self.schedules = {
            name: ScriptedSchedule(name, text, budget, both if budget > 1 else {}) for name, text, budget in names
        }
        self.default_schedule = "graft"
        self.drafter_names = ["ngram", "small"]
        self.observers: list[Any] = []
        self.started = self.stopped = False
        self._lock = threading.Condition()
        self._waiting: list[_Running] = []
        self._running: list[_Running] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.reset()

    def reset(self) -> None:
        """Forget what was seen and behave well again."""
        self.pace_s = 0.0  # pause between steps
        self.fail_after: int | None = None  # steps, then every request fails
        self.end_token_after: int | None = None  # tokens, then the model ends by itself
        self.paused = False  # no steps at all
        self.state = "ok"
        self.refuse_after: int | None = None  # submissions taken, then the queue is full
        self.submitted: list[Request] = []
        self.aborted: list[str] = []

    # What the edge calls.

    def start(self) -> None:
        self.started = True
        self._thread.start()

    def stop(self, *, drain_s: float = 0.0) -> None:
        with self._lock:
            self.stopped = True
            self._lock.notify()
        if self.started:
            self._thread.join(5)

    def submit(self, request: Request) -> None:
        with self._lock:
            if self.stopped:
                raise EngineStopped("The engine has stopped.")
            if self.refuse_after is not None and len(self.submitted) >= self.refuse_after:
                raise QueueFull("The queue is full.", retry_after_s=2.5)
            if len(self._running) + len(self._waiting) >= self.max_num_seqs + self.max_waiting:
                raise QueueFull("The queue is full.")
            self.submitted.append(request)
            schedule = request.schedule or self.default_schedule
            stats = RequestStats(schedule, len(request.prompt), arm=request.arm, arrived_s=time.monotonic())
            self._waiting.append(_Running(request, self._answer(request), stats))
            self._lock.notify()

    def abort(self, request_id: str) -> None:
        with self._lock:
            self.aborted.append(request_id)

    def health(self) -> str:
        return self.state

    def subscribe(self, observer: Any) -> None:
        self.observers.append(observer)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def row_bytes(self) -> dict[str, int]:
        return {"target": 1000}

    @property
    def row_use(self) -> dict[str, tuple[int, int]]:
        return {"target": (10 * len(self._running), 100)}

    def price_state(self) -> None:
        """There are no prices here."""

    # The engine thread.

    def _run(self) -> None:
        while True:
            with self._lock:
                while not (self._waiting or self._running or self.stopped):
                    self._lock.wait()
                if self.stopped:
                    for one in (*self._running, *self._waiting):
                        self._end(one, FinishReason.ABORT)
                    return
                while self._waiting and len(self._running) < self.max_num_seqs:
                    self._running.append(self._waiting.pop(0))
                    self._running[-1].stats.admitted_s = time.monotonic()
                gone = [one for one in (*self._running, *self._waiting) if one.request.id in self.aborted]
                for one in gone:
                    (self._running if one in self._running else self._waiting).remove(one)
                    self._end(one, FinishReason.ABORT)
                running = [] if self.paused else list(self._running)
            for one in running:
                self._step(one)
            time.sleep(self.pace_s or 0.0005)

    def _step(self, one: _Running) -> None:
        stats, request = one.stats, one.request
        if self.fail_after is not None and stats.num_steps >= self.fail_after:
            self._finish(one, FinishReason.ERROR, error="the scripted fault")
            return
        drafts = stats.schedule != "ar"
        room = self.max_model_len - stats.num_prompt_tokens
        limit = room if request.max_tokens is None else min(request.max_tokens, room)
        tokens, reason = [], None
        for _ in range(3 if drafts else 1):
            tokens.append(next(one.answer))
            one.text += chr(tokens[-1])
            stop = min((i for s in request.stop if (i := one.text.find(s)) >= 0), default=-1)
            if stop >= 0:
                one.text, reason = one.text[:stop], FinishReason.STOP
            elif stats.num_output_tokens + len(tokens) == limit:
                reason = FinishReason.LENGTH
            elif stats.num_output_tokens + len(tokens) == self.end_token_after:
                reason = FinishReason.STOP
            if reason:
                break
        step = self._count(stats, len(tokens), drafts)
        self._tell(lambda observer: observer.on_step([step]))
        # Without its last characters, which may begin a stop string; with a stop string found, all is final.
        held = 0 if reason else max((len(s) - 1 for s in request.stop), default=0)
        piece = one.text[one.sent : max(len(one.text) - held, one.sent)]
        one.sent += len(piece)
        creators = ("ngram", "small", "target")[: len(tokens)] if drafts else ("target",)
        if reason is None:
            request.emit(Delta(request.id, tuple(tokens), creators, piece))
        else:
            self._finish(one, reason, tokens=tuple(tokens), creators=creators, text=piece)

    def _count(self, stats: RequestStats, num_tokens: int, drafts: bool) -> StepStats:
        accepted = min(num_tokens, 2) if drafts else 0
        new = {
            "ngram": DrafterCount(2, min(accepted, 1), 0, 1, accepted_at=[1][:accepted], draft_s=0.0001),
            "small": DrafterCount(2, max(accepted - 1, 0), 2, 2, accepted_at=[0, 1][: 2 * (accepted > 1)], draft_s=0.0009),
        }
        step = StepStats(
            stats.schedule,
            arm=stats.arm,
            num_drafts=int(drafts),
            num_steps=1,
            num_output_tokens=num_tokens,
            num_prompt_tokens=stats.num_prompt_tokens if stats.num_steps == 0 else 0,
            num_verified_nodes=5 if drafts else 1,
            num_grafts=int(drafts),
            drafters=new if drafts else {},
            drafter_steps={"ngram": 1, "small": 1} if drafts else {},
            declined={"small": 1} if drafts else {},
            halts=(("small", "context"),) if drafts and stats.num_steps == 0 else (),
            draft_s=0.001 * drafts,
            verify_s=0.002,
            num_accepted_squared=accepted**2,
            depths=[1, 1] if drafts else [],
        )
        if drafts:
            stats.num_trimmed += 3 - num_tokens
        close_step([(stats, step)], 0.004, time.monotonic())
        return step

    def _finish(self, one: _Running, reason: FinishReason, **delta: Any) -> None:
        with self._lock:
            self._running.remove(one)
        self._end(one, reason, **delta)

    def _end(self, one: _Running, reason: FinishReason, *, tokens: Sequence[int] = (), **delta: Any) -> None:
        one.stats.finished_s = time.monotonic()
        self._tell(lambda observer: observer.on_finish(one.stats, reason))
        one.request.emit(Delta(one.request.id, tuple(tokens), finish_reason=reason, stats=one.stats, **delta))

    def _tell(self, call: Callable[[Any], None]) -> None:
        for observer in self.observers:
            try:
                call(observer)
            except Exception:  # as the real engine: an observer cannot fail a request
                pass

    @staticmethod
    def _answer(request: Request) -> Iterator[int]:
        if request.sampling.greedy:
            return cycle(map(ord, string.ascii_lowercase))
        letters = random.Random(request.sampling.seed)
        return (ord(letters.choice(string.ascii_lowercase)) for _ in iter(int, 1))


def alphabet(num_chars: int) -> str:
    """What the scripted engine answers at temperature 0."""
    return "".join(islice(cycle(string.ascii_lowercase), num_chars))


@dataclass
class Server:
    """A running server."""

    url: str
    app: FastAPI
    client: httpx.Client
    engine: ScriptedEngine
    uvicorn: uvicorn.Server

    def complete(self, **body: Any) -> httpx.Response:
        """``POST /v1/completions``."""
        return self.client.post("/v1/completions", json={"prompt": "hi", "temperature": 0, **body})

    def chat(self, **body: Any) -> httpx.Response:
        """``POST /v1/chat/completions``."""
        messages = [{"role": "user", "content": "hi"}]
        return self.client.post("/v1/chat/completions", json={"messages": messages, "temperature": 0, **body})

    def metrics(self) -> dict[str, float]:
        """Every sample by its name and labels as written on the page."""
        return read_samples(self.client)

    def sums(self, name: str, **labels: str) -> float:
        """The sum of one metric over all its series that have these labels."""
        return total_of(self.metrics(), name, **labels)


def read_samples(client: httpx.Client) -> dict[str, float]:
    """Every sample of the metrics page, by its name and labels as written there."""
    lines = client.get("/metrics").text.splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))}


def total_of(samples: dict[str, float], name: str, **labels: str) -> float:
    """The sum of one metric over all its series that have these labels."""
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(
        value
        for key, value in samples.items()
        if key.partition("{")[0] == f"graftserve_{name}" and all(label in key for label in wanted)
    )


@contextmanager
def serve(
    engine: ScriptedEngine | None = None,
    *,
    load: Callable[[], LoadedEngine] | None = None,
    wait_ready: bool = True,
    on_failure: Callable[[BaseException], None] | None = None,
    **settings: Any,
) -> Iterator[Server]:
    """Run the real application under uvicorn on a free port, in a thread."""
    engine = engine or ScriptedEngine()
    load = load or (lambda: LoadedEngine(engine, engine.tokenizer))
    app = create_app(load, Settings(target="unused", **settings), on_failure=on_failure)
    options: dict[str, Any] = {"log_config": None, "access_log": False, "ws": "none", "timeout_graceful_shutdown": 2}
    config = uvicorn.Config(app, port=0, lifespan="on", **options)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    with httpx.Client(base_url=url, timeout=20) as client:
        try:
            if wait_ready:
                until(lambda: client.get("/health").status_code == 200)
            yield Server(url, app, client, engine, server)
        finally:
            client.close()
            server.should_exit = True
            thread.join(10)
    assert not thread.is_alive(), "the server did not stop"


def until(condition: Callable[[], Any], *, within_s: float = 10.0) -> None:
    """Wait for a condition that another thread brings about."""
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "the awaited condition did not come true"
        time.sleep(0.005)
