"""Prometheus metrics: an observer of the engine, and counts of the HTTP edge.

Only totals are exported; rates are the query's work:

    tokens per step            1 + rate(accepted_tokens) summed over drafter / rate(num_steps)
    acceptance length          1 + rate(accepted_tokens) summed over drafter / rate(num_spec_steps)
    a drafter's worth          rate(accepted_tokens) / rate(draft_tokens) by drafter
    forwards per verification  rate(draft_forwards) summed over drafter / rate(num_steps)

*Accepted* leaves out the token the target adds itself. Every series whose labels are known when the model is ready
exists from the first scrape on, at zero. docs/metrics.md lists them all.
"""

from __future__ import annotations

import logging
import math
from functools import partial

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from app.bridge import Engine
from app.collectors import HALT_REASONS, SIZE_REASONS, SKIP_REASONS, Collectors, bounded, position
from app.version import version
from engine.request import DrafterCount, FinishReason, RequestStats, StepStats
from engine.steering import PriceState

CONTENT_TYPE = CONTENT_TYPE_LATEST
_log = logging.getLogger(__name__)


class Metrics:
    """All counts; ``on_step``, ``on_finish`` and ``on_fallback`` make it an observer of the engine."""

    def __init__(self) -> None:
        """Create the collectors; the series of schedules follow with :meth:`attach`."""
        self.collectors = Collectors()

    def attach(self, engine: Engine) -> None:
        """Create every series of the engine's schedules and drafters at zero, and follow its load."""
        for name in engine.schedules:
            self.expect_arm(engine, name, "")
        self.collectors.running.set_function(lambda: engine.num_running)
        self.collectors.waiting.set_function(lambda: engine.num_waiting)
        self.collectors.max_running.set(engine.max_num_seqs)
        self.collectors.max_waiting.set(engine.max_waiting)
        for owner, (_, total) in engine.row_use.items():
            self.collectors.rows.labels(owner).set(total)
            self.collectors.rows_used.labels(owner).set_function(partial(_rows_used, engine, owner))
            self.collectors.row_bytes.labels(owner).set_function(partial(_row_bytes, engine, owner))
        self._follow_prices(engine)
        self.collectors.build.labels(version(), engine.model_id).set(1)

    def _follow_prices(self, engine: Engine) -> None:
        state = engine.price_state()
        if state is None:
            return
        of = self.collectors
        for model in state.drift:
            of.price_drift.labels(model).set_function(partial(_drift, engine, model))
        for name in state.rung:
            of.speedup.labels(name).set_function(partial(_speedup, engine, name))
            of.rung.labels(name).set_function(partial(_rung, engine, name))
        for index, tuned in enumerate(state.tuned):
            values = (str(tuned.arm.budget), f"{tuned.arm.mu:g}")
            of.tuned_plays.labels(*values).set_function(partial(_plays, engine, index))
            of.tuned_speed.labels(*values).set_function(partial(_tuned_speed, engine, index))

    def expect_arm(self, engine: Engine, schedule: str, arm: str) -> None:
        """Create every series of an arm that uses `schedule` at zero. Never raises: counting must not fail an experiment."""
        try:
            known = engine.schedules[schedule]
            self.collectors.expect(schedule, known.drafters.values(), arm=arm, num_positions=known.budget - 1)
        except Exception:
            _log.exception("could not prepare the metrics of arm %s", arm)

    def on_step(self, steps: list[StepStats]) -> None:
        """Count one engine step; called on the engine thread."""
        self.collectors.engine_steps.inc()
        for step in steps:
            self._count_step(step)

    def on_finish(self, stats: RequestStats, reason: FinishReason) -> None:
        """Count one ended request; called on the engine thread."""
        of, labels = self.collectors, (stats.schedule, stats.arm)
        of.requests.labels(*labels, reason.value).inc()
        if stats.admitted_s > 0:
            of.queued.labels(*labels).observe(stats.admitted_s - stats.arrived_s)
        if stats.first_token_s > 0:
            of.first_token.labels(*labels).observe(stats.first_token_s - stats.arrived_s)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            of.latency.labels(*labels).observe(stats.finished_s - stats.arrived_s)
            if stats.num_output_tokens > 1:
                seconds = stats.last_token_s - stats.first_token_s
                of.per_token.labels(*labels).observe(seconds / (stats.num_output_tokens - 1))

    def on_fallback(self, schedule: str, to: str, reason: str) -> None:
        """Count that `to` takes over from `schedule`; any thread. `reason` is one of a few, as `scheduler.breaker` has them."""
        self.collectors.fallbacks.labels(schedule, to, reason).inc()

    def count_error(self, status: int) -> None:
        """Count a call that was answered with an error. Never raises: counting must not fail a request."""
        try:
            self._count_error(status)
        except Exception:
            _log.exception("could not count an error answer")

    def text(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.collectors.registry)

    def _count_error(self, status: int) -> None:
        self.collectors.request_errors.labels(str(status)).inc()

    def _count_step(self, step: StepStats) -> None:
        of, labels = self.collectors, (step.schedule, step.arm)
        for collector, amount in (
            (of.spec_steps, step.num_drafts),
            (of.steps, step.num_steps),
            (of.accepted_squared, step.num_accepted_squared),
            (of.tree_nodes, step.num_verified_nodes),
            (of.grafts, step.num_grafts),
            (of.lossy_tokens, step.num_lossy),
            (of.verify_seconds, step.verify_s),
            (of.tree_seconds, step.tree_s),
            (of.rule_seconds, step.rule_s),
            (of.other_seconds, step.other_s),
            (of.prompt_tokens, step.num_prompt_tokens),
            (of.prefix_queries, step.num_prefix_queries),
            (of.prefix_hits, step.num_prefix_hits),
            (of.preemptions, step.num_preemptions),
            (of.generation_tokens, step.num_output_tokens),
        ):
            collector.labels(*labels).inc(amount)
        for place, count in enumerate(step.depths):
            of.drafts_per_position.labels(*labels, position(place)).inc(count)
        for gap_s, count in step.token_gaps:
            for _ in range(count):
                of.token_gap.labels(*labels).observe(gap_s)
        for drafter, counts in step.drafters.items():
            self._count_drafter(step, drafter, counts)
        for reason, count in step.sized.items():
            of.sized_trees.labels(*labels, bounded(reason, SIZE_REASONS)).inc(count)
        for drafter, reason in step.halts:
            of.halts.labels(step.schedule, drafter, step.arm, bounded(reason, HALT_REASONS)).inc()

    def _count_drafter(self, step: StepStats, drafter: str, counts: DrafterCount) -> None:
        of, labels = self.collectors, (step.schedule, drafter, step.arm)
        for collector, amount in (
            (of.drafts, step.drafter_steps.get(drafter, 0)),
            (of.draft_tokens, counts.drafted),
            (of.accepted_tokens, counts.accepted),
            (of.forwards, counts.forwards),
            (of.calls, counts.calls),
            (of.draft_seconds, counts.draft_s),
        ):
            collector.labels(*labels).inc(amount)
        for place, count in enumerate(counts.accepted_at):
            of.accepted_per_position.labels(*labels, position(place)).inc(count)
        for reason, count in counts.skips.items():
            of.skips.labels(*labels, bounded(reason, SKIP_REASONS)).inc(count)


def _prices(engine: Engine) -> PriceState:
    state = engine.price_state()
    assert state is not None, "prices are there from the start or never"
    return state


def _drift(engine: Engine, model: str) -> float:
    return _prices(engine).drift[model]


def _speedup(engine: Engine, schedule: str) -> float:
    return _prices(engine).speedup[schedule]


def _rung(engine: Engine, schedule: str) -> float:
    return _prices(engine).rung[schedule]


def _plays(engine: Engine, index: int) -> float:
    return _prices(engine).tuned[index].plays


def _tuned_speed(engine: Engine, index: int) -> float:
    speed = _prices(engine).tuned[index].speed
    return math.nan if speed is None else speed


def _row_bytes(engine: Engine, owner: str) -> float:
    return engine.row_bytes[owner]


def _rows_used(engine: Engine, owner: str) -> float:
    return engine.row_use[owner][0]
