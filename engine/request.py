"""What goes into the engine and what comes out of it: requests, deltas, counts.

The engine thread owns everything else. A request enters through :meth:`engine.engine.Engine.submit`; its answer leaves as a
series of :class:`Delta`, each handed to ``Request.emit`` *on the engine thread* (the receiver must only queue it). Every
request ends in exactly one delta whose ``finish_reason`` is set.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

from engine.constraint import Grammar
from models.sampling import SamplingParams

if TYPE_CHECKING:
    from engine.trace import StepTrace

MAX_LOGPROBS = 20  # alternatives per token


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # an end token or a stop string
    LENGTH = "length"  # max_tokens, or the end of the context
    ABORT = "abort"  # the caller went away, or the engine stopped first
    ERROR = "error"  # our fault; Delta.error says what


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue."""

    id: str
    prompt: tuple[int, ...]  # at least one token id
    sampling: SamplingParams
    max_tokens: int | None  # None: until the context is full
    emit: Callable[[Delta], None]  # called on the engine thread, must not block
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()  # end the answer as the model's own end tokens do
    ignore_eos: bool = False  # the model's own end tokens are tokens like any other
    min_tokens: int = 0  # that many tokens come before any that ends the answer; stop strings count from the next one on
    num_logprobs: int | None = None  # log-probabilities of each token and that many alternatives, up to MAX_LOGPROBS; None: no
    prompt_logprobs: bool = False  # those of the prompt's tokens too, with as many alternatives; `num_logprobs` must be set
    schedule: str | None = None  # None: the server's default
    budget: int | Literal["auto"] | None = None  # verified nodes per step, root included; None: the schedule's own
    grammar: Grammar | None = None  # what the answer must be a text of; None: anything
    keep_trees: int = 0  # draft trees to hand out with the last delta (newest last)
    arm: str = ""  # "experiment/arm" of a comparison; only counted by, so never as many as there are requests
    trace_steps: int = 0  # first steps that are described in their deltas


@dataclass(slots=True)
class DrafterCount:
    """What one drafter did.

    ``drafted`` nodes it created were sent to verification, ``accepted`` of them became text. ``forwards`` are the batched
    calls of a drafter with a model that answered for this request; one that serves several requests counts for each.
    A step of a sequence either put ``calls`` to the drafter or counts once in ``skips``, by the reason why there was none.
    """

    drafted: int = 0
    accepted: int = 0
    forwards: int = 0
    calls: int = 0  # questions put to it, answered or not
    skips: dict[str, int] = field(default_factory=dict)  # reason -> steps without a call
    accepted_at: list[int] = field(default_factory=list)  # [i]: accepted nodes that were the (i+1)-th draft token of their step
    draft_s: float = 0.0  # in its calls; of one that serves several sequences, each has an equal share

    def add(self, other: DrafterCount) -> None:
        """Add another count to this one."""
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.forwards += other.forwards
        self.calls += other.calls
        for reason, count in other.skips.items():
            self.skips[reason] = self.skips.get(reason, 0) + count
        add_up(self.accepted_at, other.accepted_at)
        self.draft_s += other.draft_s


def add_up(totals: list[int], counts: list[int]) -> None:
    """Add `counts` to `totals` place by place; missing places are zeros."""
    totals.extend([0] * (len(counts) - len(totals)))
    for place, count in enumerate(counts):
        totals[place] += count


