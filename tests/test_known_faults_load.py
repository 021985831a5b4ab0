"""Faults that other servers had with many requests at once, with stopping and with metrics, tried on this one.

trial                                                   test
H2  zombies and stuck places                            test_h2_mixed_load_leaves_nothing_behind
H3  a queue without end                                 test_h3_the_queue_has_an_end
H4  a stop cuts streams                                 test_serve_stop.py
H5  another schedule at every moment                    test_h5_schedules_change_under_load
H6  shared random states                                test_known_faults_sampling.py (test_b7_h6_a_seed_is_a_text)
I1  a counter that falls ends the engine                test_i1_no_counter_falls_and_none_can_fail_a_request
I3  totals and answers disagree                         test_i3_totals_are_the_sums_of_the_answers
I4  several tokens per step and the time between tokens test_i4_latencies_count_what_they_say
I5  several processes, each with its own counts         test_i5_there_is_one_process
I6  names, units and labels                             test_http_metrics.py (test_page_is_lint_free)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from transformers import PreTrainedModel
from typer.testing import CliRunner

from app.cli import application
from engine.admission import Limits
from tests.http_engine import until
from tests.real_server import PATH, Real, real_server

TinyModel = Callable[..., PreTrainedModel]
SCHEDULES = ["ar", "ngram", "small", "chain-medium", "talon", "treegraft"]


@pytest.fixture(scope="module")
def real(tiny_model: TinyModel) -> Iterator[Real]:
    target = tiny_model("llama", 259, 5, max_positions=9000)
    with real_server(
        target,
        small=tiny_model("llama", 259, 99, max_positions=9000),
        medium=target,
        num_rows=30_000,
        limits=Limits(max_num_seqs=4, max_waiting=80),
    ) as real:
        yield real
        until(real.idle)


def one_of(real: Real, draw: random.Random, kind: str) -> tuple[str, Any]:
    """Send one request of a kind; returns the kind and what came back."""
    schedule = {"schedule": draw.choice(SCHEDULES)}
    body: dict[str, Any] = {"prompt": "abc", "temperature": 0, "max_tokens": 8, "speculative": schedule}
    body |= {"long": {"max_tokens": 30}, "stop": {"stop": ["\u0000never"], "max_tokens": 20}, "bad": {"top_p": -1},
             "many": {"n": 2, "temperature": 1}, "cancel": {"max_tokens": 3000, "stream": True},
             "late": {"max_tokens": 3000, "timeout": 0.2}}.get(kind, {})
    with httpx.Client(base_url=real.url, timeout=60) as client:
        if kind == "cancel":
            with client.stream("POST", PATH, json=body) as response:
                next(response.iter_bytes())
            return kind, None
        return kind, client.post(PATH, json=body)


KINDS = ["short", "long", "stop", "bad", "many", "cancel", "late"]
EXPECTED = {"bad": 400, "late": 504}


def test_h2_mixed_load_leaves_nothing_behind(real: Real) -> None:
    """64 requests of all kinds, 16 at once: each has its answer or error, and every place and row is free in the end."""
    kinds = [KINDS[i % len(KINDS)] for i in range(64)]
    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(lambda i: one_of(real, random.Random(i), kinds[i]), range(64)))
    for kind, response in results:
        assert response is None or response.status_code == EXPECTED.get(kind, 200), (kind, response.text)
    until(real.idle)
    assert real.total("num_requests_running") == real.total("num_requests_waiting") == 0
    assert real.client.get("/health").json() == {"status": "ok"}


def test_h3_the_queue_has_an_end(tiny_model: TinyModel) -> None:
    """One place, a queue of four, twenty requests: what does not fit hears so at once and when to come back."""
    target = tiny_model("llama", 259, 5, max_positions=9000)
    with real_server(target, limits=Limits(max_num_seqs=1, max_waiting=4), num_rows=60_000) as real:

        def one(_: int) -> httpx.Response:
            return httpx.post(real.url + PATH, json={"prompt": "abc", "max_tokens": 200, "temperature": 0}, timeout=60)

        with ThreadPoolExecutor(20) as pool:
            answers = list(pool.map(one, range(20)))
        refused = [answer for answer in answers if answer.status_code == 429]
        served = [answer for answer in answers if answer.status_code == 200]
        assert len(refused) + len(served) == 20 and len(served) >= 5 and refused
        assert len({answer.json()["choices"][0]["text"] for answer in served}) == 1
        for answer in refused:
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["type"] == "rate_limit_error"
        assert real.samples()['graftserve_request_errors_total{status="429"}'] == len(refused)


def test_h5_schedules_change_under_load(real: Real) -> None:
    """A batch of which each member is drafted for in another way, and differently the next time, keeps every text."""
    plain = real.text("abc", max_tokens=12)

    def one(i: int) -> tuple[str, str]:
        name = SCHEDULES[i * 5 % len(SCHEDULES)]
        body = real.ask("abc", max_tokens=12, speculative={"schedule": name})
        assert body["metrics"]["graft"]["schedule"] == name
        return name, body["choices"][0]["text"]

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(one, range(24)))
    assert {text for _, text in results} == {plain}
    assert {name for name, _ in results} == set(SCHEDULES)


def test_i1_no_counter_falls_and_none_can_fail_a_request(real: Real, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rejections, cancellations and refusals only add; and an exporter that breaks costs nobody an answer."""
    before = real.samples()
    for i in range(21):
        one_of(real, random.Random(i), KINDS[i % len(KINDS)])
    after = real.samples()
    fallen = [name for name in before if "_total" in name or "_count" in name or "_sum" in name if after[name] < before[name]]
    assert fallen == []

    def broken(*_: object) -> None:
        raise RuntimeError("exporter")

    monkeypatch.setattr(real.app.state.metrics, "on_step", broken)
    monkeypatch.setattr(real.app.state.metrics, "on_finish", broken)
    monkeypatch.setattr(real.app.state.metrics, "_count_error", broken)
    assert real.complete(max_tokens=5).status_code == 200
    assert real.complete(top_p=-1).status_code == 400


