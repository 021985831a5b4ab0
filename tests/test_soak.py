"""A soak that could not fail would show nothing: each check passes what is right and finds what is planted."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from app.config import Settings
from bench.server_process import ServerFailed, ServerProcess, as_options
from bench.soak_checks import (
    Acceptance,
    Expected,
    accepted_per_step,
    beyond_caches,
    busy,
    close_calls,
    farewell,
    growth,
    read_metrics,
    rows_held,
    server_faults,
)
from bench.soak_mix import COMPLETIONS, WEIGHTS, Malformed, Move, Offer, Question, draw, malformed, plain, questions
from bench.soak_play import Plan, Soak, make
from bench.soak_report import checks
from models import toy

ROOT = Path(__file__).resolve().parent.parent
QUESTION = Question(0, COMPLETIONS, {"prompt": "a", "max_tokens": 4, "temperature": 0})
KNOWN = Expected("abcd", "length", 4, ((0, 2.0), (1, 1.0), (2, 0.0004), (3, 1.0)))
PLAN = Plan([QUESTION], [], Offer(["ar"], 2000), {0: [KNOWN]}, tolerance=1e-3)


# Texts.


@pytest.mark.parametrize(
    ("text", "reason", "verdict"),
    [
        ("abcd", "length", None),
        ("abXd", "length", "near tie"),  # the third token won by 0.0004
        ("abX", "stop", "near tie"),
        ("aXcd", "length", "different"),
        ("abcX", "length", "different"),
        ("abcd", "stop", "different"),
        ("abc", "length", "different"),
        ("", "length", "different"),
    ],
)
def test_a_wrong_token_is_told_from_a_near_tie(text: str, reason: str, verdict: str | None) -> None:
    """Without the evidence of a close call a different text is a wrong one; with it, rounding may have decided."""
    found = KNOWN.differs(text, reason, 1e-3)
    assert found == verdict if verdict in (None, "near tie") else found not in (None, "near tie")


def test_close_calls_are_read_from_both_dialects() -> None:
    """Offsets that slip would excuse a wrong token by its neighbor's tie."""
    completion = {
        "text_offset": [0, 2],
        "token_logprobs": [-0.5, -1.0],
        "top_logprobs": [{"ab": -0.5, "x": -3.0}, {"c": -1.0, "d": -1.25}],
    }
    chat = {
        "content": [
            {"logprob": -0.5, "bytes": list(b"ab"), "top_logprobs": [{"logprob": -0.5}, {"logprob": -3.0}]},
            {"logprob": -1.0, "bytes": list(b"c"), "top_logprobs": [{"logprob": -1.0}, {"logprob": -1.25}]},
        ]
    }
    assert close_calls(completion) == close_calls(chat) == ((0, 2.5), (2, 0.25))


# Memory, acceptance, counters.


def memory(megabytes_per_minute: float, *, warm_up: float = 0.0) -> list[tuple[float, int]]:
    """Ten minutes of samples with 3 MB of noise; `warm_up` MB come in the first minutes."""
    rng = random.Random(3)
    return [
        (s, int(1e6 * (400 + megabytes_per_minute * s / 60 + warm_up * min(s / 200, 1) + rng.uniform(-3, 3))))
        for s in map(float, range(0, 600, 2))
    ]


def test_a_leak_is_seen_and_a_warm_up_is_not_one() -> None:
    """Buffers that fill in the first minutes are no leak; 2 MB a minute are 3 GB a day."""
    flat, warm, leak = growth(memory(0)), growth(memory(0, warm_up=300)), growth(memory(2))
    assert flat is not None and warm is not None and leak is not None
    assert abs(flat) < 0.5 and abs(warm) < 0.5 and 1.5 < leak < 2.5, (flat, warm, leak)


def test_too_few_samples_show_no_growth() -> None:
    """A slope through two points is noise."""
    assert growth([]) is None and growth(memory(9)[:6]) is None


def scrapes(megabytes_per_minute: float = 0.0) -> list[tuple[float, dict[str, float]]]:
    """At the times of `memory`; the caches' rows are used for the first time at that rate."""
    return [(s, {"cache_rows_touched_bytes": 1e6 * megabytes_per_minute * s / 60}) for s, _ in memory(0)]


