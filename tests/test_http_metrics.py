"""The metrics page: names, first values, agreement with the answers, and that counting can fail nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.metrics import Metrics
from app.metrics_reference import reference
from engine.request import DrafterCount, FinishReason, RequestStats, StepStats
from tests.http_engine import ScriptedEngine, Server, serve, until

TOTALS = ("_total", "_count", "_sum", "_bucket")
LABELS = {"schedule", "drafter", "arm", "reason", "position", "to", "finish_reason", "status", "owner", "version", "model"}
LABELS |= {"le"}  # of histograms


@pytest.fixture(scope="module", name="running")
def _running() -> Iterator[Server]:
    with serve() as server:
        yield server


@pytest.fixture
def server(running: Server) -> Server:
    running.engine.reset()
    return running


def test_every_known_series_exists_at_zero_before_the_first_request() -> None:
    """A series that appears with its first increment loses it in every rate, and an empty board looks broken."""
    with serve() as server:
        samples = server.metrics()
        for schedule in ("ar", "chain", "graft"):
            labels = f'{{arm="",schedule="{schedule}"}}'
            for name in ("spec_steps", "steps", "tree_nodes", "grafts", "accepted_tokens_squared"):
                assert samples[f"graftserve_spec_decode_num_{name}_total{labels}"] == 0
            for name in ("verify", "tree", "rule", "other"):
                assert samples[f"graftserve_{name}_seconds_total{labels}"] == 0
            for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency", "request_queue_time"):
                assert samples[f"graftserve_{name}_seconds_count{labels}"] == 0
            assert samples[f'graftserve_requests_total{{arm="",finish_reason="stop",schedule="{schedule}"}}'] == 0
        for schedule, drafter in product(("chain", "graft"), ("ngram", "small")):
            before, after = f'arm="",drafter="{drafter}"', f'schedule="{schedule}"'
            for name in ("drafts", "draft_tokens", "accepted_tokens"):
                assert samples[f"graftserve_spec_decode_num_{name}_total{{{before},{after}}}"] == 0
            assert samples[f"graftserve_draft_seconds_total{{{before},{after}}}"] == 0
            for reason in ("plan", "halted", "other"):
                assert samples[f'graftserve_drafter_skips_total{{{before},reason="{reason}",{after}}}'] == 0
            for place in range(4):
                name = "graftserve_spec_decode_num_accepted_tokens_per_pos_total"
                assert samples[f'{name}{{{before},position="{place}",{after}}}'] == 0
        for status in (400, 404, 405, 413, 429, 500, 503):
            assert f'graftserve_request_errors_total{{status="{status}"}}' in samples
        for name in ("engine_steps_total", "num_requests_running", "num_requests_waiting"):
            assert samples[f"graftserve_{name}"] == 0
        assert samples['graftserve_cache_rows{owner="target"}'] == 100
        assert [v for k, v in samples.items() if k.startswith("graftserve_build_info") and 'model="toy' in k] == [1]


def test_page_is_lint_free(server: Server) -> None:
    """One HELP and TYPE per family, counters end in _total and nothing else does, units in names, labels bounded."""
    answer = server.complete().json()
    response = server.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    text = response.text
    for word in ("HELP", "TYPE"):
        named = [line.split()[2] for line in text.splitlines() if line.startswith(f"# {word}")]
        assert len(named) == len(set(named))
        assert all(name.startswith("graftserve_") for name in named)
    for family in text_string_to_metric_families(text):
        assert family.documentation, family.name
        assert family.type in ("counter", "gauge", "histogram"), family.name
        assert "milli" not in family.name
        for sample in family.samples:
            assert (family.type == "counter") == sample.name.endswith("_total"), sample.name
            assert math.isfinite(sample.value), sample
            assert set(sample.labels) <= LABELS
            assert answer["id"] not in str(sample.labels)
    series = [line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(series) == len(set(series))


def test_counters_grow_by_what_the_answers_say(server: Server) -> None:
    """Two sets of numbers that disagree are two wrong sets of numbers."""
    names = {
        "spec_decode_num_spec_steps_total": "num_spec_steps",
        "spec_decode_num_draft_tokens_total": "num_draft_tokens",
        "spec_decode_num_accepted_tokens_total": "num_accepted_draft_tokens",
    }
    before = {name: server.sums(name) for name in (*names, "generation_tokens_total", "prompt_tokens_total")}
    bodies = [
        server.complete(max_tokens=n, speculative={"schedule": s}).json()
        for n in (1, 7, 20)
        for s in server.engine.schedules
    ]
    for name, key in names.items():
        assert server.sums(name) - before[name] == sum(b["metrics"]["speculative_decoding"][key] for b in bodies)
    for name, key in (("generation_tokens_total", "completion_tokens"), ("prompt_tokens_total", "prompt_tokens")):
        assert server.sums(name) - before[name] == sum(body["usage"][key] for body in bodies)


def test_steps_are_counted_once_and_drafts_once_per_drafter(server: Server) -> None:
    """The mean acceptance length needs steps; a sum of the drafters' counts would count a shared tree twice."""
    before = server.metrics()
    server.complete(max_tokens=9)
    after = server.metrics()

    def grown(name: str) -> float:
        return after[f"graftserve_spec_decode_{name}"] - before[f"graftserve_spec_decode_{name}"]

    assert grown('num_spec_steps_total{arm="",schedule="graft"}') == 3
    assert grown('num_drafts_total{arm="",drafter="ngram",schedule="graft"}') == 3
    assert grown('num_drafts_total{arm="",drafter="small",schedule="graft"}') == 3
    assert grown('num_tree_nodes_total{arm="",schedule="graft"}') == 15


