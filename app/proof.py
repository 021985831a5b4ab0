"""Is the text of every schedule the text of plain decoding? Compared token by token, on the models that are served.

At temperature 0 the reference is transformers' own `generate` on an unmodified model, or our plain decoding where weights are
not float32; above it the reference is our plain decoding with the same seed. Each schedule answers all prompts one at a time,
and again with several at once.

Where two texts part, the first different token is judged, by one plain forward of the unmodified model over the common text:
a token is chosen because its score (logit, or log-probability plus noise of the seed) is the largest, and rounding differs
with the shape of a forward. Scores closer than the tolerance are a *near tie*: shown, and no failure. Anything else is one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

import torch

from app.bridge import Engine
from app.local import Answer, Question, ask_all
from engine.noise import TargetNoise
from engine.request import FinishReason
from models.reference import PlainModel
from models.sampling import SamplingParams, probabilities
from scheduler.registry import PLAIN

GREEDY = SamplingParams(temperature=0.0)


class Model(Protocol):
    """What the judge asks; see :class:`models.reference.PlainModel`."""

    @property
    def dtype(self) -> torch.dtype: ...
    def next_logits(self, tokens: Sequence[int], /) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was written, the end token included, and why it ended."""

    token_ids: tuple[int, ...]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Difference:
    """Where an answer parts from the reference. `gap` is None where there are no two tokens to weigh."""

    prompt: int  # index
    position: int  # of the first different token in the answer
    expected: int | None  # token ids; None: this text had ended
    got: int | None
    expected_score: float | None = None  # by a plain forward over the common text
    got_score: float | None = None
    gap: float | None = None  # by how much the worse of the two misses the best score
    tolerance: float | None = None

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding explains the difference."""
        return self.gap is not None and self.tolerance is not None and self.gap < self.tolerance


@dataclass(frozen=True, slots=True)
class Trial:
    """One schedule under one condition."""

    schedule: str
    concurrency: int  # answers in flight
    sampled: bool  # temperature 1, else 0


@dataclass(frozen=True, slots=True)
class Result:
    """How the answers of one trial compare."""

    trial: Trial
    num_prompts: int
    num_tokens: int
    num_steps: int
    num_accepted: int  # drafted tokens; 0 proves nothing about speculation
    differences: tuple[Difference, ...]

    @property
    def near_ties(self) -> int:
        """Answers that part from the reference at a near tie."""
        return sum(difference.is_near_tie for difference in self.differences)

    @property
    def failures(self) -> int:
        """Answers that part from it otherwise."""
        return len(self.differences) - self.near_ties

    @property
    def equal(self) -> int:
        """Answers equal to the reference in every token and in how they end."""
        return self.num_prompts - len(self.differences)

    @property
    def verdict(self) -> str:
        """ "equal", "near ties" or "FAIL"."""
        return "FAIL" if self.failures else "near ties" if self.differences else "equal"


@dataclass(frozen=True, slots=True)
class Subject:
    """What is put to the proof: a started engine, and what it is asked."""

    engine: Engine
    prompts: Sequence[tuple[int, ...]]
    max_tokens: int  # or as many as the context holds
    seed: int  # of the first prompt at temperature 1; every other has the next one

    def questions(self, trial: Trial) -> list[Question]:
        """What a trial asks, one question per prompt."""
        return [
            Question(
                prompt,
                min(self.max_tokens, max(self.engine.max_model_len - len(prompt), 1)),
                SamplingParams(temperature=1.0, seed=self.seed + index) if trial.sampled else GREEDY,
                trial.schedule,
            )
            for index, prompt in enumerate(self.prompts)
        ]


Reference = Callable[[Sequence[int], int], Outcome]
"""(prompt, most tokens) -> the greedy text."""


class Judge:
    """Weighs the two tokens at which texts part. The model is only loaded when it is needed."""

    def __init__(self, load: Callable[[], Model], tolerance: float | None = None) -> None:
        """`tolerance` None: see :func:`tolerance_of`."""
        self._load = load
        self._model: Model | None = None
        self._tolerance = tolerance

    def weigh(self, index: int, question: Question, expected: Outcome, got: Outcome) -> Difference | None:
        """The first difference of two answers to question number `index`, or None."""
        if expected == got:
            return None
        position = _common(expected.token_ids, got.token_ids)
        wanted, written = _at(expected.token_ids, position), _at(got.token_ids, position)
        if wanted is None or written is None:  # no token against another: one of them ended wrongly
            return Difference(index, position, wanted, written)
        if self._model is None:
            self._model = self._load()
        logits = self._model.next_logits([*question.prompt, *expected.token_ids[:position]])
        scores = _scores(logits, question.sampling, position)
        values = float(scores[wanted]), float(scores[written])
        return Difference(
            index,
            position,
            wanted,
            written,
            expected_score=_finite(values[0]),
            got_score=_finite(values[1]),
            gap=_finite(float(scores.max()) - min(values)),
            tolerance=tolerance_of(self._model.dtype, float(logits.max())) if self._tolerance is None else self._tolerance,
        )


def tolerance_of(dtype: torch.dtype, top: float) -> float:
    """How far rounding may move two scores apart, for activations of `dtype` and a largest logit of `top`.

    0.001 in float32, 0.05 in half precision, or two steps between neighboring numbers where those are wider: at a logit of
    20, bfloat16 counts in eighths.
    """
    return 1e-3 if dtype == torch.float32 else max(5e-2, 2 * torch.finfo(dtype).eps * abs(top))


def plan_trials(schedules: Iterable[str], concurrency: int, *, plain_is_reference: bool) -> list[Trial]:
    """What :func:`prove` runs besides the references, in order."""
    trials = []
    for name in schedules:
        if name != PLAIN or not plain_is_reference:
            trials.append(Trial(name, 1, sampled=False))
        if concurrency > 1:
            trials.append(Trial(name, concurrency, sampled=False))
        if name != PLAIN or concurrency > 1:
            trials.append(Trial(name, concurrency, sampled=True))
    return trials


def prove(
    subject: Subject,
    trials: Sequence[Trial],
    judge: Judge,
    reference: Reference | None,
    on_answer: Callable[[str], None] = lambda who: None,
) -> list[Result]:
    """Run the references, then every trial, on a started engine.

    Args:
        reference: of temperature 0; None: our own plain decoding.
        on_answer: told after every answer who gave it; there are ``len(prompts) * (len(trials) + 2)`` of them.
    """
    greedy: list[Outcome] = []
    if reference is None:
        greedy = _outcomes(_ask(subject, Trial(PLAIN, 1, sampled=False), on_answer))
    else:
        for question in subject.questions(Trial(PLAIN, 1, sampled=False)):
            greedy.append(reference(question.prompt, question.max_tokens))
            on_answer("transformers")
    sampled = _outcomes(_ask(subject, Trial(PLAIN, 1, sampled=True), on_answer))
    results = []
    for trial in trials:
        answers = _ask(subject, trial, on_answer)
        compared = zip(subject.questions(trial), sampled if trial.sampled else greedy, _outcomes(answers), strict=True)
        weighed = [judge.weigh(index, *texts) for index, texts in enumerate(compared)]
        results.append(
            Result(
                trial,
                num_prompts=len(answers),
                num_tokens=sum(answer.stats.num_output_tokens for answer in answers),
                num_steps=sum(answer.stats.num_steps for answer in answers),
                num_accepted=sum(answer.stats.num_accepted for answer in answers),
                differences=tuple(difference for difference in weighed if difference is not None),
            )
        )
    return results


def transformers_text(model: PlainModel, stop_tokens: Set[int]) -> Reference:
    """The reference by transformers' own `generate`, with the same end tokens."""

    def write(prompt: Sequence[int], max_tokens: int) -> Outcome:
        ids = model.generate(prompt, max_tokens=max_tokens, stop_tokens=stop_tokens)
        return Outcome(tuple(ids), str(FinishReason.STOP if ids[-1] in stop_tokens else FinishReason.LENGTH))

    return write


