"""Experiments as JSON: for the admin API everything, for the public names, arms and intervals.

An interval is ``{"estimate", "low", "high"}``; it holds at all times at once, so a reader may look whenever they like. Figures
that nothing is known of yet are null.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp
from typing import Any

from app.experiments.experiment import Arm, Experiment
from app.experiments.judge import Event, Interval, difference, is_ready, mean_interval, pair_alpha
from app.experiments.tally import ArmTally


def overview(
    views: Sequence[dict[str, Any]],
    *,
    running: str | None,
    persistent: bool,
    default: dict[str, Any],
    promoted: dict[str, str] | None,
    books: dict[str, int],
) -> dict[str, Any]:
    """The whole: `views` of experiments, and what goes for all of them."""
    return {
        "object": "list",
        "running": running,
        "persistent": persistent,
        "default": {**default, "promoted_by": promoted},
        "books": books,
        "data": list(views),
    }


def view(experiment: Experiment, tallies: Mapping[str, ArmTally], events: Sequence[Event]) -> dict[str, Any]:
    """One experiment with its report and what happened to it."""
    shares = experiment.shares
    return {
        "name": experiment.name,
        "state": experiment.state.value,
        "mode": experiment.mode.value,
        "control": experiment.control,
        "alpha": experiment.alpha,
        "guard": experiment.guard,
        "floor": experiment.floor,
        "sticky": experiment.sticky,
        "created": experiment.created_s,
        "ended": experiment.ended_s,
        "winner": experiment.winner,
        "promoted": experiment.promoted,
        "arms": [
            {
                "name": arm.name,
                "schedule": arm.schedule,
                "budget": arm.budget,
                "weight": arm.weight,
                "share": shares[arm.name],
                "stopped": arm.stopped,
            }
            for arm in experiment.arms
        ],
        "report": report(experiment, tallies),
        "events": [{"at": event.at_s, "what": event.what, **event.detail} for event in events],
    }


def public_view(experiment: Experiment, tallies: Mapping[str, ArmTally]) -> dict[str, Any]:
    """What everybody may know of one experiment."""
    shares = experiment.shares
    arms = [
        {
            "name": arm.name,
            "schedule": arm.schedule,
            "share": shares[arm.name],
            "tokens_per_s": _interval(mean_interval(tallies[arm.name].log_rate, experiment.alpha)),
        }
        for arm in experiment.arms
    ]
    return {
        "name": experiment.name,
        "state": experiment.state.value,
        "control": experiment.control,
        "winner": experiment.winner,
        "arms": arms,
        "differences": _differences(experiment, tallies),
    }


def report(experiment: Experiment, tallies: Mapping[str, ArmTally]) -> dict[str, Any]:
    """The figures of every arm, and of every arm against the control."""
    return {
        "confidence": 1 - experiment.alpha,
        "arms": [_arm(arm, tallies[arm.name], experiment.alpha) for arm in experiment.arms],
        "differences": _differences(experiment, tallies),
    }


def _arm(arm: Arm, tally: ArmTally, alpha: float) -> dict[str, Any]:
    rate, compute_s = mean_interval(tally.log_rate, alpha), tally.draft_s + tally.verify_s
    per_token = None if rate is None else Interval(-rate.estimate, -rate.high, -rate.low)
    return {
        "name": arm.name,
        "num_requests": tally.num_requests,
        "num_aborted": tally.num_aborted,
        "num_failed": tally.num_failed,
        "num_timed": tally.log_rate.num,
        "num_units": tally.log_rate.num_units,
        "enough": is_ready(tally),
        "num_prompt_tokens": tally.num_prompt_tokens,
        "num_output_tokens": tally.num_output_tokens,
        "tokens_per_s": _interval(rate),
        "time_per_output_token_s": _interval(per_token),
        "time_to_first_token_s": _interval(mean_interval(tally.log_wait, alpha)),
        "tau": _ratio(tally.num_output_tokens, tally.num_steps),
        "tau_per_answer": _interval(mean_interval(tally.log_tau, alpha)),
        "delta": _ratio(tally.num_forwards, tally.num_steps),
        "tokens_per_compute_s": _ratio(tally.num_output_tokens, compute_s),
    }


def _differences(experiment: Experiment, tallies: Mapping[str, ArmTally]) -> list[dict[str, Any]]:
    """How much faster each arm is than the control: 0.1 is ten per cent more tokens per second."""
    found = []
    for arm in experiment.arms:
        if arm.name == experiment.control:
            continue
        interval = difference(experiment, tallies, arm.name, experiment.control)
        ready = is_ready(tallies[arm.name]) and is_ready(tallies[experiment.control])
        found.append(
            {
                "arm": arm.name,
                "against": experiment.control,
                "confidence": 1 - pair_alpha(experiment.alpha, len(experiment.arms)),
                "tokens_per_s": _interval(interval, less=1.0),
                "decided": ready and interval is not None and not interval.low <= 0 <= interval.high,
            }
        )
    return found


def _interval(of_logs: Interval | None, *, less: float = 0.0) -> dict[str, float] | None:
    """The interval of the exponential, minus `less`; None also where a bound is too large for JSON."""
    if of_logs is None or of_logs.high > 700:
        return None
    return {
        "estimate": exp(of_logs.estimate) - less,
        "low": exp(of_logs.low) - less,
        "high": exp(of_logs.high) - less,
    }


def _ratio(count: float, over: float) -> float | None:
    return count / over if over else None
