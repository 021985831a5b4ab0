"""What one request that had an arm came to."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from app.experiments.experiment import Arm, arm_label
from engine.request import Delta, FinishReason, RequestStats


@dataclass(frozen=True, slots=True)
class Outcome:
    """One ended request. Seconds are durations but for `at_s`, a Unix time."""

    experiment: str
    arm: str
    unit: str  # whose request it was, hashed; empty: nobody's
    at_s: float
    reason: str
    schedule: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_steps: int
    num_forwards: int
    draft_s: float
    verify_s: float
    wait_s: float | None  # until the first token
    rate: float | None  # tokens per second from the first step's end to the last one's; None: too short, or not finished

    @property
    def tau(self) -> float | None:
        """Tokens per verification; None for an answer that is not whole."""
        is_whole = self.reason in (FinishReason.STOP, FinishReason.LENGTH) and self.num_steps > 0
        return self.num_output_tokens / self.num_steps if is_whole else None


@dataclass(frozen=True, slots=True)
class Assignment:
    """The arm of one HTTP call, whose requests share it."""

    experiment: str
    arm: Arm
    unit: str
    record: Callable[[Outcome], None]  # any thread; neither blocks nor raises

    @property
    def label(self) -> str:
        """Experiment and arm in one word; neither name holds a slash."""
        return arm_label(self.experiment, self.arm.name)

    @property
    def headers(self) -> dict[str, str]:
        """What the answer says of it."""
        return {"X-Graft-Experiment": self.experiment, "X-Graft-Arm": self.arm.name}

    def watch(self, emit: Callable[[Delta], None]) -> Callable[[Delta], None]:
        """`emit`, that records how the request ended as well. Recorded first: whoever has the answer finds it counted."""

        def watched(delta: Delta) -> None:
            if delta.finish_reason is not None and delta.stats is not None:
                self.record(outcome_of(self, delta.stats, delta.finish_reason))
            emit(delta)

        return watched


def outcome_of(assignment: Assignment, stats: RequestStats, reason: FinishReason) -> Outcome:
    """The outcome of a request with these counts.

    The rate leaves out the first step, which is waiting for the prompt. That step's tokens are taken to be as many as the
    others' on average, since a speculative one emits several: ``tokens * (steps - 1) / steps`` over the time since then.
    """
    spent = stats.finished_s - stats.first_token_s
    is_answer = reason in (FinishReason.STOP, FinishReason.LENGTH)
    has_rate = is_answer and stats.num_steps > 1 and stats.first_token_s > 0 and spent > 0
    wait = stats.first_token_s - stats.arrived_s
    return Outcome(
        experiment=assignment.experiment,
        arm=assignment.arm.name,
        unit=assignment.unit,
        at_s=time.time(),
        reason=reason.value,
        schedule=stats.schedule,
        num_prompt_tokens=stats.num_prompt_tokens,
        num_output_tokens=stats.num_output_tokens,
        num_steps=stats.num_steps,
        num_forwards=sum(count.forwards for count in stats.drafters.values()),
        draft_s=stats.draft_s,
        verify_s=stats.verify_s,
        wait_s=wait if stats.first_token_s > 0 and wait > 0 else None,
        rate=stats.num_output_tokens * (stats.num_steps - 1) / stats.num_steps / spent if has_rate else None,
    )
