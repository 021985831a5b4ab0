"""From a checked body to an answer, streamed or whole; the two endpoints differ only in their :class:`Dialect`."""

from __future__ import annotations

import logging
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from app.bridge import DeltaStream
from app.disconnect import ClientGone, unless_gone
from app.errors import RequestFailed, UnknownModel, describe, shorten
from app.prompts import fit
from app.protocol import GenerationBody, Speculation
from app.request_stats import answer_metrics, usage
from app.serving import Serving
from app.sse import DONE, EventStream, event
from engine.request import Delta, EngineStopped, FinishReason, Request, RequestError, RequestStats
from models.sampling import SamplingParams

AUTOREGRESSIVE = "ar"  # the schedule that drafts nothing
_log = logging.getLogger(__name__)
_NESTED = {"schedule": "speculative.schedule", "budget": "speculative.budget"}  # engine's name -> the body's


class Dialect(Protocol):
    """How one endpoint spells its answers."""

    id_prefix: str
    object: str  # of a whole answer
    chunk_object: str  # of a piece of a streamed one
    prompt_param: str
    default_limit: int | None  # tokens of an answer to a body that sets no limit; None: all the room there is

    def choice(self, index: int, text: str, reason: str) -> dict[str, Any]:
        """A whole choice."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice of the chunk that precedes all text, if there is one."""

    def piece(self, index: int, text: str) -> dict[str, Any]:
        """The choice of a chunk that carries text."""

    def ending(self, index: int, reason: str) -> dict[str, Any]:
        """The choice of the chunk that carries the finish reason."""


@dataclass(slots=True)
class _Part:
    """What has arrived of one choice."""

    num_prompt_tokens: int
    num_output_tokens: int = 0
    pieces: list[str] = field(default_factory=list)  # kept for whole answers only
    reason: str = ""
    stats: RequestStats | None = None

    def take(self, delta: Delta) -> None:
        """Book a delta. Raises EngineStopped or RequestFailed if it ends the request without an answer."""
        self.num_output_tokens += len(delta.token_ids)
        if delta.finish_reason is FinishReason.ABORT:
            raise EngineStopped("The server stopped before the answer was complete.")
        if delta.finish_reason is FinishReason.ERROR:
            raise RequestFailed(delta.error or "The engine failed on this request.")
        if delta.finish_reason is not None:
            self.reason = delta.finish_reason.value
            self.stats = delta.stats


@dataclass(frozen=True, slots=True)
class _Answer:
    """One HTTP call's answer in the making."""

    dialect: Dialect
    model: str
    budget: int
    stream: DeltaStream
    parts: list[_Part]
    id: str
    created: int

    def head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
        }

    def usage(self) -> dict[str, int]:
        return usage(sum(p.num_prompt_tokens for p in self.parts), sum(p.num_output_tokens for p in self.parts))

    def metrics(self, parts: Sequence[_Part]) -> dict[str, Any]:
        stats = [part.stats for part in parts if part.stats is not None]
        return {"metrics": answer_metrics(stats, self.budget)} if stats else {}

    async def whole(self) -> dict[str, Any]:
        """The body of a whole answer."""
        async for index, delta in self.stream:
            self.parts[index].take(delta)
            self.parts[index].pieces.append(delta.text)
        choices = [self.dialect.choice(i, "".join(p.pieces), p.reason) for i, p in enumerate(self.parts)]
        return {
            **self.head(self.dialect.object),
            "choices": choices,
            "usage": self.usage(),
            **self.metrics(self.parts),
        }

    async def events(self, serving: Serving, *, wants_usage: bool) -> AsyncGenerator[bytes, None]:
        """The events of a streamed answer, the closing one included, whatever happens."""
        head = self.head(self.dialect.chunk_object)
        no_usage = {"usage": None} if wants_usage else {}

        def chunk(choice: dict[str, Any], **more: Any) -> bytes:
            return event({**head, "choices": [choice], **no_usage, **more})

        try:
            for index in range(len(self.parts)):
                if (opening := self.dialect.opening(index)) is not None:
                    yield chunk(opening)
            async for index, delta in self.stream:
                part = self.parts[index]
                part.take(delta)
                if delta.text:
                    yield chunk(self.dialect.piece(index, delta.text))
                if delta.finish_reason is not None:
                    # With a usage chunk to come the numbers ride that one, as the sum over all choices.
                    metrics = {} if wants_usage else self.metrics([part])
                    yield chunk(self.dialect.ending(index, part.reason), **metrics)
            if wants_usage:
                yield event({**head, "choices": [], "usage": self.usage(), **self.metrics(self.parts)})
        except Exception as error:
            self.stream.close()  # before the slow part: the other choices are decoded for nobody now
            if not isinstance(error, RequestFailed | EngineStopped):
                _log.exception("answer %s broke off", self.id)
            problem = describe(error)
            serving.metrics.count_error(problem.status)  # the status line said 200 long ago
            yield event(problem.body())
        yield DONE