def test_i3_totals_are_the_sums_of_the_answers(real: Real) -> None:
    """A board that does not add up to what callers were told is wrong, or they were."""
    names = {
        "spec_decode_num_spec_steps_total": "num_spec_steps",
        "spec_decode_num_draft_tokens_total": "num_draft_tokens",
        "spec_decode_num_accepted_tokens_total": "num_accepted_draft_tokens",
    }
    before = {name: real.total(name) for name in names}
    told = []
    for i in range(24):
        body = real.ask([i, 66], max_tokens=3 + i, speculative={"schedule": SCHEDULES[i % len(SCHEDULES)]})
        metrics = body["metrics"]
        told.append(metrics["speculative_decoding"])
        accepted, trimmed = told[-1]["num_accepted_draft_tokens"], metrics["graft"]["trimmed"]
        assert body["usage"]["completion_tokens"] == metrics["graft"]["num_steps"] + accepted - (trimmed > 0)
    for name, field in names.items():
        assert real.total(name) - before[name] == sum(one[field] for one in told), name


def test_i4_latencies_count_what_they_say(real: Real) -> None:
    """Steps of several tokens must not be taken for single tokens: first tokens are counted once per answer."""
    histograms = ("time_to_first_token_seconds", "e2e_request_latency_seconds")
    names = [f"{name}_{part}" for part in ("count", "sum") for name in histograms]

    def told() -> list[float]:
        return [real.total(name, schedule="chain-medium") for name in names]

    before = told()
    for _ in range(3):
        real.ask("abc", max_tokens=20, speculative={"schedule": "chain-medium"})
    answers, firsts, first_s, whole_s = (after - then for after, then in zip(told(), before, strict=True))
    assert (answers, firsts) == (3, 3)
    assert 0 < first_s <= whole_s


def test_i5_there_is_one_process() -> None:
    """Several would each have a part of the counts, and of the models' memory: no option offers it."""
    result = CliRunner().invoke(application(), ["serve", "--workers", "2"])
    assert result.exit_code == 2
    assert "--workers" in result.output
