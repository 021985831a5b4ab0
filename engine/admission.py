"""What the engine takes on: its limits, and the check that refuses what could never be served.

Everything here runs on the caller's thread, before anything is queued, so a refusal leaves no trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from engine.constraint import Constraint
from engine.request import MAX_LOGPROBS, Request, RequestError
from engine.sequence import end_tokens, rows_needed
from scheduler.schedule import Schedule
from tree.draws import TreeKind
from tree.growth import Policy
from tree.policies.chain import Chain
from tree.policies.sampled import Delayed, Iid, SampledPolicy, WithoutReplacement
from verify import EVERY_VERIFIER, check_pair


@dataclass(frozen=True, slots=True)
class Limits:
    """How much the engine takes on."""

    max_num_seqs: int = 8  # sequences that advance together
    max_waiting: int = 64  # requests that may wait besides
    prefill_chunk: int = 256  # prompt tokens fed per step, all sequences together
    stall_s: float = 30.0  # no step for this long, with work waiting, is ill health
    prefix_cache: bool = True  # rows of texts that are over serve texts that begin alike

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "prefill_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_waiting < 0:
            raise ValueError(f"max_waiting must be at least 0, got {self.max_waiting}")


class RuleNames(Protocol):
    """The part of a schedule that says how it verifies."""

    @property
    def greedy_verifier(self) -> str: ...
    @property
    def sampling_verifier(self) -> str: ...


def check_rules(schedule: Schedule, *, allow_lossy: bool) -> None:
    """ValueError for a schedule whose decision rules would be wrong on its trees, or lossy where that is not allowed.

    Leaving out nodes by their price would also be wrong on trees that were drawn: what is left would not be what was drawn.
    """
    if schedule.is_auto and isinstance(schedule.policy, SampledPolicy):
        raise ValueError(f"schedule {schedule.name}: trees that are drawn are verified as a whole; auto cannot size them")
    kind = schedule.policy.kind if isinstance(schedule.policy, SampledPolicy) else TreeKind.DETERMINISTIC
    for name, reads_logits in ((schedule.greedy_verifier, True), (schedule.sampling_verifier, False)):
        if name not in EVERY_VERIFIER:
            raise ValueError(f"schedule {schedule.name}: verifier {name!r} is not one of {', '.join(EVERY_VERIFIER)}")
        rule = EVERY_VERIFIER[name]
        if rule.reads_logits != reads_logits:
            when = "at temperature 0" if reads_logits else "above temperature 0"
            raise ValueError(f"schedule {schedule.name}: the {name} rule does not decide {when}")
        if not rule.lossless and not allow_lossy:
            raise ValueError(f"schedule {schedule.name}: the {name} rule changes the text; it needs allow_lossy = true")
        try:
            check_pair(rule, kind, is_chain=grows_chains(schedule.policy) or not rule.needs_chain)
        except ValueError as error:
            raise ValueError(f"schedule {schedule.name}: {error}") from error


def grows_chains(policy: Policy) -> bool:
    """Whether a policy's trees never branch, whatever is drafted and whatever its budget is cut to."""
    if isinstance(policy, Iid):
        return policy.num_paths == 1
    if isinstance(policy, Delayed):
        return policy.canonical().num_paths == 1
    if isinstance(policy, WithoutReplacement):
        return all(width == 1 for width in policy.widths)
    return isinstance(policy, Chain)


def is_lossless(schedule: RuleNames) -> bool:
    """Whether the text under this schedule is the target's at every temperature."""
    return all(EVERY_VERIFIER[name].lossless for name in (schedule.greedy_verifier, schedule.sampling_verifier))


def keeps_seeded_text(schedule: RuleNames) -> bool:
    """Whether a seed gives the text that plain decoding gives: the walk spends random numbers by position, as that does."""
    return schedule.sampling_verifier == "walk"


def choose_schedule(
    request: Request, schedules: Mapping[str, Schedule], default: str, *, max_budget: int, has_prices: bool
) -> Schedule:
    """The schedule a request names, or the default, with the budget it asks for. RequestError for what there is not."""
    name = request.schedule or default
    if name not in schedules:
        raise RequestError(f"schedule {name!r} is not one of {', '.join(schedules)}", param="speculative.schedule")
    if request.budget is None:
        return schedules[name]
    if request.budget == "auto":
        return _priced(schedules[name], has_prices=has_prices)
    if not 1 <= request.budget <= max_budget:
        raise RequestError(
            f"budget must be between 1 (the root alone) and {max_budget}, not {request.budget}",
            param="speculative.budget",
        )
    return schedules[name].with_budget(request.budget)


