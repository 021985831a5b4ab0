"""Spans, as a collector gets them: a real HTTP server that decodes what the exporter really sends."""

from __future__ import annotations

import ast
import gzip
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from transformers import PreTrainedModel

import app.spans
from app.config import Settings, load_settings
from app.serving import LoadedEngine
from app.spans import SpansUnavailable, open_spans
from tests.engine_world import World
from tests.http_engine import ScriptedEngine, Server, serve, until

TinyModel = Callable[..., PreTrainedModel]
BODY = {"max_tokens": 12, "speculative": {"schedule": "treegraft"}}


@dataclass
class Collector:
    """What was sent, and where it can be sent to."""

    url: str
    requests: list[ExportTraceServiceRequest] = field(default_factory=list)

    @property
    def spans(self) -> list[Span]:
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@contextmanager
def collecting() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == "/v1/traces" and self.headers["Content-Type"] == "application/x-protobuf"
            collector.requests.append(ExportTraceServiceRequest.FromString(body))
            reply = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def world_serving(tiny_model: TinyModel, **settings: Any) -> Iterator[Server]:
    world = World(tiny_model("llama", 259, 3), small=tiny_model("llama", 259, 4), medium=tiny_model("llama", 259, 3))
    with serve(load=lambda: LoadedEngine(world.engine, world.tokenizer), **settings) as server:
        yield server


def attributes(span: Span) -> dict[str, Any]:
    kinds = ("string_value", "int_value", "double_value", "array_value")
    found = {}
    for one in span.attributes:
        kind = one.value.WhichOneof("value")
        assert kind in kinds
        found[one.key] = getattr(one.value, kind)
    return found


def test_a_request_is_a_span_with_its_steps_below(tiny_model: TinyModel) -> None:
    """Where the time of a slow request went must be read off its trace, and add up with the answer's own numbers."""
    with collecting() as collector:
        with world_serving(tiny_model, otlp_endpoint=collector.url) as server:
            answer = server.complete(**BODY).json()
        graft = answer["metrics"]["graft"]
        (request,) = [span for span in collector.spans if span.name == "request"]
        assert not request.parent_span_id
        told = attributes(request)
        assert told["graftserve.schedule"] == "treegraft"
        assert told["gen_ai.usage.output_tokens"] == 12
        assert told["graftserve.steps"] == graft["num_steps"]
        assert told["graftserve.verify_s"] == pytest.approx(graft["verify_ms"] / 1000, abs=1e-5)
        assert told["graftserve.request_id"].startswith(answer["id"])
        below = [span for span in collector.spans if span.parent_span_id == request.span_id]
        assert len(below) == len(collector.spans) - 1 == 3 * graft["num_steps"]
        assert {span.trace_id for span in below} == {request.trace_id}
        end = request.start_time_unix_nano
        for step in range(graft["num_steps"]):
            phases = [span for span in below if attributes(span)["graftserve.step"] == step]
            phases.sort(key=lambda one: one.start_time_unix_nano)
            assert [span.name for span in phases] == ["draft", "verify", "commit"]
            for span in phases:
                assert end <= span.start_time_unix_nano <= span.end_time_unix_nano, "phases of a request overlap"
                end = span.end_time_unix_nano
        assert end <= request.end_time_unix_nano
        tokens = sum(attributes(span)["graftserve.tokens"] for span in below if span.name == "commit")
        assert tokens == 12
        (resource,) = {request.resource_spans[0].resource.SerializeToString() for request in collector.requests}
        assert b"graftserve" in resource


def test_a_callers_trace_goes_on_here(tiny_model: TinyModel) -> None:
    """Without this a gateway's trace ends at our door."""
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with collecting() as collector:
        with world_serving(tiny_model, otlp_endpoint=f"{collector.url}/v1/traces") as server:
            headers = {"traceparent": f"00-{trace}-{parent}-01"}
            server.client.post("/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 2}, headers=headers)
        requests = [span for span in collector.spans if span.name == "request"]
        assert [span.parent_span_id.hex() for span in requests] == [parent] * 2
        assert {span.trace_id.hex() for span in collector.spans} == {trace}


def test_failed_and_abandoned_requests_end_their_spans_too() -> None:
    """An error that leaves no trace is the one somebody looks for."""
    engine = ScriptedEngine()
    with collecting() as collector:
        with serve(engine, otlp_endpoint=collector.url) as server:
            engine.fail_after = 1
            assert server.complete().status_code == 500
            engine.fail_after, engine.paused = None, True
            with server.client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}):
                until(lambda: engine.num_running)
            until(lambda: engine.aborted)
            engine.paused = False
            until(lambda: not engine.num_running)
        spans = collector.spans
        assert [span.name for span in spans] == ["request", "request"]
        assert {span.status.code for span in spans} == {Status.STATUS_CODE_ERROR}
        assert {span.status.message for span in spans} == {"the scripted fault", "abort"}


def test_long_answers_have_spans_for_their_first_steps_only(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of spans of one answer would drown the collector; how many are missing is said."""
    monkeypatch.setattr(app.spans, "MAX_STEPS", 3)
    with collecting() as collector:
        with world_serving(tiny_model, otlp_endpoint=collector.url) as server:
            server.complete(max_tokens=10, speculative={"enabled": False})
        (request,) = [span for span in collector.spans if span.name == "request"]
        assert len(collector.spans) == 1 + 3 * 3
        assert attributes(request)["graftserve.steps_without_spans"] == 7


def test_a_collector_that_is_away_fails_no_request(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Watching must never be the reason that serving stops."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with world_serving(tiny_model, otlp_endpoint="http://127.0.0.1:9") as server:
        assert server.complete(**BODY).status_code == 200


def test_nothing_is_imported_or_sent_without_the_setting() -> None:
    """The libraries are optional, and whoever has not asked for spans pays nothing."""
    at_import = ast.parse(Path(app.spans.__file__).read_text()).body
    named = [ast.unparse(node) for node in at_import if isinstance(node, ast.Import | ast.ImportFrom)]
    assert named and not [line for line in named if "opentelemetry" in line]
    with serve() as server:
        assert server.app.state.serving.spans is None


def test_missing_libraries_are_named_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ImportError's traceback does not say what to install."""
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(SpansUnavailable, match=r"otlp_endpoint = http://x.*pip install 'graftserve\[otel\]'"):
        open_spans("http://x:4318")
    failures: list[BaseException] = []
    with serve(wait_ready=False, on_failure=failures.append, otlp_endpoint="http://x:4318"):
        until(lambda: failures)
    assert isinstance(failures[0], ValueError), "the command line ends with status 2 for what the user can mend"


@pytest.mark.parametrize("endpoint", ["localhost:4318", "grpc://x:4317", "http://", ""])
def test_an_endpoint_that_is_no_web_address_is_refused(endpoint: str) -> None:
    """The exporter would only log, much later, that it cannot send."""
    with pytest.raises(ValueError, match="otlp_endpoint"):
        load_settings(None, {"otlp_endpoint": endpoint})
    assert Settings(target="x", otlp_endpoint="https://collector.example:4318").otlp_endpoint
