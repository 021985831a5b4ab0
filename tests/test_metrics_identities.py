"""The metrics page of a real engine against the numbers in its answers, and against the clock."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.http_engine import Server
from tests.real_service import serve_toy

LOOP = "one two one two one two one two"  # something for prompt lookup to find

Series = Counter[tuple[str, frozenset[tuple[str, str]]]]


@pytest.fixture(scope="module", name="server")
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve_toy(tmp_path_factory.mktemp("toy"), max_num_seqs=3, prefill_chunk=16) as server:
        yield server


def page(server: Server) -> Series:
    """Every sample of the page, by name without prefix and labels."""
    families = text_string_to_metric_families(server.client.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    return Counter(
        {(s.name.removeprefix("graftserve_"), frozenset(s.labels.items())): s.value for s in samples}  # type: ignore[misc]
    )


def grown(now: Series, before: Series, name: str, **labels: str) -> float:
    """How much the samples of that name and those labels grew, summed over all other labels."""
    matching = [key for key in now if key[0] == name and labels.items() <= dict(key[1]).items()]
    assert matching, f"no series {name} {labels}"
    return sum(now[key] - before[key] for key in matching)


def ask(server: Server, schedule: str, **body: Any) -> dict[str, Any]:
    """One answer of the real engine."""
    answer = server.complete(**{"prompt": LOOP, "max_tokens": 12, "speculative": {"schedule": schedule}, **body})
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def test_sums_over_answers_are_the_counters(server: Server) -> None:
    """Two sets of numbers that disagree are two wrong sets of numbers."""
    names = [entry["name"] for entry in server.client.get("/v1/schedules").json()["data"]]
    for schedule in ("ar", "ngram", "chain-medium", "treegraft"):
        assert schedule in names
        before = page(server)
        bodies = [ask(server, schedule, max_tokens=n, temperature=t) for n, t in ((1, 0), (2, 0), (20, 0), (20, 1))]
        bodies.append(ask(server, schedule, prompt=[LOOP, "x", LOOP[:20]], max_tokens=6))
        now = page(server)

        def total(name: str, *, now: Series = now, before: Series = before, schedule: str = schedule, **labels: str) -> float:
            return grown(now, before, name, schedule=schedule, arm="", **labels)

        spec = [body["metrics"]["speculative_decoding"] for body in bodies]
        graft = [body["metrics"]["graft"] for body in bodies]
        assert total("spec_decode_num_spec_steps_total") == sum(one["num_spec_steps"] for one in spec)
        assert total("spec_decode_num_steps_total") == sum(one["num_steps"] for one in graft)
        assert total("spec_decode_num_tree_nodes_total") == sum(one["num_verified_nodes"] for one in graft)
        assert total("spec_decode_num_grafts_total") == sum(one["num_grafts"] for one in graft)
        assert total("generation_tokens_total") == sum(body["usage"]["completion_tokens"] for body in bodies)
        assert total("prompt_tokens_total") == sum(body["usage"]["prompt_tokens"] for body in bodies)
        squares = sum(accepted**2 for one in spec for accepted in one["per_step_accepted"])
        assert total("spec_decode_num_accepted_tokens_squared_total") == squares
        for second in ("verify", "tree", "rule", "other"):
            stated = sum(one[f"{second}_ms"] for one in graft) / 1000
            assert total(f"{second}_seconds_total") == pytest.approx(stated, abs=0.001 * len(graft))
        if schedule == "ar":
            continue
        assert total("spec_decode_num_draft_tokens_total") == sum(one["num_draft_tokens"] for one in spec)
        assert total("spec_decode_num_accepted_tokens_total") == sum(one["num_accepted_draft_tokens"] for one in spec)
        for place in range(7):  # a step that accepted k tokens accepted one at each of the first k positions
            deeper = sum(sum(one["acceptance_histogram"][place + 1 :]) for one in spec)
            assert total("spec_decode_num_accepted_tokens_per_pos_total", position=str(place)) == deeper
            assert total("spec_decode_num_drafts_per_pos_total", position=str(place)) >= deeper
        assert total("spec_decode_num_drafts_per_pos_total", position="0") == sum(one["num_spec_steps"] for one in spec)
        for drafter in graft[0]["drafters"]:
            counts = [one["drafters"][drafter] for one in graft]
            for name, key in (
                ("spec_decode_num_draft_tokens_total", "drafted"),
                ("spec_decode_num_accepted_tokens_total", "accepted"),
                ("draft_forwards_total", "forwards"),
                ("drafter_calls_total", "calls"),
            ):
                assert total(name, drafter=drafter) == sum(count[key] for count in counts), (schedule, drafter, name)
            skipped = sum((Counter(count["skipped_steps"]) for count in counts), Counter[str]())
            for reason in ("plan", "tree", "halted", "prompt", "end"):
                assert total("drafter_skips_total", drafter=drafter, reason=reason) == skipped[reason]


def test_every_step_calls_a_drafter_or_says_why_not(server: Server) -> None:
    """Skips that are not counted make a drafter look cheaper than it is called."""
    before = page(server)
    graft = ask(server, "treegraft", max_tokens=30)["metrics"]["graft"]
    now = page(server)
    for drafter in ("ngram", "medium"):
        skipped = grown(now, before, "drafter_skips_total", schedule="treegraft", drafter=drafter)
        calls = grown(now, before, "drafter_calls_total", schedule="treegraft", drafter=drafter)
        assert skipped <= graft["num_steps"] <= skipped + calls
        assert grown(now, before, "drafter_skips_total", drafter=drafter, reason="prompt") == 1  # the prompt's own step


def test_gaps_are_one_less_than_tokens_and_add_up_to_the_time_between_first_and_last(server: Server) -> None:
    """A step emits several tokens at once: counting its pause once, or for each token, is off by the acceptance length."""
    before, start = page(server), time.monotonic()
    with server.client.stream(
        "POST",
        "/v1/completions",
        json={"prompt": LOOP, "max_tokens": 80, "temperature": 0, "stream": True, "speculative": {"schedule": "treegraft"}},
    ) as response:
        arrivals = [time.monotonic() for line in response.iter_lines() if '"text"' in line]
    now, wall_s = page(server), time.monotonic() - start
    labels = {"schedule": "treegraft", "arm": ""}
    assert grown(now, before, "inter_token_latency_seconds_count", **labels) == 79
    between_s = grown(now, before, "inter_token_latency_seconds_sum", **labels)
    first_s = grown(now, before, "time_to_first_token_seconds_sum", **labels)
    seen_s = arrivals[-1] - arrivals[0]  # by a client on a busy machine; a wrong rule is off by the four tokens of a step
    assert seen_s / 2 - 0.1 <= between_s <= 2 * seen_s + 0.1
    assert grown(now, before, "request_time_per_output_token_seconds_sum", **labels) == pytest.approx(between_s / 79)
    assert first_s + between_s <= grown(now, before, "e2e_request_latency_seconds_sum", **labels) + 1e-9 <= wall_s


def test_the_five_kinds_of_seconds_are_the_time_at_work(server: Server) -> None:
    """A part of a step that belongs to no kind would hide where the time goes."""
    before = page(server)
    ask(server, "treegraft", max_tokens=100)
    now = page(server)
    kinds = {
        kind: grown(now, before, f"{kind}_seconds_total", schedule="treegraft")
        for kind in ("draft", "verify", "tree", "rule", "other")
    }
    assert all(seconds > 0 for seconds in kinds.values()), kinds
    latency = grown(now, before, "e2e_request_latency_seconds_sum", schedule="treegraft")
    queued = grown(now, before, "request_queue_time_seconds_sum", schedule="treegraft")
    assert sum(kinds.values()) == pytest.approx(latency - queued, rel=0.15, abs=0.1), kinds


def test_arms_of_an_experiment_are_counted_apart(server: Server) -> None:
    """All series of an arm exist from its start on, and hold its requests and nobody else's."""
    arms = [{"name": "plain", "schedule": "ar"}, {"name": "grafted", "schedule": "treegraft"}]
    assert server.client.post("/admin/experiments", json={"name": "trial", "arms": arms}).status_code == 200
    before = page(server)
    labels = {"arm": "trial/grafted", "schedule": "treegraft", "drafter": "medium"}
    assert grown(before, Counter(), "drafter_calls_total", **labels) == 0
    tokens = Counter[str]()
    for number in range(12):
        answer = server.complete(prompt=LOOP, max_tokens=3 + number, user=f"u{number}").json()
        tokens[answer["metrics"]["graft"]["arm"]] += answer["usage"]["completion_tokens"]
    ask(server, "treegraft")
    server.client.post("/admin/experiments/trial/stop")
    now = page(server)
    assert set(tokens) == {"plain", "grafted"}
    for arm, count in tokens.items():
        assert grown(now, before, "generation_tokens_total", arm=f"trial/{arm}") == count


def test_rows_go_back_when_nobody_needs_them(server: Server) -> None:
    """A gauge of rows that only climbs is a leak, or a wrong gauge."""
    now = page(server)
    for owner in ("target", "medium"):
        labels = frozenset({("owner", owner)})
        assert now["cache_rows", labels] > 0
        assert now["cache_rows_used", labels] == 0