def verdict(results: Sequence[Result]) -> str:
    """Of all trials together."""
    verdicts = {result.verdict for result in results}
    return next(word for word in ("FAIL", "near ties", "equal") if word in verdicts)


def _scores(logits: torch.Tensor, sampling: SamplingParams, position: int) -> torch.Tensor:
    """What decides at an output position: the token with the largest entry is chosen; float64 `[vocab]`.

    A race of exponentials, argmax p / E, in logarithms: log p plus Gumbel noise (see :mod:`verify.walk`).
    """
    if sampling.greedy:
        return logits.double()
    p = probabilities(logits[None], sampling)[0].double()
    return p.log() - TargetNoise(sampling.seed, position).exponentials(0, len(p)).double().log()


def _ask(subject: Subject, trial: Trial, on_answer: Callable[[str], None]) -> list[Answer]:
    who = f"{trial.schedule}, T={int(trial.sampled)}, {trial.concurrency} at once"
    return ask_all(
        subject.engine, subject.questions(trial), concurrency=trial.concurrency, on_answer=lambda: on_answer(who)
    )


def _outcomes(answers: Sequence[Answer]) -> list[Outcome]:
    return [Outcome(answer.token_ids, str(answer.finish_reason)) for answer in answers]


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    differs = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differs, min(len(a), len(b)))


def _at(ids: Sequence[int], position: int) -> int | None:
    return ids[position] if position < len(ids) else None


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None