def test_a_cache_that_fills_up_is_no_leak() -> None:
    """Its size was set beforehand, however long it takes until the last row was used."""
    filling = growth(beyond_caches(memory(9), scrapes(9)))
    leaking = growth(beyond_caches(memory(11), scrapes(9)))
    assert filling is not None and leaking is not None and abs(filling) < 0.5 and 1.5 < leaking < 2.5
    assert beyond_caches(memory(0)[:3], [(0.0, {})] * 2) == memory(0)[:2], "a server that does not say is taken as it is"


@pytest.mark.parametrize(
    ("first", "last", "fell"),
    [(1.2, 1.2, False), (1.2, 0.8, True), (1.2, 0.0, True), (0.6, 1.2, False), (1.2, 0.95, False), (0.0, 0.0, False)],
)
def test_a_fall_of_acceptance_is_seen(first: float, last: float, fell: bool) -> None:
    """Texts stay right when a drafter has lost the thread; only the speed is gone."""
    assert Acceptance(first, last).fell(0.25) is fell


def test_accepted_tokens_are_counted_between_two_scrapes() -> None:
    """A server without drafters must not divide by zero."""
    before = {"spec_decode_num_steps_total": 10.0, "spec_decode_num_accepted_tokens_total": 4.0}
    after = {"spec_decode_num_steps_total": 30.0, "spec_decode_num_accepted_tokens_total": 34.0}
    assert accepted_per_step(before, after) == 1.5
    assert accepted_per_step(after, after) is None and accepted_per_step({}, {}) is None


EXPOSITION = """
# TYPE graftserve_num_requests_running gauge
graftserve_num_requests_running 0.0
# TYPE graftserve_num_requests_waiting gauge
graftserve_num_requests_waiting 1.0
# TYPE graftserve_requests_total counter
graftserve_requests_total{finish_reason="stop"} 5.0
graftserve_requests_total{finish_reason="error"} 2.0
"""


def test_requests_that_are_left_and_errors_are_read_from_the_metrics() -> None:
    """A request that nobody waits for holds its place for good."""
    series = read_metrics(EXPOSITION)
    assert series["requests_total"] == 7
    assert busy(series) == "num_requests_waiting = 1"
    assert server_faults(series) == "requests_total{finish_reason=error} = 2"
    assert busy({"num_requests_running": 0.0}) is None and server_faults({"requests_total{finish_reason=stop}": 9.0}) is None


@pytest.mark.parametrize(
    ("series", "held"),
    [
        ({}, None),  # no gauge
        ({"cache_rows": 500.0, "cache_rows_used": 0.0}, 0),
        ({"cache_rows_used": 7.0, "cache_rows_used{owner=target}": 7.0, "prefix_cache_hits_total": 5.0}, 7),
        ({"kv_rows_used": 90.0, "prefix_cache_rows": 90.0, "prefix_cache_hits_total": 5.0}, 0),
        ({"kv_rows_used": 93.0, "kv_rows_cached": 90.0, "prefix_cache_hits_total": 5.0}, 3),
        ({"kv_rows_used": 93.0, "prefix_cache_hits_total": 5.0}, None),  # kept or lost? nobody says
    ],
)
def test_rows_that_nobody_owns_are_counted(series: dict[str, float], held: float | None) -> None:
    """Rows that a cancelled request leaves behind add up until nothing is admitted."""
    assert rows_held(series) == held


@pytest.mark.parametrize(
    ("status", "written", "is_right"),
    [
        (0, "graftserve: ready\ngraftserve: stopped\n", True),
        (None, "", False),
        (-9, "", False),
        (1, "", False),
        (0, "ERROR engine.engine: a step failed\n", False),
        (0, "Traceback (most recent call last):\n", False),
    ],
)
def test_an_end_is_clean_or_it_is_not(status: int | None, written: str, is_right: bool) -> None:
    """A server that hangs or complains on its way out fails in the hands of whoever restarts it."""
    assert (farewell(status, written) is None) is is_right


