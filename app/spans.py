"""Requests as OpenTelemetry spans: ``request`` with a ``draft``, a ``verify`` and a ``commit`` below it for each step.

The libraries are the extra ``otel`` and imported only if the setting ``otlp_endpoint`` names a collector. Spans are made on the
engine's thread after a delta has been handed on, which is a matter of microseconds, and sent by a thread of the library. A
caller's ``traceparent`` header makes the request part of the caller's trace.

The spans of a step cover the time of the engine's whole step, which several requests may share; a request's own share of the
drafting and verifying seconds is in the attributes of its ``request`` span.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from app.version import version
from engine.request import Delta, FinishReason, RequestStats

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

MAX_STEPS = 512  # of a request that get spans; a long answer would be thousands of them
_PATH = "/v1/traces"


class SpansUnavailable(ValueError):
    """Spans were asked for, but the libraries are not installed."""


def open_spans(endpoint: str) -> Spans:
    """Report to the collector at `endpoint`, its base address or the full one of its traces.

    Raises SpansUnavailable. A collector that cannot be reached is the library's to log; it never fails a request.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise SpansUnavailable(
            f"otlp_endpoint = {endpoint} needs libraries that are not installed ({error.name}): pip install 'graftserve[otel]'"
        ) from error
    url = endpoint if endpoint.endswith(_PATH) else endpoint.rstrip("/") + _PATH
    provider = TracerProvider(resource=Resource.create({"service.name": "graftserve", "service.version": version()}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
    return Spans(provider)


class Spans:
    """Makes spans of the deltas that go by."""

    def __init__(self, provider: TracerProvider) -> None:
        """`provider` is this object's to close."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("graftserve", version())
        self._propagator = TraceContextTextMapPropagator()

    def watch(self, emit: Callable[[Delta], None], headers: Mapping[str, str]) -> Callable[[Delta], None]:
        """`emit`, with a look at each delta: for the requests of one HTTP call, whose time begins now."""
        start_ns, parent = time.time_ns(), self._propagator.extract(headers)
        open_requests: dict[str, _OpenRequest] = {}

        def emit_and_book(delta: Delta) -> None:
            emit(delta)
            one = open_requests.get(delta.request_id)
            if one is None:
                span = self._tracer.start_span("request", parent, start_time=start_ns)
                span.set_attribute("graftserve.request_id", delta.request_id)
                one = open_requests[delta.request_id] = _OpenRequest(span)
            self._book(one, delta)
            if delta.finish_reason is not None:
                del open_requests[delta.request_id]

        return emit_and_book

    def close(self) -> None:
        """Send what waits and stop."""
        self._provider.shutdown()

    def _book(self, one: _OpenRequest, delta: Delta) -> None:
        times = delta.times
        if times is not None:
            if one.num_steps < MAX_STEPS:
                self._phase(one.context, "draft", times.draft_ns, times.verify_ns, one.num_steps)
                self._phase(one.context, "verify", times.verify_ns, times.commit_ns, one.num_steps)
                commit = self._tracer.start_span("commit", one.context, start_time=times.commit_ns)
                commit.set_attribute("graftserve.step", one.num_steps)
                commit.set_attribute("graftserve.tokens", len(delta.token_ids))
                commit.end(times.end_ns)
            one.num_steps += 1
        if delta.finish_reason is not None:
            _finish(one, delta)

    def _phase(self, context: Context, name: str, start_ns: int, end_ns: int, step: int) -> None:
        span = self._tracer.start_span(name, context, start_time=start_ns)
        span.set_attribute("graftserve.step", step)
        span.end(end_ns)


class _OpenRequest:
    """A request that has not ended."""

    def __init__(self, span: Span) -> None:
        from opentelemetry.trace import set_span_in_context

        self.span = span
        self.context = set_span_in_context(span)
        self.num_steps = 0


def _finish(one: _OpenRequest, delta: Delta) -> None:
    from opentelemetry.trace import StatusCode

    assert delta.finish_reason is not None, "only the last delta ends a span"
    one.span.set_attribute("gen_ai.response.finish_reasons", [delta.finish_reason.value])
    if delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
        one.span.set_status(StatusCode.ERROR, delta.error or delta.finish_reason.value)
    if one.num_steps > MAX_STEPS:
        one.span.set_attribute("graftserve.steps_without_spans", one.num_steps - MAX_STEPS)
    if delta.stats is not None:
        for name, value in _attributes(delta.stats).items():
            one.span.set_attribute(name, value)
    one.span.end()


def _attributes(stats: RequestStats) -> dict[str, str | int | float]:
    """Counts of the whole request, with the names of the generative-AI conventions where they have one."""
    found: dict[str, str | int | float] = {
        "graftserve.schedule": stats.schedule,
        "gen_ai.usage.input_tokens": stats.num_prompt_tokens,
        "gen_ai.usage.output_tokens": stats.num_output_tokens,
        "graftserve.steps": stats.num_steps,
        "graftserve.drafted": stats.num_drafted,
        "graftserve.accepted": stats.num_accepted,
        "graftserve.grafts": stats.num_grafts,
        "graftserve.draft_s": stats.draft_s,
        "graftserve.verify_s": stats.verify_s,
    }
    if stats.admitted_s:  # else it ended while it waited
        found["graftserve.queue_s"] = stats.admitted_s - stats.arrived_s
    return found
