"""Stepping down and up again on synthetic streams of steps: losing, winning, noisy, changing."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.breaker import FAILED, LOST, PASSED, RETRY, Breaker, BreakerRule, Change, ladder
from scheduler.registry import build_schedules

RUNGS = ("treegraft", "small", "ngram", "ar")
PLAIN_S = 0.02


def run(
    breaker: Breaker, speed: Callable[[str, int], float], steps: int, *, noise: float = 0.0, seed: int = 0
) -> list[Change]:
    """Feed steps whose schedules are `speed(name, step)` times as fast as plain decoding on average."""
    generator, changes = random.Random(seed), []
    for step in range(steps):
        tokens = generator.randint(1, 4) if breaker.current != "ar" else 1
        seconds = tokens * PLAIN_S / speed(breaker.current, step)
        if noise:
            seconds *= math.exp(generator.gauss(-noise * noise / 2, noise))
        change = breaker.observe(tokens, seconds, PLAIN_S)
        if change is not None:
            changes.append(change)
    return changes


# ---- down -----------------------------------------------------------------------------------------------------------


def test_what_loses_steps_down_to_the_first_rung_that_does_not() -> None:
    """A schedule that costs more than it saves must not run for ever; one that gains must not be left."""
    breaker = Breaker(RUNGS, BreakerRule(first_wait=10_000, longest_wait=10_000))
    changes = run(breaker, lambda name, _: {"treegraft": 0.6, "small": 0.7, "ngram": 1.2, "ar": 1.0}[name], 400)
    assert [(change.before, change.after, change.reason) for change in changes] == [
        ("treegraft", "small", LOST),
        ("small", "ngram", LOST),
    ]
    assert breaker.current == "ngram" and "0.60 times as fast" in changes[0].detail


def test_a_large_loss_is_seen_at_once_and_a_small_one_never_too_early() -> None:
    """`least` steps are the price of certainty."""
    breaker = Breaker(RUNGS)
    changes = run(breaker, lambda *_: 0.3, 12)
    assert [change.step for change in changes] == [12]
    assert not run(Breaker(RUNGS), lambda *_: 0.3, 11)


def test_a_loss_within_the_margin_is_none() -> None:
    """Speculation that costs two percent now may pay in a minute; moving costs more."""
    assert not run(Breaker(RUNGS), lambda *_: 0.97, 1000)
    assert run(Breaker(RUNGS), lambda *_: 0.93, 1000)


def test_plain_decoding_has_nowhere_to_go() -> None:
    """And a ladder of one rung never moves."""
    breaker = Breaker(("ar",))
    assert not run(breaker, lambda *_: 0.1, 200) and breaker.current == "ar"


@pytest.mark.parametrize("seed", range(20))
def test_noise_alone_moves_nothing(seed: int) -> None:
    """At 1.1 times plain decoding with steps that scatter by half, a window's mean is above the loss that counts."""
    assert not run(Breaker(RUNGS), lambda *_: 1.1, 3000, noise=0.5, seed=seed)


def test_one_long_pause_moves_nothing() -> None:
    """A garbage collection or a process beside us is no fault of the schedule."""
    breaker = Breaker(RUNGS)
    assert not run(breaker, lambda _, step: 1e-4 if step == 40 else 1.2, 300)


def test_what_no_clock_can_mean_is_passed_over() -> None:
    """One NaN in a sum would blind the breaker for a whole window."""
    breaker = Breaker(RUNGS)
    for values in ((1, math.nan, 0.02), (1, -1.0, 0.02), (0, 0.02, 0.02), (1, 0.02, math.inf), (1, 0.02, 0.0)):
        assert breaker.observe(*values) is None
    assert breaker.state.steps == 0 and breaker.speed is None


# ---- up again -------------------------------------------------------------------------------------------------------


def test_waits_double_up_to_their_bound() -> None:
    """A rung that always loses is tried ever more seldom, and never more seldom than the bound says."""
    rule = BreakerRule(first_wait=50, longest_wait=400)
    breaker = Breaker(("small", "ar"), rule)
    changes = run(breaker, lambda name, _: 0.5 if name == "small" else 1.0, 4000)
    tries = [change.step for change in changes if change.reason == RETRY]
    failed = [change.step for change in changes if change.reason in (LOST, FAILED)]
    waits = [up - down for down, up in zip(failed, tries, strict=False)]
    assert waits[:5] == [50, 100, 200, 400, 400] and set(waits[5:]) == {400}
    share = sum(down - up for up, down in zip(tries, failed[1:], strict=False)) / 4000
    assert share < 0.05, f"{share:.0%} of all steps went into trials"


def test_a_rung_that_has_become_good_comes_back_for_good() -> None:
    """Text changes: code after prose. The ladder is climbed rung by rung."""
    later = {"treegraft": 2.0, "small": 1.6, "ngram": 1.3, "ar": 1.0}
    breaker = Breaker(RUNGS)
    changes = run(breaker, lambda name, step: 0.5 if step < 300 else later[name], 3000)
    assert breaker.current == "treegraft" and not breaker.state.in_trial
    ups = [change.after for change in changes if change.reason == PASSED]
    assert ups == ["ngram", "small", "treegraft"]
    assert breaker.state.failures["treegraft"] == 0, "what holds is forgiven"