RIGHT: dict[str, Any] = {
    "memory": memory(0),
    "scrapes": scrapes(),
    "rates": Acceptance(1.2, 1.2),
    "series": {"num_requests_running": 0.0},
    "health": 200,
    "status": 0,
    "written": "",
    "growth_limit": 1.0,
    "acceptance_limit": 0.25,
    "num_violations": 0,
    "num_compared": 10,
    "num_hung_up": 3,
}


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"memory": memory(2)},
        {"rates": Acceptance(1.2, 0.4)},
        {"series": {"num_requests_running": 1.0}},
        {"series": {"cache_rows_used": 1.0}},
        {"series": {"request_errors_total{status=500}": 1.0}},
        {"health": 503},
        {"status": 1},
        {"written": "ERROR x"},
        {"num_violations": 1},
        {"num_compared": 0},
        {"num_hung_up": 0},
    ],
    ids=lambda wrong: next(iter(wrong), "nothing"),
)
def test_one_wrong_thing_fails_exactly_one_check(wrong: dict[str, Any]) -> None:
    """Each fault must be seen by itself, and a good run must pass."""
    failed = [check for check in checks(**(RIGHT | wrong)) if not check.is_right]
    assert len(failed) == bool(wrong), failed


# What a client makes of an answer.


def whole(text: str = "abcd", reason: str = "length", tokens: int = 4) -> Callable[[httpx.Request], httpx.Response]:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
    return lambda _: httpx.Response(200, json={"choices": [choice], "usage": {"completion_tokens": tokens}})


def streamed(*events: str) -> Callable[[httpx.Request], httpx.Response]:
    return lambda _: httpx.Response(200, content="".join(f"data: {event}\n\n" for event in events))


def piece(text: str, reason: str | None = None) -> str:
    return json.dumps({"choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": reason}]})


USAGE = json.dumps({"choices": [], "usage": {"completion_tokens": 4}})
ERROR = {"error": {"message": "m", "type": "t", "param": None, "code": None}}


def played(answer: Callable[[httpx.Request], httpx.Response], move: Move) -> Soak:
    """One move against a server that answers like that."""

    async def play() -> Soak:
        soak = Soak()
        async with httpx.AsyncClient(base_url="http://toy", transport=httpx.MockTransport(answer)) as client:
            await make(client, soak, PLAN, move)
        return soak

    return asyncio.run(play())


def asks(**how: Any) -> Move:
    return Move("answer", COMPLETIONS, {**QUESTION.body, **how}, QUESTION)


@pytest.mark.parametrize(
    ("answer", "stream"),
    [
        (whole(), False),
        (streamed(piece("ab"), piece("cd"), piece("", "length"), USAGE, "[DONE]"), True),
        (lambda _: httpx.Response(429, json=ERROR, headers={"Retry-After": "1"}), False),
    ],
)
def test_right_answers_are_not_blamed(answer: Callable[[httpx.Request], httpx.Response], stream: bool) -> None:
    """A soak that cries wolf is switched off."""
    assert not played(answer, asks(stream=stream)).violations


@pytest.mark.parametrize(
    ("answer", "stream"),
    [
        (whole("abce"), False),
        (whole(reason="stop"), False),
        (whole(tokens=5), False),
        (lambda _: httpx.Response(500, json=ERROR), False),
        (lambda _: httpx.Response(400, json=ERROR), False),
        (lambda _: httpx.Response(429, json=ERROR), False),  # when may one come back?
        (lambda _: httpx.Response(503, text="busy", headers={"Retry-After": "1"}), True),  # no error object
        (streamed(piece("abce"), piece("", "length"), USAGE, "[DONE]"), True),
        (streamed(piece("abcd"), piece("", "length"), USAGE), True),
        (streamed(piece("abcd"), USAGE, "[DONE]"), True),
        (streamed(piece("abcd", "length"), piece(""), USAGE, "[DONE]"), True),
        (streamed(piece("ab"), json.dumps(ERROR), "[DONE]"), True),
    ],
)
def test_wrong_answers_are_blamed(answer: Callable[[httpx.Request], httpx.Response], stream: bool) -> None:
    """A wrong token, a count, a status or a stream that breaks the rules must each be told."""
    soak = played(answer, asks(stream=stream))
    assert soak.num_violations == len(soak.violations) >= 1


def test_nonsense_that_is_answered_is_blamed() -> None:
    """A field that is silently ignored is found only in production."""
    move = Move("malformed", COMPLETIONS, {}, malformed=Malformed("an unknown field", COMPLETIONS, b"{}"))
    assert played(whole(), move).violations
    assert not played(lambda _: httpx.Response(400, json=ERROR), move).violations


# What is asked.


