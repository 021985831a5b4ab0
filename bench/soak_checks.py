"""What a server that has been under load for long must show, as pure functions: each says what is wrong, or None.

Texts at temperature 0 are those of plain decoding asked alone. Where one differs, the log-probabilities of that plain run
tell whether two tokens were equally likely there up to rounding, as :class:`app.proof.Judge` decides it from a forward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

PREFIX = "graftserve_"
Series = Mapping[str, float]
"""Samples of one scrape: a name is the sum over its labels, and ``name{label=value,...}`` is one of them."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The answer to a question, asked alone with plain decoding."""

    text: str
    reason: str
    num_tokens: int
    close_calls: tuple[tuple[int, float], ...] = ()  # per token: character where it begins, how far the second best was

    def differs(self, text: str, reason: str | None, tolerance: float) -> str | None:
        """None if `text` is the expected one, "near tie" if rounding explains the difference, else what differs."""
        if text == self.text and reason == self.reason:
            return None
        place = common_length(text, self.text)
        # The token that made the difference holds its place; of tokens that share a character any may have.
        begins = [begin for begin, _ in self.close_calls]
        for index, (begin, gap) in enumerate(self.close_calls):
            following = begins[index + 1] if index + 1 < len(begins) else math.inf
            if gap < tolerance and (begin <= place < following or begin == place == following):
                return "near tie"
        if text == self.text:
            return f"ended by {reason!r} instead of {self.reason!r}"
        return f"at character {place}: {text[place : place + 20]!r} instead of {self.text[place : place + 20]!r}"


def common_length(one: str, other: str) -> int:
    """Characters that two texts begin with in common."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def close_calls(logprobs: Mapping[str, Any]) -> tuple[tuple[int, float], ...]:
    """Per token of a plain answer: the character where it begins, and by how much it beat the next best token.

    Args:
        logprobs: of a completion, or of a chat choice, with at least two alternatives per token.
    """
    if "content" in logprobs:
        calls, raw = [], b""
        for token in logprobs["content"]:
            # Characters that are whole by now; bytes that never become one are shown as one replacement each.
            calls.append((len(raw.decode("utf-8", "replace").rstrip("\ufffd")), _gap(token["logprob"], _values(token))))
            raw += bytes(token["bytes"] or b"")
        return tuple(calls)
    columns = zip(logprobs["text_offset"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    return tuple((offset, _gap(own, list(top.values()))) for offset, own, top in columns)


def _values(token: Mapping[str, Any]) -> list[float]:
    return [other["logprob"] for other in token["top_logprobs"]]


def _gap(own: float, alternatives: Sequence[float]) -> float:
    others = sorted(alternatives, reverse=True)
    return abs(own - others[1]) if len(others) > 1 else math.inf


def read_metrics(text: str) -> dict[str, float]:
    """Samples of an exposition text, by name without the prefix, labeled ones also by their labels."""
    series: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix(PREFIX)
            series[name] = series.get(name, 0.0) + sample.value
            if sample.labels:
                labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
                series[f"{name}{{{labels}}}"] = sample.value
    return series


def busy(series: Series) -> str | None:
    """Requests that a server without callers still holds."""
    held = {name: series[name] for name in ("num_requests_running", "num_requests_waiting") if series.get(name)}
    return ", ".join(f"{name} = {value:g}" for name, value in held.items()) or None


def rows_held(series: Series) -> float | None:
    """Rows of key-value pools in use beyond those that a cache of prefixes keeps; None if the server does not say.

    ``cache_rows_used`` counts texts in flight only. Of other gauges, ``…rows_used`` or ``…rows_in_use`` are rows in use, and
    those with rows, and *prefix* or *cached*, in their names are kept ones; where prefixes are cached and no gauge
    says how many rows they have, nothing can be said.
    """
    gauges = {name: value for name, value in series.items() if "{" not in name and "rows" in name}
    if "cache_rows_used" in gauges:
        return gauges["cache_rows_used"]
    used = [value for name, value in gauges.items() if name.endswith(("rows_used", "rows_in_use"))]
    kept = [value for name, value in gauges.items() if "prefix" in name or "cached" in name]
    if not used or (not kept and any("prefix_cache" in name for name in series)):
        return None
    return sum(used) - sum(kept)


def beyond_caches(memory: Sequence[tuple[float, int]], scrapes: Sequence[tuple[float, Series]]) -> list[tuple[float, int]]:
    """Resident bytes less those of cache rows that were used at least once, at the same times.

    A pool takes memory as its rows are first used, up to a size that was set: that is no leak, however long it takes.
    """
    name, pairs = "cache_rows_touched_bytes", zip(memory, scrapes, strict=False)
    return [(second, resident - round(series.get(name, 0.0))) for (second, resident), (_, series) in pairs]


def growth(samples: Sequence[tuple[float, int]]) -> float | None:
    """Slope of memory over the second half of the time, in MB per minute; None with fewer than five samples there.

    Args:
        samples: seconds, and bytes at that time.
    """
    if not samples:
        return None
    middle = (samples[0][0] + samples[-1][0]) / 2
    late = [(second / 60, resident / 1e6) for second, resident in samples if second >= middle]
    if len(late) < 5:
        return None
    minutes, megabytes = np.array(late).T
    return float(np.polyfit(minutes - minutes.mean(), megabytes, 1)[0])


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Drafted tokens accepted per verification when every question is asked alone, before the load and after it."""

    first: float
    last: float

    def fell(self, share: float) -> bool:
        """Whether it is lower by more than `share` of the first value. A rise is no fault: servers learn which drafts pay."""
        return self.first - self.last > share * self.first


def accepted_per_step(before: Series, after: Series) -> float | None:
    """Between two scrapes, over all schedules; None if nothing was verified."""
    steps, accepted = (
        after.get(name, 0.0) - before.get(name, 0.0)
        for name in ("spec_decode_num_steps_total", "spec_decode_num_accepted_tokens_total")
    )
    return accepted / steps if steps > 0 else None


def learned(series: Series) -> dict[str, float]:
    """What the server thinks of its prices and schedules, and what its drafters got accepted so far: why acceptance moved."""
    stems = ("price_drift{", "speedup_estimate{", "breaker_rung{", "fallbacks_total{", "spec_decode_num_")
    return {name: value for name, value in series.items() if name.startswith(stems) and "{" in name and value}


def server_faults(series: Series) -> str | None:
    """Errors of the server's own that it counted: requests that ended in error, answers with 500."""
    names = ("requests_total{finish_reason=error}", "request_errors_total{status=500}")
    return ", ".join(f"{name} = {series[name]:g}" for name in names if series.get(name)) or None


def farewell(status: int | None, written: str) -> str | None:
    """How a server ended that was told to stop while nobody asked anything; it should end with 0 and complain of nothing."""
    if status is None:
        return "did not end after SIGTERM"
    if status:
        return f"ended with status {status}"
    bad = [line for line in written.splitlines() if line.startswith(("ERROR", "CRITICAL", "Traceback"))]
    return f"complained {len(bad)} times, first: {bad[0][:160]}" if bad else None