def test_a_trial_must_beat_the_rung_below() -> None:
    """Better than plain decoding but worse than what runs already is no reason to go up."""
    breaker = Breaker(("small", "ngram", "ar"))
    changes = run(breaker, lambda name, step: {"small": 0.5 if step < 200 else 1.15, "ngram": 1.4, "ar": 1.0}[name], 3000)
    assert breaker.current == "ngram"
    assert not [change for change in changes if change.reason == PASSED]
    assert any("ngram 1.40" in change.detail for change in changes if change.reason == FAILED)


@pytest.mark.parametrize("speed", [0.9, 0.95, 1.0, 1.05, 1.1])
def test_at_break_even_with_noise_it_does_not_flap(speed: float) -> None:
    """The worst place to be: every decision is wrong by little, and only moving costs. Seeds are fixed; the worst has 14."""
    for seed in range(10):
        breaker = Breaker(("small", "ar"))
        changes = run(breaker, lambda name, _: speed if name == "small" else 1.0, 8000, noise=0.3, seed=seed)
        downs = [change for change in changes if change.reason in (LOST, FAILED)]
        assert len(downs) <= 16, f"seed {seed}: {len(downs)} times down in 8000 steps"


def test_without_hysteresis_it_would_flap() -> None:
    """Negative control of the test above: no margin, no certainty, no back-off."""
    rule = BreakerRule(margin=0.0, certainty=0.0, factor=1.0, first_wait=16, longest_wait=16, least=4, trial=4)
    breaker = Breaker(("small", "ar"), rule)
    changes = run(breaker, lambda *_: 1.0, 8000, noise=0.3)
    assert len([change for change in changes if change.reason in (LOST, FAILED)]) > 100


def test_the_wait_of_many_failures_is_still_a_number() -> None:
    """A server runs for months."""
    assert BreakerRule().wait(1) == 64 and BreakerRule().wait(10**6) == 4096
    assert BreakerRule(factor=1.0).wait(10**6) == 64


@given(st.lists(st.tuples(st.integers(1, 8), st.floats(1e-4, 1.0), st.floats(1e-3, 0.1)), max_size=600))
def test_it_moves_by_one_rung_and_says_so(steps: list[tuple[int, float, float]]) -> None:
    """Whatever comes in: a change names where it came from, and nothing moves without one."""
    breaker = Breaker(RUNGS, BreakerRule(window=16, least=3, trial=4, first_wait=5, longest_wait=40))
    for tokens, seconds, plain in steps:
        before = breaker.current
        change = breaker.observe(tokens, seconds, plain)
        if change is None:
            assert breaker.current == before
            continue
        assert (change.before, change.after) == (before, breaker.current) and change.detail
        move = RUNGS.index(change.after) - RUNGS.index(change.before)
        assert move == {LOST: 1, FAILED: 1, PASSED: 0, RETRY: -1}[change.reason]
        assert breaker.state.in_trial == (change.reason == RETRY)


# ---- rungs ----------------------------------------------------------------------------------------------------------


def test_ladders_end_in_plain_decoding_and_repeat_no_drafter() -> None:
    """A step down that changes nothing would only lose time."""
    offered = build_schedules(small="small", medium="medium", budget=8, word="MSM")
    assert ladder(offered["treegraft"], offered) == ("treegraft", "small", "ngram", "ar")
    assert ladder(offered["talon"], offered) == ("talon", "small", "ngram", "ar")
    assert ladder(offered["talon-small"], offered) == ("talon-small", "ngram", "ar")
    assert ladder(offered["ngram"], offered) == ("ngram", "ar")
    assert ladder(offered["ar"], offered) == ("ar",)
    without = build_schedules(small="ngram", medium="medium", budget=8, word="MSM")
    assert ladder(without["treegraft"], without) == ("treegraft", "small", "ar")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"window": 0}, "window"),
        ({"least": 100}, "least"),
        ({"trial": 65}, "trial"),
        ({"margin": 1.0}, "margin"),
        ({"margin": math.nan}, "margin"),
        ({"factor": 0.5}, "factor"),
        ({"certainty": -1.0}, "certainty"),
        ({"longest_wait": 10}, "longest_wait"),
        ({"pause": 0.0}, "pause"),
    ],
)
def test_bad_rules_are_refused_by_name(options: dict[str, float], named: str) -> None:
    """A breaker that can never trip, or never return, looks like one that works."""
    with pytest.raises(ValueError, match=named):
        BreakerRule(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("rungs", [(), ("ar", "ar")])
def test_bad_ladders_are_refused(rungs: tuple[str, ...]) -> None:
    """Two rungs of one name could not be told apart."""
    with pytest.raises(ValueError, match="rungs"):
        Breaker(rungs)


def test_no_rung_is_there_twice_where_the_small_drafter_is_lookup() -> None:
    """`small` and `ngram` are one then; a ladder with both would refuse to start the server."""
    offered = build_schedules(small="ngram", medium="medium", budget=8, is_auto=True)
    for schedule in offered.values():
        rungs = ladder(schedule, offered)
        assert len(set(rungs)) == len(rungs) and rungs[0] == schedule.name and rungs[-1] == "ar"
        kinds = [frozenset(offered[rung].drafters.values()) for rung in rungs]
        assert len(set(kinds)) == len(kinds), rungs
