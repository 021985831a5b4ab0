"""From a checked body to an answer, streamed or whole; the two endpoints differ only in their :class:`Dialect`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from app.answer_body import AnswerBody, Dialect
from app.bridge import DeltaStream
from app.call import Call, call_of
from app.choice import Choice, Echo
from app.disconnect import ClientGone, unless_gone
from app.errors import UnknownModel, shorten
from app.experiments.outcome import Assignment
from app.protocol import GenerationBody
from app.serving import Serving
from app.sse import EventStream
from app.stickiness import stickiness_key
from app.submission import leaves_schedule_open, make_requests
from app.tool_reading import Reader
from engine.constraint import Grammar
from engine.request import Delta, QueueFull, RequestError

_NESTED = {"schedule": "speculative.schedule", "budget": "speculative.budget"}  # engine's name -> the body's


async def answer(
    http: HttpRequest,
    serving: Serving,
    dialect: Dialect,
    body: GenerationBody,
    prompts: Sequence[tuple[int, ...]],
    echoes: Sequence[Echo] | None = None,
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
            events = made.events(serving, wants_usage=body.wants_usage, is_running=body.wants_running_usage)
            response = EventStream(events, stream.close)
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
    echoes: Sequence[Echo] | None,
    assigned: Assignment | None,
    grammar: Grammar | None,
    reader: Callable[[], Reader] | None,
    emit: Callable[[Delta], None],
    call: Call,
) -> AnswerBody:
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
        prompt_logprobs=echoes is not None and body.num_logprobs is not None,
    )
    schedule, budget = requests[0].schedule, requests[0].budget
    assert schedule is not None, "a request names its schedule"
    made = AnswerBody(
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