def test_the_mix_holds_everything_and_repeats_itself() -> None:
    """A run that found something must be able to find it again, and no kind may be missing from it."""
    offer = Offer(["ar", "small"], 2000)
    known, wrong = questions(offer), malformed(offer)
    first, second = ([draw(rng, known, wrong, offer) for _ in range(800)] for rng in (random.Random(5), random.Random(5)))
    assert first == second
    assert {move.kind for move in first} == set(WEIGHTS)
    bodies = [move.body for move in first if move.kind == "answer"]
    assert {body.get("stream", False) for body in bodies} == {True, False}
    named = [body.get("speculative", {}) for body in bodies]
    assert {speculative.get("schedule") for speculative in named} == {None, "ar", "small"}
    assert not [s for s in named if s.get("schedule") == "ar" and "budget" in s], "refused, and rightly"
    assert any(body.get("n", 1) > 1 for body in bodies) and any("stop" in body for body in bodies)
    assert plain(known[0], evidence=2)["speculative"] == {"schedule": "ar"}


def test_what_a_server_does_not_offer_is_not_asked() -> None:
    """A model without a chat template, or a server without prices, is not at fault."""
    offer = Offer(["ar", "small"], 600, has_chat=False, has_prices=False)
    known = questions(offer)
    moves = [draw(random.Random(i), known, malformed(offer), offer) for i in range(400)]
    assert {question.path for question in known} == {COMPLETIONS}
    assert not [move for move in moves if move.body.get("speculative", {}).get("budget") == "auto"]
    with pytest.raises(ValueError, match="at least 500 tokens"):
        questions(Offer(["ar"], 300))


def test_a_seed_is_not_asked_of_a_schedule_that_draws_its_trees() -> None:
    """Its text differs from plain decoding's by right; at temperature 0 it must not, and is asked."""
    offer = Offer(["ar", "nde"], 2000, drawing=frozenset({"nde"}))
    known = questions(offer)
    moves = [draw(random.Random(i), known, malformed(offer), offer) for i in range(600)]
    asked = [move for move in moves if move.body.get("speculative", {}).get("schedule") == "nde" and move.kind == "answer"]
    assert asked and not [move for move in asked if move.question is None or move.question.is_sampled]
    assert "auto" not in {move.body["speculative"].get("budget") for move in asked}, "it would be refused"


# Processes.


def test_settings_go_to_the_server_as_they_are() -> None:
    """A soak of another configuration than the one named shows nothing about it; secrets stay off the command line."""
    settings = Settings(medium=None, weights="fp32", max_num_seqs=3, admin_key="a-secret-key")
    options = as_options(settings)
    pairs = dict(zip(options[::2], options[1::2], strict=True))
    assert pairs["--medium"] == "none" and pairs["--weights"] == "fp32" and pairs["--max-num-seqs"] == "3"
    assert "--threads" not in pairs and "a-secret-key" not in " ".join(options)


def test_a_server_that_does_not_start_says_why() -> None:
    """Ten minutes of waiting for a process that is gone would be a poor message."""
    code = "import sys; sys.exit('no such model')"
    with pytest.raises(ServerFailed, match="ended with 1: no such model"):
        ServerProcess([sys.executable, "-c", code], {})


def test_no_server_outlives_a_soak_that_is_told_to_end() -> None:
    """SIGTERM ends a Python program without a word; the server, on all cores, would be left for somebody else to find."""
    serve = "import os, sys, time; print(f'ready in 1 s at http://{os.getpid()}', file=sys.stderr, flush=True); time.sleep(60)"
    soak = f"""
import sys, time
from bench.server_process import ServerProcess
with ServerProcess([sys.executable, "-c", {serve!r}], {{}}) as server:
    print(server.url, flush=True)
    time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", soak], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    server = int(process.stdout.readline().removeprefix("http://"))
    assert psutil.pid_exists(server)
    process.terminate()
    assert process.wait(20) == 128 + signal.SIGTERM
    assert not psutil.pid_exists(server)
    process.stdout.close()


@pytest.mark.slow
def test_a_toy_server_endures(tmp_path: Path) -> None:
    """The whole thing: texts stay right and nothing is left behind after half a minute of all kinds of callers."""
    tokenizer = toy.byte_tokenizer()
    toy.tiny_causal_lm("llama", len(tokenizer), 3, max_positions=2000).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    # Memory cannot be judged in half a minute; see docs/load.md.
    options = ["--target", str(tmp_path), "--threads", "1", "--minutes", "0.3", "--growth-limit", "2000"]
    done = subprocess.run([sys.executable, "-m", "bench.soak", *options], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["is_right"] and record["compared"] > 20 and not record["violations"]
