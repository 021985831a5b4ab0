"""Prometheus metrics: an observer of the engine, and counts of the HTTP edge.

Only totals are exported; rates are the query's work:

    acceptance length   1 + rate(accepted_tokens) summed over drafter / rate(num_spec_steps)
    tokens per step     rate(generation_tokens) / rate(num_steps) summed over schedule
    a drafter's worth   rate(accepted_tokens) / rate(draft_tokens) by drafter

*Accepted* leaves out the token the target adds itself. Every series whose labels are known when the model is ready
exists from the first scrape on, at zero.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics import MetricWrapperBase

from app.bridge import Engine
from app.errors import STATUSES
from app.version import version
from engine.request import FinishReason, RequestStats, StepStats

CONTENT_TYPE = CONTENT_TYPE_LATEST
PREFIX = "graftserve_"
HALT_REASONS = ("context", "rows", "nan", "error")  # other reasons share one series, so that labels stay bounded
OTHER = "other"

_FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60)
_ANSWER_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300, 600)
_log = logging.getLogger(__name__)


class Metrics:
    """All collectors, in a registry of their own; ``on_step`` and ``on_finish`` make it an observer of the engine."""

    def __init__(self) -> None:
        """Create the collectors; their labels follow with :meth:`attach`."""
        self.registry = CollectorRegistry()
        both, schedule, drafter = ("schedule", "drafter"), ("schedule",), ("drafter",)

        def counter(name: str, text: str, labels: Iterable[str] = ()) -> Counter:
            return Counter(PREFIX + name, text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: Iterable[float]) -> Histogram:
            return Histogram(PREFIX + name, text, schedule, registry=self.registry, buckets=tuple(buckets))

        self.drafts = counter(
            "spec_decode_num_drafts_total",
            "Steps of sequences in which the drafter had at least one node verified. A step whose tree holds nodes of "
            "two drafters counts for both, so do not sum over drafter: num_spec_steps counts each step once.",
            both,
        )
        self.draft_tokens = counter(
            "spec_decode_num_draft_tokens_total",
            "Drafted nodes sent to verification, by the drafter that created them; siblings in a tree all count.",
            both,
        )
        self.accepted_tokens = counter(
            "spec_decode_num_accepted_tokens_total",
            "Drafted nodes that became output, by the drafter that created them; the target's own token is left out.",
            both,
        )
        self.spec_steps = counter(
            "spec_decode_num_spec_steps_total",
            "Steps of sequences that verified at least one drafted node, whoever drafted it.",
            schedule,
        )
        self.steps = counter(
            "spec_decode_num_steps_total", "Steps of sequences that produced output, drafted for or not.", schedule
        )
        self.tree_nodes = counter(
            "spec_decode_num_tree_nodes_total", "Rows verified by the target in these steps, roots included.", schedule
        )
        self.grafts = counter(
            "spec_decode_num_grafts_total",
            "Nodes that one drafter attached under a node of another, whether they were verified in the end or cut.",
            schedule,
        )
        self.forwards = counter("draft_forwards_total", "Drafter forwards, counted for each request they answered.", drafter)
        self.draft_seconds = counter("draft_seconds_total", "Seconds spent drafting.", schedule)
        self.verify_seconds = counter("verify_seconds_total", "Seconds spent in the target's passes.", schedule)
        self.halts = counter(
            "drafter_halts_total", "Sequences that a drafter stopped drafting for.", ("drafter", "reason")
        )
        self.requests = counter(
            "requests_total",
            "Engine requests that ended, by how: stop and length are answers, abort means the caller went away, error "
            "is our fault. An HTTP call with a list of prompts is several.",
            ("finish_reason",),
        )
        self.request_errors = counter(
            "request_errors_total",
            "Calls of /v1 that were answered with an error, by HTTP status; a stream that breaks off counts as the "
            "status it would have had.",
            ("status",),
        )
        self.prompt_tokens = counter("prompt_tokens_total", "Prompt tokens processed, cached ones included.")
        self.prefix_queries = counter("prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.")
        self.prefix_hits = counter("prefix_cache_hits_total", "Prompt tokens found in the prefix cache.")
        self.preemptions = counter(
            "preemptions_total", "Times that a running sequence gave its cache rows to others, to be taken up again later."
        )
        self.generation_tokens = counter("generation_tokens_total", "Tokens delivered, end tokens included.")
        self.running = Gauge(PREFIX + "num_requests_running", "Sequences being decoded.", registry=self.registry)
        self.waiting = Gauge(PREFIX + "num_requests_waiting", "Requests waiting for a place.", registry=self.registry)
        self.first_token = histogram(
            "time_to_first_token_seconds", "Seconds from arrival to the first token.", _FIRST_TOKEN_BUCKETS
        )
        self.latency = histogram(
            "e2e_request_latency_seconds", "Seconds from arrival to the end, of answered requests.", _ANSWER_BUCKETS
        )
        self.build = Gauge(
            PREFIX + "build_info", "Always 1; the labels say what runs.", ("version", "model"), registry=self.registry
        )
        for reason in FinishReason:
            self.requests.labels(reason.value)
        for status in STATUSES:
            self.request_errors.labels(str(status))

    def attach(self, engine: Engine) -> None:
        """Create every series of the engine's schedules and drafters at zero, and follow its load."""
        for schedule in engine.schedules:
            for collector in self._of("schedule"):
                collector.labels(schedule)
            for drafter in engine.drafter_names:
                for collector in self._of("schedule", "drafter"):
                    collector.labels(schedule, drafter)
        for drafter in engine.drafter_names:
            self.forwards.labels(drafter)
            for reason in (*HALT_REASONS, OTHER):
                self.halts.labels(drafter, reason)
        self.running.set_function(lambda: engine.num_running)
        self.waiting.set_function(lambda: engine.num_waiting)
        self.build.labels(version(), engine.model_id).set(1)

    def on_step(self, steps: list[StepStats]) -> None:
        """Count one engine step; called on the engine thread."""
        for step in steps:
            self._count_step(step)

    def on_finish(self, stats: RequestStats, reason: FinishReason) -> None:
        """Count one ended request; called on the engine thread."""
        self.requests.labels(reason.value).inc()
        if stats.first_token_s > 0:
            self.first_token.labels(stats.schedule).observe(stats.first_token_s - stats.arrived_s)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.latency.labels(stats.schedule).observe(stats.finished_s - stats.arrived_s)

    def count_error(self, status: int) -> None:
        """Count a call that was answered with an error. Never raises: counting must not fail a request."""
        try:
            self._count_error(status)
        except Exception:
            _log.exception("could not count an error answer")

    def text(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)

    def _count_error(self, status: int) -> None:
        self.request_errors.labels(str(status)).inc()

    def _count_step(self, step: StepStats) -> None:
        schedule = step.schedule
        self.spec_steps.labels(schedule).inc(step.num_drafts)
        self.steps.labels(schedule).inc(step.num_steps)
        self.tree_nodes.labels(schedule).inc(step.num_verified_nodes)
        self.grafts.labels(schedule).inc(step.num_grafts)
        self.draft_seconds.labels(schedule).inc(step.draft_s)
        self.verify_seconds.labels(schedule).inc(step.verify_s)
        self.prompt_tokens.inc(step.num_prompt_tokens)
        self.prefix_queries.inc(step.num_prefix_queries)
        self.prefix_hits.inc(step.num_prefix_hits)
        self.preemptions.inc(step.num_preemptions)
        self.generation_tokens.inc(step.num_output_tokens)
        for drafter, count in step.drafters.items():
            self.drafts.labels(schedule, drafter).inc(step.drafter_steps.get(drafter, 0))
            self.draft_tokens.labels(schedule, drafter).inc(count.drafted)
            self.accepted_tokens.labels(schedule, drafter).inc(count.accepted)
            self.forwards.labels(drafter).inc(count.forwards)
        for drafter, reason in step.halts:
            self.halts.labels(drafter, reason if reason in HALT_REASONS else OTHER).inc()

    def _of(self, *labels: str) -> list[MetricWrapperBase]:
        """The collectors with exactly these labels."""
        return [
            value
            for value in vars(self).values()
            if isinstance(value, MetricWrapperBase) and value._labelnames == labels
        ]
