"""From a checked body to an answer, streamed or whole; the two endpoints differ only in their :class:`Dialect`."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from app.answer_trace import ChoiceTrace
from app.bridge import DeltaStream
from app.call import Call, call_of
from app.choice import Choice
from app.disconnect import ClientGone, unless_gone
from app.errors import RequestFailed, TimedOut, UnknownModel, describe, shorten
from app.experiments.outcome import Assignment
from app.protocol import GenerationBody
from app.request_stats import answer_metrics, usage
from app.serving import Serving
from app.sse import DONE, EventStream, event
from app.stickiness import stickiness_key
from app.submission import leaves_schedule_open, make_requests
from app.token_text import TokenTexts
from app.tool_reading import CallPiece, Reader
from engine.constraint import Grammar
from engine.request import Delta, EngineStopped, QueueFull, RequestError, TokenLogprob

_log = logging.getLogger(__name__)
_NESTED = {"schedule": "speculative.schedule", "budget": "speculative.budget"}  # engine's name -> the body's


class Dialect(Protocol):
    """How one endpoint spells its answers. Log-probabilities are None where none were asked for or none are due."""

    id_prefix: str
    object: str  # of a whole answer
    chunk_object: str  # of a piece of a streamed one
    prompt_param: str
    default_limit: int | None  # tokens of an answer to a body that sets no limit; None: all the room there is

    def choice(
        self, index: int, text: str, reason: str, logprobs: dict[str, Any] | None, calls: Sequence[CallPiece] = ()
    ) -> dict[str, Any]:
        """A whole choice."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice of the chunk that precedes all text, if there is one."""

    def piece(
        self, index: int, text: str, logprobs: dict[str, Any] | None, calls: Sequence[CallPiece] = ()
    ) -> dict[str, Any]:
        """The choice of a chunk that carries text, calls, or both."""

    def ending(self, index: int, reason: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """The choice of the chunk that carries the finish reason, and what tokens without text of their own leave."""

    def logprobs(self, tokens: Sequence[TokenLogprob], texts: TokenTexts) -> dict[str, Any]:
        """The log-probabilities of a few tokens."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """One HTTP call's answer in the making."""

    dialect: Dialect
    model: str
    budget: int
    stream: DeltaStream
    num_prompt_tokens: int
    choices: list[Choice]
    texts: TokenTexts
    has_logprobs: bool
    num_drawn: int  # choices per prompt
    num_kept: int  # of these the best are given back
    traces: list[ChoiceTrace]  # one per choice, if asked for
    call: Call
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

    def usage(self) -> dict[str, Any]:
        # A prompt counts once however many answers it gets; so does what the first of them found of it.
        first = [choice.stats for choice in self.choices[:: self.num_drawn]]
        num_cached = sum(stats.num_cached_tokens for stats in first if stats is not None)
        return usage(self.num_prompt_tokens, sum(choice.num_output_tokens for choice in self.choices), num_cached)

    def metrics(self, choices: Sequence[Choice]) -> dict[str, Any]:
        stats = [choice.stats for choice in choices if choice.stats is not None]
        return {"metrics": answer_metrics(stats, self.budget)} if stats else {}

    def kept(self) -> list[int]:
        """The choices to give back, prompt by prompt: all in their order, or the best ones, best first."""
        prompts = [range(i, i + self.num_drawn) for i in range(0, len(self.choices), self.num_drawn)]
        if self.num_kept == self.num_drawn:
            return [index for indices in prompts for index in indices]
        ranked = (sorted(indices, key=lambda index: -self.choices[index].mean_logprob) for indices in prompts)
        return [index for indices in ranked for index in indices[: self.num_kept]]

    def graft(self, index: int) -> dict[str, Any]:
        """What there is to tell of a choice's drafting since the last call, if it was asked for."""
        return {"graft": self.traces[index].give()} if self.traces else {}

    def _count(self) -> None:
        """Tell the call's record what has arrived."""
        self.call.num_output_tokens = sum(choice.num_output_tokens for choice in self.choices)

    async def whole(self) -> dict[str, Any]:
        """The body of a whole answer."""
        pieces: list[list[str]] = [[] for _ in self.choices]
        tokens: list[list[TokenLogprob]] = [[] for _ in self.choices]
        calls: list[list[CallPiece]] = [[] for _ in self.choices]
        async for index, delta in self.stream:
            piece = self.choices[index].take(delta)
            if self.traces:
                self.traces[index].take(delta)
            self._count()
            pieces[index].append(piece.text)
            tokens[index].extend(piece.logprobs)
            calls[index].extend(piece.calls)
        choices = [
            self.dialect.choice(
                place,
                "".join(pieces[index]),
                self.choices[index].reason,
                self.dialect.logprobs(tokens[index], self.texts) if self.has_logprobs else None,
                calls[index],
            )
            | self.graft(index)
            for place, index in enumerate(self.kept())
        ]
        return {
            **self.head(self.dialect.object),
            "choices": choices,
            "usage": self.usage(),
            **self.metrics(self.choices),
        }

    async def events(self, serving: Serving, *, wants_usage: bool) -> AsyncGenerator[bytes, None]:
        """The events of a streamed answer, the closing one included, whatever happens."""
        head = self.head(self.dialect.chunk_object)
        no_usage = {"usage": None} if wants_usage else {}

        def chunk(choice: dict[str, Any], **more: Any) -> bytes:
            return event({**head, "choices": [choice], **no_usage, **more})

        def logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
            return self.dialect.logprobs(tokens, self.texts) if tokens else None

        try:
            for index in range(len(self.choices)):
                if (opening := self.dialect.opening(index)) is not None:
                    yield chunk(opening)
            async for index, delta in self.stream:
                choice = self.choices[index]
                piece = choice.take(delta)
                if self.traces:
                    self.traces[index].take(delta)
                self._count()
                tokens = piece.logprobs
                if piece.text or piece.calls:
                    said = self.dialect.piece(index, piece.text, logprobs(tokens), piece.calls)
                    yield chunk(said | self.graft(index))
                    tokens = []
                if delta.finish_reason is not None:
                    # With a usage chunk to come the numbers ride that one, as the sum over all choices.
                    metrics = {} if wants_usage else self.metrics([choice])
                    ending = self.dialect.ending(index, choice.reason, logprobs(tokens)) | self.graft(index)
                    yield chunk(ending, **metrics)
            if wants_usage:
                yield event({**head, "choices": [], "usage": self.usage(), **self.metrics(self.choices)})
        except Exception as error:
            self.stream.close()  # before the slow part: the other choices are decoded for nobody now
            if not isinstance(error, RequestFailed | EngineStopped | TimedOut):
                _log.exception("answer %s broke off", self.id)
            problem = describe(error)
            serving.metrics.count_error(problem.status)  # the status line said 200 long ago
            self.call.error = problem.code or problem.type
            yield event(problem.body())
        yield DONE


async def answer(
    http: HttpRequest,
    serving: Serving,
    dialect: Dialect,
    body: GenerationBody,
    prompts: Sequence[tuple[int, ...]],
    echoes: Sequence[str] | None = None,
    *,
    grammar: Grammar | None = None,
    reader: Callable[[], Reader] | None = None,
) -> Response:
    """Submit the prompts and answer, `n` choices for each; each begins with its prompt's one of `echoes`, if given.

    Every choice is a text of `grammar`, if given, and is read by a `reader` of its own, if there may be calls in it.

    Raises what is wrong with the request, or with the engine, before anything is sent.
    """
    call = call_of(http.scope)
    stream = DeltaStream(serving.engine, _deadline(serving, body, call))
    started = False
    try:
        assigned = _assign(http, serving, body, len(prompts), call)
        headers = {} if assigned is None else assigned.headers
        emit = stream.emit if serving.spans is None else serving.spans.watch(stream.emit, http.headers)
        made = _submit(stream, serving, dialect, body, prompts, echoes, assigned, grammar, reader, emit, call)
        if body.stream:
            response = EventStream(made.events(serving, wants_usage=body.wants_usage), stream.close)
            response.headers.update(headers)
            started = True
            return response
        return JSONResponse(await unless_gone(http.receive, made.whole()), headers=headers)
    except ClientGone:
        call.is_abandoned = True
        return Response(status_code=499)  # nobody reads it
    finally:
        if not started:
            stream.close()


def check_model(serving: Serving, name: str | None) -> None:
    """Raise UnknownModel unless the body names the served model or none."""
    if name is not None and name != serving.model:
        message = f"The model {shorten(name)!r} is not served here; {serving.model!r} is."
        raise UnknownModel(message, param="model", code="model_not_found")


def _assign(http: HttpRequest, serving: Serving, body: GenerationBody, num_prompts: int, call: Call) -> Assignment | None:
    """The call's arm of the running experiment, if there is one and the body leaves the schedule open."""
    if not leaves_schedule_open(body):
        return None
    key = stickiness_key(http.headers, body, call.api_key)
    is_alone = num_prompts * body.num_drawn == 1
    return serving.experiments.assign(key, None if is_alone else uuid.uuid4().hex)


def _deadline(serving: Serving, body: GenerationBody, call: Call) -> float | None:
    """By the loop's clock, when the answer must be complete; the time to read the body counts. None: never.

    Raises RequestError for more time than there is.
    """
    allowed = serving.request_timeout_s
    if body.timeout is not None:
        if allowed is not None and body.timeout > allowed:
            raise RequestError(f"timeout: this server gives an answer at most {allowed:g} seconds.", param="timeout")
        allowed = body.timeout
    return None if allowed is None else call.arrived_s + allowed


def _submit(
    stream: DeltaStream,
    serving: Serving,
    dialect: Dialect,
    body: GenerationBody,
    prompts: Sequence[tuple[int, ...]],
    echoes: Sequence[str] | None,
    assigned: Assignment | None,
    grammar: Grammar | None,
    reader: Callable[[], Reader] | None,
    emit: Callable[[Delta], None],
    call: Call,
) -> _Answer:
    answer_id = dialect.id_prefix + uuid.uuid4().hex
    requests = make_requests(
        serving,
        body,
        prompts,
        answer_id=answer_id,
        emit=emit,
        prompt_param=dialect.prompt_param,
        default_limit=dialect.default_limit,
        assigned=assigned,
        grammar=grammar,
    )
    schedule, budget = requests[0].schedule, requests[0].budget
    assert schedule is not None, "a request names its schedule"
    made = _Answer(
        dialect=dialect,
        model=serving.model,
        budget=budget if isinstance(budget, int) else serving.engine.schedules[schedule].budget,
        stream=stream,
        num_prompt_tokens=sum(map(len, prompts)),
        choices=[
            Choice(
                lambda token: serving.texts(token).text,
                None if echoes is None else echoes[i // body.num_drawn],
                None if reader is None else reader(),
            )
            for i in range(len(requests))
        ],
        texts=serving.texts,
        has_logprobs=body.num_logprobs is not None,
        num_drawn=body.num_drawn,
        num_kept=body.num_choices,
        traces=serving.tracing.choices(len(requests)) if body.wants_trace else [],
        call=call,
        id=answer_id,
        created=int(time.time()),
    )
    call.answer_id, call.num_prompt_tokens = answer_id, made.num_prompt_tokens
    try:
        for request in requests:
            stream.submit(request)
    except QueueFull as error:
        wait_s = serving.pace.seconds_until(len(requests), max_num_seqs=serving.engine.max_num_seqs)
        raise QueueFull(str(error), retry_after_s=max(error.retry_after_s, wait_s)) from error
    except RequestError as error:
        if error.param in _NESTED:
            raise RequestError(str(error), param=_NESTED[error.param], code=error.code) from error
        raise
    return made
