"""What is measured: every Prometheus family of the service, with its labels, and the series that exist from the start.

Names follow vLLM's where it has one, so that boards written for it port by search and replace. Labels are bounded: schedules,
drafters and arms are known when the server starts, reasons and positions are closed sets with a rest, and nothing of a
request is ever a label.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.metrics import MetricWrapperBase

from app.errors import STATUSES
from engine.request import FinishReason
from scheduler.load import ALL, BUDGET, HELD, LOAD, MARGINAL

NAMESPACE = "graftserve"
PREFIX = NAMESPACE + "_"
OTHER = "other"  # reasons that nobody foresaw share one series
HALT_REASONS = ("context", "rows", "nan", "features", "error", OTHER)
SKIP_REASONS = ("plan", "tree", "price", "halted", "prompt", "end", OTHER)
SIZE_REASONS = (ALL, MARGINAL, BUDGET, LOAD, HELD, OTHER)
NUM_POSITIONS = 16  # draft tokens of one step that are counted one by one; the deeper ones share a series
REST = f"{NUM_POSITIONS}+"

_FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_ANSWER_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300, 600)
T = TypeVar("T", bound=MetricWrapperBase)

_ARM = ("schedule", "arm")
_DRAFTER = ("schedule", "drafter", "arm")


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """One collector and what is known of its labels."""

    collector: MetricWrapperBase
    labels: tuple[str, ...]
    values: Mapping[str, Sequence[str]] = field(default_factory=dict)  # of the labels whose values are a closed set


class Collectors:
    """All families, in a registry of their own."""

    def __init__(self) -> None:
        """Create the families; the series of schedules follow with :meth:`expect`."""
        disable_created_metrics()  # one more sample per series, of which Prometheus reads none in this format
        self.registry = CollectorRegistry()
        self.families: list[Family] = []
        ProcessCollector(namespace=NAMESPACE, registry=self.registry)
        self._speculation()
        self._time()
        self._requests()
        self._state()

    def expect(self, schedule: str, drafters: Iterable[str], *, arm: str = "", num_positions: int = 0) -> None:
        """Create the series of a schedule (and of one arm that uses it) at zero.

        A series that appears with its first increment has lost it for every rate.
        """
        known: dict[str, Sequence[str]] = {
            "schedule": (schedule,),
            "arm": (arm,),
            "drafter": tuple(dict.fromkeys(drafters)),
            "position": [position(place) for place in range(min(num_positions, NUM_POSITIONS + 1))],
        }
        for family in self.families:
            values = {**known, **family.values}
            if "schedule" in family.labels and values.keys() >= set(family.labels):
                for labels in product(*(values[label] for label in family.labels)):
                    family.collector.labels(*labels)

    def _speculation(self) -> None:
        counter = self._counter
        self.drafts = counter(
            "spec_decode_num_drafts_total",
            "Steps of sequences in which the drafter had at least one node verified. A step whose tree holds nodes of "
            "two drafters counts for both, so do not sum over drafter: num_spec_steps counts each step once.",
            _DRAFTER,
        )
        self.draft_tokens = counter(
            "spec_decode_num_draft_tokens_total",
            "Drafted nodes sent to verification, by the drafter that created them; siblings in a tree all count.",
            _DRAFTER,
        )
        self.accepted_tokens = counter(
            "spec_decode_num_accepted_tokens_total",
            "Drafted nodes that became output, by the drafter that created them; the target's own token is left out.",
            _DRAFTER,
        )
        self.accepted_per_position = counter(
            "spec_decode_num_accepted_tokens_per_pos_total",
            "num_accepted_tokens by the place of the token among those of its step: position 0 is the first draft token.",
            (*_DRAFTER, "position"),
        )
        self.drafts_per_position = counter(
            "spec_decode_num_drafts_per_pos_total",
            "Steps of sequences that verified at least one node at that position; what the accepted ones are a share of.",
            (*_ARM, "position"),
        )
        self.spec_steps = counter(
            "spec_decode_num_spec_steps_total",
            "Steps of sequences that verified at least one drafted node, whoever drafted it.",
            _ARM,
        )
        self.steps = counter(
            "spec_decode_num_steps_total",
            "Steps of sequences that produced output, drafted for or not: verifications, in the words of the papers.",
            _ARM,
        )
        self.accepted_squared = counter(
            "spec_decode_num_accepted_tokens_squared_total",
            "Over all steps, the square of the tokens that were accepted in the step. The mean of the squares less the square "
            "of the mean is the variance of tokens per step.",
            _ARM,
        )
        self.tree_nodes = counter(
            "spec_decode_num_tree_nodes_total", "Rows verified by the target in these steps, roots included.", _ARM
        )
        self.grafts = counter(
            "spec_decode_num_grafts_total",
            "Nodes that one drafter attached under a node of another, whether they were verified in the end or cut.",
            _ARM,
        )
        self.sized_trees = counter(
            "spec_decode_sized_trees_total",
            "Trees that prices cut, by what bounded the step: every node was worth its row (all), the next one was not "
            "(marginal), there were no more rows (budget), no node of any tree was (load), or too little to begin again "
            "after a step without any (held).",
            (*_ARM, "reason"),
            reason=SIZE_REASONS,
        )
        self.lossy_tokens = counter(
            "spec_decode_lossy_tokens_total",
            "Tokens of answers that a lossy rule accepted against the target's choice; 0 for lossless schedules.",
            _ARM,
        )
        self.forwards = counter(
            "draft_forwards_total",
            "Drafter forwards, counted for each request they answered. Over num_steps this is draft forwards per "
            "verification.",
            _DRAFTER,
        )
        self.calls = counter(
            "drafter_calls_total",
            "Questions put to a drafter, answered or not; a step may put several, and lookups count like models.",
            _DRAFTER,
        )
        self.skips = counter(
            "drafter_skips_total",
            "Steps of sequences in which a drafter of the schedule was not called: the plan did not name it, the tree had "
            "nothing to ask, no call was worth its price, it had given the text up (halted), the prompt was still being read, "
            "or the end of the answer was one token away.",
            (*_DRAFTER, "reason"),
            reason=SKIP_REASONS,
        )
        self.halts = counter(
            "drafter_halts_total",
            "Sequences that a drafter stopped drafting for.",
            (*_DRAFTER, "reason"),
            reason=HALT_REASONS,
        )
        self.fallbacks = counter(
            "fallbacks_total",
            "Moves from a schedule to another one that takes over: a breaker's, down and up, or because a schedule failed.",
            ("schedule", "to", "reason"),
        )

    def _time(self) -> None:
        shared = "Sequences decoded together share the seconds of what was done for all of them."
        counter = self._counter
        self.draft_seconds = counter("draft_seconds_total", f"Seconds spent in a drafter's calls. {shared}", _DRAFTER)
        self.verify_seconds = counter("verify_seconds_total", f"Seconds spent in the target's passes. {shared}", _ARM)
        self.tree_seconds = counter("tree_seconds_total", "Seconds spent growing and cutting trees, drafters left out.", _ARM)
        self.rule_seconds = counter("rule_seconds_total", "Seconds spent deciding what of a tree is accepted.", _ARM)
        self.other_seconds = counter(
            "other_seconds_total",
            "Seconds of the engine's steps that are in none of the other four: admission, books, text, metrics. The five add "
            "up to the time in which the engine was not idle.",
            _ARM,
        )
        self.engine_steps = counter("engine_steps_total", "Rounds of the engine's loop, each for all running sequences.")

    def _requests(self) -> None:
        counter, histogram = self._counter, self._histogram
        self.requests = counter(
            "requests_total",
            "Engine requests that ended, by how: stop and length are answers, abort means the caller went away, error "
            "is our fault. An HTTP call with a list of prompts is several.",
            (*_ARM, "finish_reason"),
            finish_reason=[reason.value for reason in FinishReason],
        )
        self.request_errors = counter(
            "request_errors_total",
            "Calls of /v1 that were answered with an error, by HTTP status; a stream that breaks off counts as the "
            "status it would have had.",
            ("status",),
        )
        for status in STATUSES:
            self.request_errors.labels(str(status))
        self.prompt_tokens = counter("prompt_tokens_total", "Prompt tokens processed, cached ones included.", _ARM)
        self.prefix_queries = counter("prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.", _ARM)
        self.prefix_hits = counter("prefix_cache_hits_total", "Prompt tokens found in the prefix cache.", _ARM)
        self.preemptions = counter(
            "preemptions_total", "Times that a running sequence gave its rows to others, to be taken up again later.", _ARM
        )
        self.generation_tokens = counter("generation_tokens_total", "Tokens delivered, end tokens included.", _ARM)
        self.first_token = histogram(
            "time_to_first_token_seconds", "Seconds from arrival to the first token.", _FIRST_TOKEN_BUCKETS
        )
        self.token_gap = histogram(
            "inter_token_latency_seconds",
            "Seconds from token to token, without the first. One step emits several tokens at once: each is counted with an "
            "equal part of the time since the step before, and those that come with the first token with 0.",
            _TOKEN_BUCKETS,
        )
        self.per_token = histogram(
            "request_time_per_output_token_seconds",
            "Mean seconds per token of an answer, from its first token to its last; answers of one token are left out.",
            _TOKEN_BUCKETS,
        )
        self.latency = histogram(
            "e2e_request_latency_seconds", "Seconds from arrival to the end, of answered requests.", _ANSWER_BUCKETS
        )
        self.queued = histogram(
            "request_queue_time_seconds", "Seconds from arrival to a place among the running.", _FIRST_TOKEN_BUCKETS
        )

    def _state(self) -> None:
        gauge = self._gauge
        self.running = gauge("num_requests_running", "Sequences being decoded.")
        self.waiting = gauge("num_requests_waiting", "Requests waiting for a place.")
        self.max_running = gauge("max_requests_running", "Sequences that can be decoded at the same time.")
        self.max_waiting = gauge("max_requests_waiting", "Requests that may wait; more are refused.")
        self.rows = gauge("cache_rows", "Rows of a model's key-value cache, one per token.", ("owner",))
        in_flight = "Rows of texts in flight; the others are free, or kept for texts that begin alike."
        self.rows_used = gauge("cache_rows_used", in_flight, ("owner",))
        self.row_bytes = gauge(
            "cache_rows_touched_bytes",
            "Bytes of cache rows that were used at least once. On a CPU the cache takes this much of memory by now; it grows "
            "until all rows were used, and never shrinks.",
            ("owner",),
        )
        self.price_drift = gauge(
            "price_drift", "Measured over predicted milliseconds of a model's forwards, lately; 1 is as calibrated.", ("model",)
        )
        self.speedup = gauge(
            "speedup_estimate", "Tokens per millisecond over what plain decoding would make, lately.", ("schedule",)
        )
        self.rung = gauge(
            "breaker_rung", "Steps that a schedule is down its ladder; 0: it decodes as asked.", ("schedule",)
        )
        self.tuned_speed = gauge(
            "talon_tuning_speedup", "Mean speed-up over plain decoding that TALON had with these values.", ("budget", "mu")
        )
        self.tuned_plays = gauge("talon_tuning_plays", "Blocks of steps that TALON used these values for.", ("budget", "mu"))
        self.build = gauge("build_info", "Always 1; the labels say what runs.", ("version", "model"))

    def _counter(self, name: str, text: str, labels: Sequence[str] = (), **values: Sequence[str]) -> Counter:
        return self._add(Counter(PREFIX + name, text, labels, registry=self.registry), labels, values)

    def _gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
        return self._add(Gauge(PREFIX + name, text, labels, registry=self.registry), labels, {})

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return self._add(Histogram(PREFIX + name, text, _ARM, registry=self.registry, buckets=buckets), _ARM, {})

    def _add(self, collector: T, labels: Sequence[str], values: Mapping[str, Sequence[str]]) -> T:
        self.families.append(Family(collector, tuple(labels), values))
        return collector


def position(place: int) -> str:
    """The label of the draft token at `place` of its step, from 0."""
    return str(place) if place < NUM_POSITIONS else REST


def bounded(reason: str, known: Sequence[str]) -> str:
    """The reason itself if it is a known one."""
    return reason if reason in known else OTHER