async def answer(
    http: HttpRequest, serving: Serving, dialect: Dialect, body: GenerationBody, prompts: Sequence[tuple[int, ...]]
) -> Response:
    """Submit the prompts and answer, one choice for each.

    Raises what is wrong with the request, or with the engine, before anything is sent.
    """
    stream = DeltaStream(serving.engine)
    started = False
    try:
        made = _submit(stream, serving, dialect, body, prompts)
        if body.stream:
            response = EventStream(made.events(serving, wants_usage=body.wants_usage), stream.close)
            started = True
            return response
        return JSONResponse(await unless_gone(http.receive, made.whole()))
    except ClientGone:
        return Response(status_code=499)  # nobody reads it
    finally:
        if not started:
            stream.close()


def check_model(serving: Serving, name: str | None) -> None:
    """Raise UnknownModel unless the body names the served model or none."""
    if name is not None and name != serving.model:
        message = f"The model {shorten(name)!r} is not served here; {serving.model!r} is."
        raise UnknownModel(message, param="model", code="model_not_found")


def _submit(
    stream: DeltaStream, serving: Serving, dialect: Dialect, body: GenerationBody, prompts: Sequence[tuple[int, ...]]
) -> _Answer:
    engine = serving.engine
    capacity = engine.max_num_seqs + engine.max_waiting
    if len(prompts) > capacity:  # not even an idle server could take them
        message = f"At most {capacity} prompts fit into one request; this one has {len(prompts)}."
        raise RequestError(message, param=dialect.prompt_param)
    schedule, budget = _schedule(serving, body.speculative)
    limits = [
        fit(
            prompt,
            param=dialect.prompt_param,
            limit=body.limit,
            default=dialect.default_limit,
            max_model_len=engine.max_model_len,
        )
        for prompt in prompts
    ]
    made = _Answer(
        dialect=dialect,
        model=serving.model,
        budget=budget or engine.schedules[schedule].budget,
        stream=stream,
        parts=[_Part(len(prompt)) for prompt in prompts],
        id=dialect.id_prefix + uuid.uuid4().hex,
        created=int(time.time()),
    )
    requests = [
        Request(
            id=f"{made.id}-{index}",
            prompt=prompt,
            sampling=_sampling(body, engine.vocab_size),
            max_tokens=limit,
            emit=stream.emit,
            stop=tuple(body.stop or ()),
            schedule=schedule,
            budget=budget,
        )
        for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
    ]
    try:
        for request in requests:
            stream.submit(request)
    except RequestError as error:
        if error.param in _NESTED:
            raise RequestError(str(error), param=_NESTED[error.param], code=error.code) from error
        raise
    return made


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


def _schedule(serving: Serving, asked: Speculation | None) -> tuple[str, int | None]:
    """Schedule and explicit budget of a request. Raises RequestError for what contradicts itself or does not exist."""
    engine = serving.engine
    if asked is None:
        return engine.default_schedule, None
    off = asked.enabled is False
    name = asked.schedule
    if name is None:  # an empty name is a name too, of no schedule
        name = AUTOREGRESSIVE if off else engine.default_schedule
    if name not in engine.schedules:
        message = f"There is no schedule {shorten(name)!r}; there are {', '.join(sorted(engine.schedules))}."
        raise RequestError(message, param="speculative.schedule")
    if off and name != AUTOREGRESSIVE:
        message = f"Speculation is disabled, but the schedule {name!r} drafts; leave one of them out."
        raise RequestError(message, param="speculative.schedule")
    if asked.enabled and name == AUTOREGRESSIVE:
        message = f"Speculation is enabled, but the schedule {name!r} drafts nothing; name another one."
        raise RequestError(message, param="speculative.schedule")
    if name == AUTOREGRESSIVE and (asked.budget or 1) > 1:
        message = f"The schedule {name!r} verifies one node per step, so a budget of {asked.budget} cannot be used."
        raise RequestError(message, param="speculative.budget")
    return name, asked.budget