def _priced(schedule: Schedule, *, has_prices: bool) -> Schedule:
    if not has_prices:
        raise RequestError("budget auto needs prices, and this server was started without", param="speculative.budget")
    if isinstance(schedule.policy, SampledPolicy):
        raise RequestError(
            f"schedule {schedule.name} draws its trees at random and verifies all of them; name a number as its budget",
            param="speculative.budget",
        )
    return schedule if schedule.budget == 1 else replace(schedule, is_auto=True)


def check_request(
    request: Request,
    schedule: Schedule,
    *,
    vocab_size: int,
    max_model_len: int,
    num_rows: int,
    stop_tokens: frozenset[int],
) -> None:
    """Refuse, by RequestError, what can never be served; messages give the true numbers."""
    num_prompt = len(request.prompt)
    if any(not stop for stop in request.stop):
        raise RequestError("a stop string must not be empty", param="stop")
    if request.keep_trees < 0:
        raise RequestError(f"keep_trees must be at least 0, not {request.keep_trees}", param="keep_trees")
    if request.trace_steps < 0:
        raise RequestError(f"trace_steps must be at least 0, not {request.trace_steps}", param="trace_steps")
    if num_prompt < 1:
        raise RequestError("the prompt is empty", param="prompt")
    if request.max_tokens is not None and request.max_tokens < 1:
        raise RequestError(f"max_tokens must be at least 1, not {request.max_tokens}", param="max_tokens")
    if num_prompt >= max_model_len or num_prompt + (request.max_tokens or 1) > max_model_len:
        asked = f" and {request.max_tokens} new ones were asked for" if request.max_tokens else ""
        raise RequestError(
            f"the context holds {max_model_len} tokens; the prompt has {num_prompt}{asked}",
            param="prompt",
            code="context_length_exceeded",
        )
    bad = next((token for token in request.prompt if not 0 <= token < vocab_size), None)
    if bad is not None:
        raise RequestError(f"token id {bad} is outside the vocabulary of {vocab_size}", param="prompt")
    request.sampling.check_vocab(vocab_size)
    _check_ends(request, vocab_size=vocab_size, max_model_len=max_model_len, stop_tokens=stop_tokens)
    if request.prompt_logprobs and request.num_logprobs is None:
        raise RequestError("log-probabilities of the prompt come with those of the answer only", param="logprobs")
    if request.num_logprobs is not None and not 0 <= request.num_logprobs <= MAX_LOGPROBS:
        raise RequestError(f"at most {MAX_LOGPROBS} logprobs, not {request.num_logprobs}", param="logprobs")
    needed = rows_needed(num_prompt, request.max_tokens, schedule.budget, max_model_len)
    if needed > num_rows:
        raise RequestError(
            f"the request may need {needed} cache rows, the server has {num_rows}; "
            "ask for fewer tokens or a smaller budget",
            param="max_tokens",
            code="context_length_exceeded",
        )


def _check_ends(request: Request, *, vocab_size: int, max_model_len: int, stop_tokens: frozenset[int]) -> None:
    """Refuse ends that are no tokens, and a least length that cannot be reached."""
    bad = next((token for token in request.stop_token_ids if not 0 <= token < vocab_size), None)
    if bad is not None:
        message = f"stop_token_ids: token id {bad} is outside the vocabulary of {vocab_size}"
        raise RequestError(message, param="stop_token_ids")
    room = max_model_len - len(request.prompt)
    most = room if request.max_tokens is None else min(room, request.max_tokens)
    if not 0 <= request.min_tokens <= most:
        message = f"min_tokens must be between 0 and the {most} tokens that the answer may have, not {request.min_tokens}"
        raise RequestError(message, param="min_tokens")
    if request.grammar is not None and Constraint(request.grammar, end_tokens(request, stop_tokens)).is_complete:
        message = "stop_token_ids: every token with which an answer of the grammar can begin ends the answer"
        raise RequestError(message, param="stop_token_ids")
    if request.min_tokens and len(end_tokens(request, stop_tokens)) >= vocab_size:
        raise RequestError("min_tokens: every token of the vocabulary ends the answer", param="min_tokens")
