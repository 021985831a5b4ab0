"""From a checked body to the requests that the engine gets: one for each choice of the answer."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b
from struct import pack
from typing import Literal

from app.answer_trace import MAX_STEPS
from app.errors import shorten
from app.experiments.outcome import Assignment
from app.prompts import check_ids, fit
from app.protocol import GenerationBody, Speculation
from app.serving import Serving
from engine.constraint import Grammar
from engine.request import Delta, Request, RequestError
from models.sampling import SamplingParams

AUTOREGRESSIVE = "ar"  # the schedule that drafts nothing


def make_requests(
    serving: Serving,
    body: GenerationBody,
    prompts: Sequence[tuple[int, ...]],
    *,
    answer_id: str,
    emit: Callable[[Delta], None],
    prompt_param: str,
    default_limit: int | None,
    assigned: Assignment | None = None,
    grammar: Grammar | None = None,
    prompt_logprobs: bool = False,
) -> list[Request]:
    """The requests in the order of their choices: all answers to the first prompt, then all to the second, and so on.

    Args:
        serving: what serves them.
        body: says everything but the prompts.
        prompts: token ids, none of them empty.
        answer_id: the beginning of the requests' ids.
        emit: where the engine's deltas go.
        prompt_param: the name by which the body has the prompts.
        default_limit: tokens of an answer if the body sets no limit; None: all the room there is.
        assigned: the arm of a running experiment, for a body that :func:`leaves_schedule_open`; all requests get it.
        grammar: what every answer must be a text of; None: anything.
        prompt_logprobs: whether the prompts' own log-probabilities are wanted.

    Raises RequestError or ParamError for what can never be served.
    """
    engine, num_choices = serving.engine, body.num_drawn
    capacity = engine.max_num_seqs + engine.max_waiting
    if len(prompts) * num_choices > capacity:  # not even an idle server could take them
        if len(prompts) > capacity:
            message = f"At most {capacity} prompts fit into one request; this one has {len(prompts)}."
            raise RequestError(message, param=prompt_param)
        message = f"At most {capacity} answers fit into one request; this one asks for {len(prompts)} times {num_choices}."
        raise RequestError(message, param="n" if num_choices == body.num_choices else "best_of")
    if assigned is None:
        schedule, budget = _schedule(serving, body.speculative)
    else:
        schedule, budget, emit = assigned.arm.schedule, assigned.arm.budget, assigned.watch(emit)
    stop_token_ids = check_ids(body.stop_token_ids or (), engine.vocab_size, param="stop_token_ids")
    requests: list[Request] = []
    for prompt in prompts:
        limit = fit(
            prompt, param=prompt_param, limit=body.limit, default=default_limit, max_model_len=engine.max_model_len
        )
        sampling = _sampling(body, engine.vocab_size)
        for index in range(num_choices):
            one = Request(
                id=f"{answer_id}-{len(requests)}",
                prompt=prompt,
                sampling=replace(sampling, seed=choice_seed(sampling.seed, index)) if index else sampling,
                max_tokens=limit,
                emit=emit,
                stop=tuple(body.stop or ()),
                stop_token_ids=frozenset(stop_token_ids),
                ignore_eos=bool(body.ignore_eos),
                min_tokens=body.min_tokens or 0,
                # The best of several are found by them.
                num_logprobs=0 if body.num_logprobs is None and body.num_drawn > body.num_choices else body.num_logprobs,
                prompt_logprobs=prompt_logprobs,
                grammar=grammar,
                schedule=schedule,
                budget=budget,
                arm="" if assigned is None else assigned.label,
                trace_steps=MAX_STEPS if body.wants_trace else 0,
            )
            requests.append(one)
    return requests


def leaves_schedule_open(body: GenerationBody) -> bool:
    """Whether the body says nothing of how it is drafted for; only then a request takes part in an experiment."""
    asked = body.speculative
    return asked is None or (asked.enabled is None and asked.schedule is None and asked.budget is None)


def choice_seed(seed: int, index: int) -> int:
    """The seed of answer `index` to a prompt whose body has `seed`: the seed itself for the first one.

    A hash, not a sum: seeds that callers count up would otherwise give answers that they have got before.
    """
    if index == 0:
        return seed
    return int.from_bytes(blake2b(pack("<qQ", seed, index), digest_size=8, person=b"choice").digest(), "little", signed=True)


def _sampling(body: GenerationBody, vocab_size: int) -> SamplingParams:
    """Sampling of one prompt. Without a seed each prompt draws its own; with one, each answers as if sent alone."""
    sampling = SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=min(body.top_k or 0, vocab_size),
        seed=secrets.randbits(63) if body.seed is None else body.seed,
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=body.logit_bias or {},
    )
    sampling.check_vocab(vocab_size)
    return sampling


def _schedule(serving: Serving, asked: Speculation | None) -> tuple[str, int | Literal["auto"] | None]:
    """Schedule and explicit budget of a request. Raises RequestError for what contradicts itself or does not exist."""
    engine, default = serving.engine, serving.experiments.default
    if asked is None:
        return default.schedule, default.budget
    off = asked.enabled is False
    name = asked.schedule
    if name is None:  # an empty name is a name too, of no schedule
        name = AUTOREGRESSIVE if off else default.schedule
    if name not in engine.schedules:
        message = f"There is no schedule {shorten(name)!r}; there are {', '.join(sorted(engine.schedules))}."
        raise RequestError(message, param="speculative.schedule")
    if off and name != AUTOREGRESSIVE:
        message = f"Speculation is disabled, but the schedule {name!r} drafts; leave one of them out."
        raise RequestError(message, param="speculative.schedule")
    if asked.enabled and name == AUTOREGRESSIVE:
        message = f"Speculation is enabled, but the schedule {name!r} drafts nothing; name another one."
        raise RequestError(message, param="speculative.schedule")
    if name == AUTOREGRESSIVE and (asked.budget or 1) not in (1, "auto"):
        message = f"The schedule {name!r} verifies one node per step, so a budget of {asked.budget} cannot be used."
        raise RequestError(message, param="speculative.budget")
    return name, default.budget if asked.schedule is None and not off and asked.budget is None else asked.budget