def test_no_counter_ever_falls(server: Server) -> None:
    """Answers, errors, cancelled and failed requests mixed: a falling counter reads as a restart."""
    seen = server.metrics()
    for round_ in range(4):
        server.complete(max_tokens=5, stream=bool(round_ % 2))
        server.complete(top_p=-1)
        server.engine.fail_after = 1
        server.complete()
        server.engine.fail_after = None
        now = server.metrics()
        assert all(now[name] >= value for name, value in seen.items() if name.partition("{")[0].endswith(TOTALS))
        assert set(now) >= set(seen)
        seen = now


def test_a_failing_exporter_fails_no_request(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A metric is worth less than an answer, whether the engine's observer or the edge's own counting breaks."""
    metrics: Metrics = server.app.state.metrics

    def broken(*_: object) -> None:
        raise RuntimeError("exporter")

    for name in ("on_step", "on_finish", "_count_error"):
        monkeypatch.setattr(metrics, name, broken)
    assert server.complete().status_code == 200
    assert server.complete(stream=True).text.endswith("data: [DONE]\n\n")
    assert server.complete(top_p=-1).status_code == 400
    assert server.client.get("/metrics").status_code == 200


def test_errors_are_counted_by_status_and_only_for_the_api(server: Server) -> None:
    """A scanner's 404s must not look like failing users."""
    before = server.metrics()
    server.complete(top_p=-1)
    server.complete(model="other")
    server.client.get("/favicon.ico")
    after = server.metrics()
    for status, growth in ((400, 1), (404, 1), (500, 0)):
        name = f'graftserve_request_errors_total{{status="{status}"}}'
        assert after[name] - before[name] == growth


def test_gauges_follow_the_engine(server: Server) -> None:
    """A queue that cannot be seen cannot be scaled."""
    server.engine.paused = True
    with server.client.stream("POST", "/v1/completions", json={"prompt": ["a", "b", "c"], "stream": True}):
        until(lambda: (server.sums("num_requests_running"), server.sums("num_requests_waiting")) == (2, 1))
    server.engine.paused = False
    until(lambda: (server.sums("num_requests_running"), server.sums("num_requests_waiting")) == (0, 0))


def test_reasons_nobody_foresaw_share_one_series() -> None:
    """A reason with a number in it would grow a series per request until the monitoring dies."""
    metrics = Metrics()
    metrics.attach(ScriptedEngine())
    for number in range(100):
        metrics.on_step([StepStats("graft", halts=(("small", f"row {number} is missing"), ("small", "rows")))])
    page = metrics.text().decode()
    assert 'graftserve_drafter_halts_total{arm="",drafter="small",reason="other",schedule="graft"} 100.0' in page
    assert 'graftserve_drafter_halts_total{arm="",drafter="small",reason="rows",schedule="graft"} 100.0' in page
    assert "is missing" not in page


def test_observers_numbers_land_in_the_right_series() -> None:
    """Each field of a step has one counter."""
    metrics = Metrics()
    metrics.attach(ScriptedEngine())
    metrics.on_step(
        [
            StepStats(
                "graft",
                arm="b",
                num_drafts=2,
                num_steps=3,
                num_output_tokens=5,
                num_prompt_tokens=7,
                num_verified_nodes=11,
                num_grafts=13,
                num_lossy=1,
                drafters={"small": DrafterCount(17, 4, 19, 23, {"plan": 3, "who knows": 1}, [3, 1], 0.25)},
                drafter_steps={"small": 2},
                draft_s=0.25,
                verify_s=0.5,
                tree_s=0.75,
                rule_s=1.25,
                other_s=1.5,
                num_accepted_squared=10,
                depths=[2, *[1] * 21],
                token_gaps=[(0.0, 2), (0.5, 1)],
            )
        ]
    )
    page = metrics.text().decode()
    for line in (
        'spec_decode_num_drafts_total{arm="b",drafter="small",schedule="graft"} 2.0',
        'spec_decode_num_draft_tokens_total{arm="b",drafter="small",schedule="graft"} 17.0',
        'spec_decode_num_accepted_tokens_total{arm="b",drafter="small",schedule="graft"} 4.0',
        'spec_decode_num_accepted_tokens_per_pos_total{arm="b",drafter="small",position="0",schedule="graft"} 3.0',
        'spec_decode_num_accepted_tokens_per_pos_total{arm="b",drafter="small",position="1",schedule="graft"} 1.0',
        'spec_decode_num_drafts_per_pos_total{arm="b",position="0",schedule="graft"} 2.0',
        'spec_decode_num_drafts_per_pos_total{arm="b",position="15",schedule="graft"} 1.0',
        'spec_decode_num_drafts_per_pos_total{arm="b",position="16+",schedule="graft"} 6.0',
        'spec_decode_num_spec_steps_total{arm="b",schedule="graft"} 2.0',
        'spec_decode_num_steps_total{arm="b",schedule="graft"} 3.0',
        'spec_decode_num_accepted_tokens_squared_total{arm="b",schedule="graft"} 10.0',
        'spec_decode_num_tree_nodes_total{arm="b",schedule="graft"} 11.0',
        'spec_decode_num_grafts_total{arm="b",schedule="graft"} 13.0',
        'spec_decode_lossy_tokens_total{arm="b",schedule="graft"} 1.0',
        'draft_forwards_total{arm="b",drafter="small",schedule="graft"} 19.0',
        'drafter_calls_total{arm="b",drafter="small",schedule="graft"} 23.0',
        'drafter_skips_total{arm="b",drafter="small",reason="plan",schedule="graft"} 3.0',
        'drafter_skips_total{arm="b",drafter="small",reason="other",schedule="graft"} 1.0',
        'draft_seconds_total{arm="b",drafter="small",schedule="graft"} 0.25',
        'verify_seconds_total{arm="b",schedule="graft"} 0.5',
        'tree_seconds_total{arm="b",schedule="graft"} 0.75',
        'rule_seconds_total{arm="b",schedule="graft"} 1.25',
        'other_seconds_total{arm="b",schedule="graft"} 1.5',
        'prompt_tokens_total{arm="b",schedule="graft"} 7.0',
        'generation_tokens_total{arm="b",schedule="graft"} 5.0',
        'inter_token_latency_seconds_count{arm="b",schedule="graft"} 3.0',
        'inter_token_latency_seconds_sum{arm="b",schedule="graft"} 0.5',
        "engine_steps_total 1.0",
    ):
        assert f"graftserve_{line}\n" in page


def test_latencies_count_answers_only_and_first_tokens_of_all() -> None:
    """An aborted request's duration says how patient the caller was."""
    metrics = Metrics()
    times = {"arrived_s": 10.0, "admitted_s": 10.25, "first_token_s": 10.5, "last_token_s": 11.5, "finished_s": 12.0}
    stats = RequestStats("graft", 1, num_output_tokens=5, **times)  # type: ignore[arg-type]
    for reason in FinishReason:
        metrics.on_finish(stats, reason)
    metrics.on_finish(RequestStats("graft", 1, arrived_s=10.0, finished_s=11.0), FinishReason.ABORT)
    page = metrics.text().decode()
    labels = '{arm="",schedule="graft"}'
    assert f"graftserve_e2e_request_latency_seconds_count{labels} 2.0" in page
    assert f"graftserve_e2e_request_latency_seconds_sum{labels} 4.0" in page
    assert f"graftserve_request_time_per_output_token_seconds_sum{labels} 0.5" in page
    assert f"graftserve_time_to_first_token_seconds_count{labels} 4.0" in page
    assert f"graftserve_request_queue_time_seconds_sum{labels} 1.0" in page
    assert 'graftserve_requests_total{arm="",finish_reason="abort",schedule="graft"} 2.0' in page


def test_fallbacks_are_counted_by_where_they_went() -> None:
    """An answer decoded under another schedule must not pass for one of its own."""
    metrics = Metrics()
    metrics.on_fallback("treegraft", "ar", "breaker")
    assert 'graftserve_fallbacks_total{reason="breaker",schedule="treegraft",to="ar"} 1.0' in metrics.text().decode()


def test_series_of_an_arm_exist_once_it_is_expected() -> None:
    """An arm's first requests would be missing from every rate."""
    metrics = Metrics()
    metrics.attach(ScriptedEngine())
    metrics.collectors.expect("graft", ["small"], arm="b", num_positions=2)
    page = metrics.text().decode()
    assert 'graftserve_spec_decode_num_steps_total{arm="b",schedule="graft"} 0.0' in page
    assert 'graftserve_spec_decode_num_drafts_per_pos_total{arm="b",position="1",schedule="graft"} 0.0' in page
    assert 'arm="b",position="2"' not in page and 'arm="b",drafter="ngram"' not in page


def test_the_page_of_the_documentation_is_current() -> None:
    """Names that were changed since would be looked for in vain. Renew: graftserve docs metrics > docs/metrics.md"""
    assert (Path(__file__).resolve().parent.parent / "docs" / "metrics.md").read_text() == reference()


def test_the_documentation_names_everything_on_the_page(server: Server) -> None:
    """What is exported and not described is read wrongly."""
    text = reference()
    for family in text_string_to_metric_families(server.client.get("/metrics").text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert f"| `{name}` | {family.type} |" in text
        assert all(f"| `{label}` |" in text for sample in family.samples for label in sample.labels if label != "le")
