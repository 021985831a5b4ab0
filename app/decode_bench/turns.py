"""Methods that take turns over the same prompts, and what each answer took.

Prompts are asked in groups of as many as are answered at once; one at a time, a group is a prompt. Everything measured is
kept per group: prompts differ more than methods do, so methods are compared prompt by prompt, and within one repeat, since the
machine drifts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from app.commands.serve import say
from app.local import Question
from app.measure import Spread
from app.proof import Difference, Judge, Outcome
from engine.request import RequestStats


@dataclass(frozen=True, slots=True)
class Pace:
    """How one answer came: its first tokens when the prompt was read, then block by block."""

    first_s: float  # seconds until the first block was there
    num_first: int  # tokens of that block
    num_blocks: int  # passes of the target that emitted tokens, the first block's included


@dataclass(frozen=True, slots=True)
class Work:
    """The answers to one group of prompts."""

    seconds: float  # of the whole group, reading the prompts included
    outcomes: tuple[Outcome, ...]  # in the order of the prompts
    paces: tuple[Pace, ...]  # likewise
    stats: tuple[RequestStats, ...] = ()  # likewise; none from a method that counts nothing

    @property
    def num_tokens(self) -> int:
        """Tokens written."""
        return sum(len(outcome.token_ids) for outcome in self.outcomes)

    @property
    def speed(self) -> float:
        """Tokens per second, from the question to the last token."""
        return self.num_tokens / self.seconds

    @property
    def decoding_speed(self) -> float | None:
        """Tokens per second once the prompt is read; None for a group of several prompts, or an answer of one block."""
        if len(self.paces) != 1 or self.paces[0].num_blocks < 2:
            return None
        (pace,) = self.paces
        seconds = self.seconds - pace.first_s
        return (self.num_tokens - pace.num_first) / seconds if seconds > 0 else None


class Log(Protocol):
    """What was measured before, and where new measurements go; see :class:`app.decode_bench.run_log.RunLog`."""

    def group(self, repeat: int, group: int, methods: Sequence[str], /) -> list[Work] | None: ...
    def append(self, repeat: int, group: int, method: str, work: Work, /) -> None: ...


@dataclass(slots=True)
class Method:
    """One way to answer, and what it took."""

    name: str
    answer: Callable[[Sequence[Question]], Work] = field(repr=False)
    groups: frozenset[int] | None = None  # it is asked these; None: all
    works: list[dict[int, Work]] = field(default_factory=list)  # per repeat, by group

    def takes(self, group: int) -> bool:
        """Whether it is asked group number `group`."""
        return self.groups is None or group in self.groups

    def seconds(self) -> list[float]:
        """Of each repeat."""
        return [sum(work.seconds for work in works.values()) for works in self.works]

    def tokens(self) -> list[int]:
        """Of each repeat."""
        return [sum(work.num_tokens for work in works.values()) for works in self.works]

    def speeds(self) -> list[float]:
        """Tokens per second of each repeat."""
        return [tokens / seconds for tokens, seconds in zip(self.tokens(), self.seconds(), strict=True)]

    def stats(self, groups: Sequence[int] | None = None) -> list[RequestStats]:
        """Counts of all answers to `groups` (None: all), over all repeats."""
        return [stats for work in self.chosen(groups) for stats in work.stats]

    def chosen(self, groups: Sequence[int] | None = None) -> list[Work]:
        """Its work on `groups` (None: all), over all repeats."""
        return [work for works in self.works for group, work in works.items() if groups is None or group in groups]

    def total(self, name: str) -> float:
        """Sum of a count over all answers."""
        return float(sum(getattr(stats, name) for stats in self.stats()))


def num_answers(methods: Sequence[Method], num_questions: int, *, concurrency: int, repeats: int) -> int:
    """Groups that the methods answer in all, warm-up left out."""
    groups = range(-(-num_questions // concurrency))
    return repeats * sum(method.takes(group) for method in methods for group in groups)


def measure(
    methods: Sequence[Method],
    questions: Sequence[Question],
    *,
    concurrency: int,
    repeats: int,
    log: Log | None = None,
    told: Callable[[str], None] = lambda method: None,
) -> None:
    """Let the methods take turns over all questions, `repeats` times, after one group of warm-up; who begins changes.

    What `log` holds is taken from there. A group is taken whole or asked anew: what is compared was measured together.
    `told` hears the name of a method for every group it has answered, warm-up left out.
    """
    groups = [questions[i : i + concurrency] for i in range(0, len(questions), concurrency)]
    is_warm = False
    for repeat in range(repeats):
        for method in methods:
            method.works.append({})
        for number, group in enumerate(groups):
            asked = [method for method in methods if method.takes(number)]
            known = log.group(repeat, number, [method.name for method in asked]) if log is not None else None
            if known is not None:
                for method, work in zip(asked, known, strict=True):
                    method.works[repeat][number] = work
                    told(method.name)
                continue
            if not is_warm:
                for method in methods:
                    method.answer(groups[0])
                is_warm = True
            turn = repeat * len(groups) + number
            for offset in range(len(asked)):
                method = asked[(turn + offset) % len(asked)]
                work = method.works[repeat][number] = method.answer(group)
                if log is not None:
                    log.append(repeat, number, method.name, work)
                told(method.name)
        say(f"repeat {repeat + 1} of {repeats} done")


def ratios(
    method: Method, base: Method, speed: Callable[[Work], float | None] = lambda work: work.speed
) -> dict[int, float]:
    """Speed of `method` relative to `base`, by group: the median over the repeats of the ratio within one.

    Of the groups that both were asked and that have a speed in every repeat.
    """
    found: dict[int, float] = {}
    repeats = list(zip(method.works, base.works, strict=True))
    for group in (group for group in method.works[0] if group in base.works[0]):
        pairs = [(speed(ours[group]), speed(its[group])) for ours, its in repeats]
        samples = [mine / others for mine, others in pairs if mine and others]
        if len(samples) == len(pairs):
            found[group] = statistics.median(samples)
    return found


def deciles(samples: Sequence[float]) -> Spread:
    """Median, 10th and 90th percentile (linear between samples, as numpy has them)."""
    if len(samples) == 1:
        return Spread(samples[0], samples[0], samples[0])
    cuts = statistics.quantiles(samples, n=10, method="inclusive")
    return Spread(cuts[4], cuts[0], cuts[8])


def differences(method: Method, plain: Method, questions: Sequence[Question], judge: Judge) -> list[Difference]:
    """Where the method's texts part from those of plain decoding, over all repeats.

    The first repeat of `plain` is the reference, for its own later repeats too.
    """
    found = []
    for works in method.works:
        for group, work in works.items():
            expected = plain.works[0][group].outcomes
            first = group * len(plain.works[0][0].outcomes)  # every group but the last is as large as the first
            for index, pair in enumerate(zip(expected, work.outcomes, strict=True), first):
                found.append(judge.weigh(index, questions[index], *pair))
    return [item for item in found if item is not None]
