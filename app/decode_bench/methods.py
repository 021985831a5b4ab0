"""The methods that a run compares: every schedule of our engine, and transformers' own ways in a process of their own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from app.decode_bench.plain_process import PlainProcess
from app.decode_bench.turns import Method, Pace, Work
from app.local import Answer, Question, ask_all
from app.proof import Outcome
from app.serving import LoadedEngine
from engine.request import FinishReason

TRANSFORMERS, LOOKUP, ASSISTED = "transformers", "transformers-lookup", "transformers-assisted"
THEIRS = (TRANSFORMERS, LOOKUP, ASSISTED)
"""Methods that are compared by their speed only."""


@dataclass(frozen=True, slots=True)
class Theirs:
    """Which of transformers' ways take part."""

    plain: bool = False  # generate
    lookup: int | None = None  # generate with prompt lookup of so many tokens
    assistant: str | None = None  # assisted generation by this model, a folder or hub id

    @property
    def names(self) -> list[str]:
        """Of the methods, in the order of `THEIRS`."""
        chosen = (self.plain, self.lookup is not None, self.assistant is not None)
        return [name for name, takes_part in zip(THEIRS, chosen, strict=True) if takes_part]


def our_method(loaded: LoadedEngine, schedule: str, concurrency: int) -> Method:
    """One schedule of the engine, which must be running when it is asked."""

    def answer(group: Sequence[Question]) -> Work:
        asked = [Question(q.prompt, q.max_tokens, q.sampling, schedule) for q in group]
        start = time.perf_counter()
        answers = ask_all(loaded.engine, asked, concurrency=concurrency)
        seconds = time.perf_counter() - start
        outcomes = tuple(Outcome(a.token_ids, str(a.finish_reason)) for a in answers)
        return Work(seconds, outcomes, tuple(map(_pace, answers)), tuple(a.stats for a in answers))

    return Method(schedule, answer)


def _pace(answer: Answer) -> Pace:
    stats = answer.stats
    return Pace(stats.first_token_s - stats.admitted_s, answer.num_first, stats.num_steps)


def their_method(
    name: str, process: PlainProcess, theirs: Theirs, stop_tokens: frozenset[int], groups: frozenset[int]
) -> Method:
    """One of `THEIRS`. It takes one prompt at a time, so that a group is a prompt; its seconds leave out the pipes."""

    def answer(group: Sequence[Question]) -> Work:
        (question,) = group
        lookup = theirs.lookup if name == LOOKUP else None
        written = process.generate(question.prompt, question.max_tokens, lookup=lookup, assisted=name == ASSISTED)
        reason = FinishReason.STOP if written.token_ids[-1] in stop_tokens else FinishReason.LENGTH
        pace = Pace(written.first_s, written.num_first, written.num_blocks)
        return Work(written.seconds, (Outcome(tuple(written.token_ids), str(reason)),), (pace,))

    return Method(name, answer, groups)


def spread_evenly(total: int, number: int | None) -> frozenset[int]:
    """`number` of the indices below `total`, at equal distances, the first one among them; all if `number` is None."""
    number = total if number is None else min(number, total)
    return frozenset(i * total // number for i in range(number))