@dataclass(slots=True)
class RequestStats:
    """Counts and seconds of one request.

    Each step emits its accepted tokens and one of the target's own; only the last step of a request can be cut short. So
    ``num_output_tokens == num_steps + num_accepted - (num_trimmed > 0)``: what was trimmed is counted as neither.
    """

    schedule: str
    num_prompt_tokens: int
    is_auto: bool = field(default=False, kw_only=True)  # prices decided how much was drafted and verified
    num_output_tokens: int = 0
    num_steps: int = 0  # target passes that emitted tokens for this request
    num_spec_steps: int = 0  # of these, passes that verified at least one drafted node
    num_verified_nodes: int = 0  # rows of those passes, roots included
    num_trimmed: int = 0  # tokens verified in the last step but cut off by a stop or a limit
    num_grafts: int = 0
    is_lossy: bool = False  # verified by a rule that may change the text
    num_lossy: int = 0  # tokens of the answer that such a rule accepted against the target's choice
    num_cached_tokens: int = 0  # of the prompt, whose rows were there already when the request was first taken up
    num_preemptions: int = 0  # times it gave its rows up to others and was taken up again
    accepted: list[int] = field(default_factory=list)  # per speculative step: drafted tokens accepted and emitted
    drafted: list[int] = field(default_factory=list)  # per speculative step: nodes sent to verification
    drafters: dict[str, DrafterCount] = field(default_factory=dict)
    halts: dict[str, str] = field(default_factory=dict)  # drafter -> why it stopped drafting for this request; "rows": paused
    fallbacks: dict[str, int] = field(default_factory=dict)  # schedule that stood in for the one asked for -> steps
    arm: str = ""
    arrived_s: float = 0.0  # time.monotonic() values
    admitted_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    finished_s: float = 0.0
    draft_s: float = 0.0  # this request's share of the seconds spent in drafters,
    tree_s: float = 0.0  # in growing and cutting trees without the drafters' work,
    verify_s: float = 0.0  # in the target's passes,
    rule_s: float = 0.0  # in deciding what of a tree is accepted,
    other_s: float = 0.0  # and in everything else that the engine did meanwhile
    prompt_verify_s: float = 0.0  # of `verify_s`, in passes that read the prompt
    declined: dict[str, int] = field(default_factory=dict)  # drafter -> times asking it would not have been worth its price

    @property
    def num_accepted(self) -> int:
        """Drafted tokens accepted and emitted, over all steps (the target's own extra token is not counted)."""
        return sum(self.accepted)

    @property
    def num_drafted(self) -> int:
        """Drafted nodes sent to verification, over all steps (roots not counted)."""
        return sum(self.drafted)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely the target found one token of a text, and what else it might have written there.

    Natural logarithms of the probabilities that the model itself gives, over the tokenizer's vocabulary: before bias,
    penalties, temperature and everything else that shapes what is drawn. Finite, -9999 at least.
    """

    token_id: int
    logprob: float | None  # None: the first token of a prompt, for which nothing came before
    alternatives: tuple[tuple[int, float], ...]  # likeliest first, then by id; the token itself is often among them
    text_offset: int  # characters of the text that are certain without this token


@dataclass(frozen=True, slots=True)
class StepTimes:
    """When the phases of an engine step began, which all its sequences went through together; ``time.time_ns()`` values."""

    draft_ns: int
    verify_ns: int
    commit_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step adds to one request."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    creators: tuple[str, ...] = ()  # who drafted each token: a drafter's name, or "target"
    text: str = ""  # newly final text; may lag behind token_ids (split characters, possible stop strings)
    logprobs: tuple[TokenLogprob, ...] = ()  # one per token, if asked for
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # with the first token: of the prompt's tokens from the second on
    finish_reason: FinishReason | None = None
    error: str | None = None
    stats: RequestStats | None = None  # with the last delta
    trees: tuple[object, ...] = ()  # with the last delta: TreeRecord, if asked for
    trace: StepTrace | None = None  # of the step behind this delta, if asked for
    times: StepTimes | None = None  # of the same step


@dataclass(slots=True)
class StepStats:
    """Counts and seconds of one engine step: of one sequence, or of all sequences with the same schedule and arm."""

    schedule: str
    arm: str = field(default="", kw_only=True)
    num_drafts: int = 0  # sequences that verified at least one drafted node
    num_steps: int = 0  # sequences that emitted
    num_output_tokens: int = 0
    num_prompt_tokens: int = 0  # prompt tokens the target was fed, or had in its cache
    num_prefix_queries: int = 0  # prompt tokens looked up in the cache of beginnings
    num_prefix_hits: int = 0  # of these, tokens whose rows were there
    num_preemptions: int = 0  # sequences that gave their rows up to others
    num_verified_nodes: int = 0
    num_grafts: int = 0
    num_lossy: int = 0
    drafters: dict[str, DrafterCount] = field(default_factory=dict)
    drafter_steps: dict[str, int] = field(default_factory=dict)  # sequences in which this drafter had a node verified
    declined: dict[str, int] = field(default_factory=dict)  # drafter -> times asking it would not have been worth its price
    sized: dict[str, int] = field(default_factory=dict)  # what bounded trees that were cut by price -> trees
    halts: tuple[tuple[str, str], ...] = ()  # (drafter, reason) for each drafter that gave a sequence up
    draft_s: float = 0.0
    tree_s: float = 0.0
    verify_s: float = 0.0
    rule_s: float = 0.0
    other_s: float = 0.0
    num_accepted_squared: int = 0  # accepted tokens of a step, squared, over the steps: for the variance of a mean
    depths: list[int] = field(default_factory=list)  # [i]: sequences whose verified tree reached depth i+1
    token_gaps: list[tuple[float, int]] = field(default_factory=list)  # (seconds per token since the one before, tokens)


class RequestError(ValueError):
    """The caller's fault: a value the engine cannot serve. ``param`` names the field, ``code`` is the API's error code."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class QueueFull(RuntimeError):
    """Too many requests wait already; try again after ``retry_after_s``."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineStopped(RuntimeError):
    """The engine is loading, draining or dead and takes no requests."""
