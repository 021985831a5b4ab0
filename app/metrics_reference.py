"""docs/metrics.md, written from the collectors themselves: what each family counts and what its labels mean.

    graftserve docs metrics > docs/metrics.md
"""

from __future__ import annotations

from prometheus_client.metrics_core import Metric

from app.collectors import NAMESPACE, PREFIX, REST, Collectors

_LABELS = {
    "schedule": "how the request was decoded; `GET /v1/schedules` lists them",
    "drafter": "`ngram`, `small` or `medium`",
    "arm": "`experiment/arm`; empty for requests outside of an experiment",
    "position": f"place of a draft token in its step, from 0; `{REST}` for all deeper ones",
    "reason": "one of a closed set, the rest of which is `other`",
    "finish_reason": "`stop`, `length`, `abort` or `error`",
    "status": "HTTP status",
    "to": "the schedule that was used instead",
    "owner": "whose cache: `target`, or a drafter",
    "version": "of graftserve",
    "model": "the target by name; in `price_drift`: `target`, or a drafter",
    "budget": "nodes verified per step, root included",
    "mu": "TALON's gate",
}

_STEPS = "sum(rate(spec_decode_num_steps_total[5m]))"
_QUERIES = {
    "tokens per verification (tau), the target's own included": f"sum(rate(generation_tokens_total[5m])) / {_STEPS}",
    "draft forwards per verification (delta)": f"sum(rate(draft_forwards_total[5m])) / {_STEPS}",
    "calls of the medium drafter per step": f'sum(rate(drafter_calls_total{{drafter="medium"}}[5m])) / {_STEPS}',
    "95th percentile of the time to the first token": (
        "histogram_quantile(0.95, sum by (le) (rate(time_to_first_token_seconds_bucket[5m])))"
    ),
}
_FIGURES = "".join(f"| {name} | `{query.replace('rate(', 'rate(' + PREFIX)}` |\n" for name, query in _QUERIES.items())

_HEAD = f"""# Metrics

<!-- Written by `graftserve docs metrics`; a test compares. -->

`GET /metrics` answers in the text format of Prometheus, also while the model loads. All names start with `{PREFIX}`; after
that they are vLLM's where it has the same figure. Everything is a total or a state: rates and shares are the query's work.
A series whose labels are known when the model is ready exists from then on, at zero. If counting fails, the request does not.

*Accepted* never includes the token that the target adds itself. *Drafted* are all nodes sent to verification, siblings
included, so shares of them are lower than a chain's at the same speed; `num_drafts_per_pos` is the fair denominator.

| figure | query |
|---|---|
{_FIGURES}
`deploy/prometheus/rules.yml` records these and others, with confidence bounds; `deploy/grafana/dashboards` shows them.

## Labels

| label | is |
|---|---|
"""


def reference() -> str:
    """The page, in Markdown."""
    collectors = Collectors()
    labels = "".join(f"| `{name}` | {text} |\n" for name, text in _LABELS.items())
    lines = ["\n## Families\n\n", "| name | kind | labels | counts |\n|---|---|---|---|\n"]
    for family in collectors.families:
        (metric,) = family.collector.describe()
        missing = set(family.labels) - set(_LABELS)
        assert not missing, f"{metric.name}: nothing says what the labels {sorted(missing)} are"
        lines.append(_line(metric, family.labels))
    lines.append("\n## Process\n\nFrom the client library, on Linux.\n\n| name | kind | labels | counts |\n|---|---|---|---|\n")
    lines += [_line(m, ()) for m in collectors.registry.collect() if m.name.startswith(f"{NAMESPACE}_process_")]
    return _HEAD + labels + "".join(lines)


def _line(metric: Metric, labels: tuple[str, ...]) -> str:
    name = f"{metric.name}_total" if metric.type == "counter" else metric.name
    shown = ", ".join(f"`{label}`" for label in labels)
    return f"| `{name}` | {metric.type} | {shown} | {metric.documentation} |\n"
