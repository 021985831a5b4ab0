"""Asking an engine in this very process, without HTTP: for commands, proofs and benches.

    for delta in stream(engine, Question((1, 2, 3), max_tokens=20)): ...
    answers = ask_all(engine, questions, concurrency=8)
"""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from app.bridge import Engine
from app.errors import RequestFailed
from engine.request import Delta, FinishReason, Request, RequestStats
from engine.sequence import TreeRecord
from models.sampling import SamplingParams

_ids = itertools.count()


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt and how to continue it."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    schedule: str | None = None  # None: the engine's default
    keep_trees: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """All deltas of one request, put together."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stats: RequestStats
    trees: tuple[TreeRecord, ...] = ()  # as many as the question asked to keep, newest last
    num_first: int = 0  # tokens that came first, all at once


@contextmanager
def running(engine: Engine) -> Iterator[None]:
    """A started engine, which is stopped in the end; what still runs then is given up."""
    engine.start()
    try:
        yield
    finally:
        engine.stop()


def stream(engine: Engine, question: Question) -> Iterator[Delta]:
    """The deltas of one answer, as they come; the last one has a finish reason. Leaving early aborts the request.

    Raises what `submit` raises, and RequestFailed.
    """
    deltas: queue.SimpleQueue[Delta] = queue.SimpleQueue()
    request_id = _submit(engine, question, deltas.put)
    try:
        while True:
            delta = deltas.get()
            _check(delta)
            yield delta
            if delta.finish_reason is not None:
                return
    finally:
        engine.abort(request_id)


def ask_all(
    engine: Engine,
    questions: Sequence[Question],
    *,
    concurrency: int = 1,
    on_answer: Callable[[], None] = lambda: None,
) -> list[Answer]:
    """Answers in the order of `questions`, of which `concurrency` are in flight as long as there are that many left.

    Raises what `submit` raises, and RequestFailed; then everything still in flight is aborted.
    """
    deltas: queue.SimpleQueue[Delta] = queue.SimpleQueue()
    collected: dict[str, list[Delta]] = {}
    answers: dict[str, Answer] = {}
    order: list[str] = []
    left = iter(questions)
    try:
        for question in itertools.islice(left, concurrency):
            order.append(_submit(engine, question, deltas.put))
        while len(answers) < len(order):
            delta = deltas.get()
            _check(delta)
            collected.setdefault(delta.request_id, []).append(delta)
            if delta.finish_reason is not None:
                answers[delta.request_id] = _joined(collected.pop(delta.request_id))
                on_answer()
                for question in itertools.islice(left, 1):
                    order.append(_submit(engine, question, deltas.put))
    finally:
        for request_id in order:
            engine.abort(request_id)
    return [answers[request_id] for request_id in order]


def _submit(engine: Engine, question: Question, emit: Callable[[Delta], None]) -> str:
    request = Request(
        id=f"local-{next(_ids)}",
        prompt=question.prompt,
        sampling=question.sampling,
        max_tokens=question.max_tokens,
        emit=emit,
        schedule=question.schedule,
        keep_trees=question.keep_trees,
    )
    engine.submit(request)
    return request.id


def _check(delta: Delta) -> None:
    if delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
        raise RequestFailed(delta.error or "the engine gave the request up")


def _joined(deltas: Sequence[Delta]) -> Answer:
    last = deltas[-1]
    assert last.finish_reason is not None and last.stats is not None, "the last delta says how it ended"
    return Answer(
        tuple(token for delta in deltas for token in delta.token_ids),
        "".join(delta.text for delta in deltas),
        last.finish_reason,
        last.stats,
        tuple(record for record in last.trees if isinstance(record, TreeRecord)),
        next((len(delta.token_ids) for delta in deltas if delta.token_ids), 0),
    )
