"""Breakers in the engine: a schedule that loses steps down, says so, is tried again, and never changes the text."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from transformers import PreTrainedModel

from app.metrics import Metrics
from engine.steering import Steering
from scheduler.breaker import LOST, PASSED, RETRY, BreakerRule
from scheduler.tuning import Tuner, talon_grid
from tests.engine_world import World, greedy_reference
from tests.test_engine_auto import FREE, prices
from tree.policies.talon import Talon

TinyModel = Callable[..., PreTrainedModel]
QUICK = BreakerRule(window=8, least=4, trial=4, first_wait=8, longest_wait=8)


def world(tiny_model: TinyModel) -> World:
    """Drafting looks free, so that only the breaker can end it."""
    return World(tiny_model("llama"), small=tiny_model("llama", seed=1), medium=tiny_model("llama", seed=2), auto=prices(FREE))


def steering_of(running: World, moves: list[tuple[str, str, str]], **options: object) -> Steering:
    return Steering(
        running.schedules, frozenset({"ngram"}), rule=QUICK, told=lambda *move: moves.append(move), **options  # type: ignore[arg-type]
    )


def test_a_schedule_that_loses_steps_down_and_the_text_stays(tiny_model: TinyModel) -> None:
    """The clock says that every step of `treegraft` takes a hundred times as long as a plain one."""
    moves: list[tuple[str, str, str]] = []
    running = world(tiny_model)
    steering = steering_of(running, moves)
    true = steering.stepped
    plain_after = []

    def slow(schedule: str, *, tokens: int, ms: float, plain_ms: float) -> None:
        plain_after.append(steering.states()[schedule].current)
        true(schedule, tokens=tokens, ms=100.0 * tokens * plain_ms, plain_ms=plain_ms)

    steering.stepped = slow  # type: ignore[method-assign]
    running.engine.steering = steering
    prompt = [1, 2, 3, 1, 2, 3]
    expected = greedy_reference(tiny_model("llama"), prompt, 40)
    with running:
        reply = running.run(prompt, "treegraft", max_tokens=40)
    assert reply.tokens == expected
    rungs = [to for _, to, reason in moves if reason == LOST]
    assert rungs[:3] == ["small", "ngram", "ar"], moves
    assert reply.stats.schedule == "treegraft" and set(reply.stats.fallbacks) >= {"small", "ngram", "ar"}
    assert sum(reply.stats.fallbacks.values()) < reply.stats.num_steps
    assert any(reason == RETRY for _, _, reason in moves), "it must be tried again"


def test_a_rung_that_gains_again_is_taken_up_again(tiny_model: TinyModel) -> None:
    moves: list[tuple[str, str, str]] = []
    running = world(tiny_model)
    steering = steering_of(running, moves)
    for step in range(400):
        tokens = 1 if step < 40 else 6 if steering.states()["small"].current == "small" else 3
        steering.stepped("small", tokens=tokens, ms=20.0, plain_ms=10.0)  # two plain tokens would take as long
    assert (moves[0][0], moves[0][2]) == ("small", LOST) and moves[-1][2] == PASSED
    assert steering.states()["small"].current == "small"


def test_what_loses_under_load_is_not_held_against_who_comes_alone(tiny_model: TinyModel) -> None:
    """Eight at once fill the machine with rows of their own; afterwards one user would wait thousands of steps for a trial."""
    running = world(tiny_model)
    steering = steering_of(running, [])
    steering.begin(8)
    for _ in range(200):
        steering.stepped("treegraft", tokens=8, ms=1e3, plain_ms=10.0)
    lost = steering.states()["treegraft"].current
    for sequences, same in ((9, True), (15, True), (1, False), (2, False), (7, False), (16, False), (8, True)):
        steering.begin(sequences)
        assert (steering.states()["treegraft"].current == lost != "treegraft") is same, sequences


def test_ladders_hold_only_schedules_whose_drafters_follow_anyway(tiny_model: TinyModel) -> None:
    """A head that joins in mid-text has missed the hidden states of what came before."""
    running = world(tiny_model)
    steering = steering_of(running, [])
    for schedule, state in steering.states().items():
        assert state.current == schedule
        own = set(running.schedules[schedule].drafters.values()) | {"ngram"}
        rungs = steering._ladders[schedule]
        assert rungs[-1] == "ar" and all(set(running.schedules[rung].drafters.values()) <= own for rung in rungs), rungs
    assert "ar" not in steering.states()


def test_a_fixed_budget_is_never_taken_away(tiny_model: TinyModel) -> None:
    running = world(tiny_model)
    steering = steering_of(running, [])
    for _ in range(50):
        steering.stepped("medium", tokens=1, ms=1e4, plain_ms=10.0)
    assert steering.states()["medium"].current != "medium"
    running.engine.steering = steering
    with running:
        assert not running.run([1, 2, 3], "medium", max_tokens=6, budget=4).stats.fallbacks
        assert running.run([1, 2, 3], "medium", max_tokens=6).stats.fallbacks, "negative control"


def test_talon_is_tuned_within_its_grid_and_the_text_stays(tiny_model: TinyModel) -> None:
    running = world(tiny_model)
    tuner = Tuner(talon_grid(12))
    running.engine.steering = steering_of(running, [], tuner=tuner)
    seen: set[int] = set()
    policy = running.schedules["talon"].policy
    assert isinstance(policy, Talon)
    prompt = [1, 2, 3, 4]
    with running:
        for _ in range(4):
            seen.add(tuner.arm.budget)
            reply = running.run(prompt, "talon", max_tokens=60)
            assert reply.tokens == greedy_reference(tiny_model("llama"), prompt, 60)
    assert sum(state.plays for state in tuner.states) > 1 and len(seen) > 1
    assert running.schedules["talon"].policy == policy, "it is nobody else's"


@pytest.mark.parametrize("broken", [float("nan"), 0.0, -1.0])
def test_a_broken_clock_moves_nothing(tiny_model: TinyModel, broken: float) -> None:
    steering = steering_of(world(tiny_model), [])
    for _ in range(50):
        steering.stepped("medium", tokens=1, ms=broken, plain_ms=10.0)
    assert steering.states()["medium"].current == "medium"


def test_prices_and_breakers_are_on_the_metrics_page(tiny_model: TinyModel) -> None:
    """Whoever wonders why nothing is drafted must be able to see that prices drifted or that a breaker is open."""
    running = world(tiny_model)
    metrics = Metrics()
    assert running.engine.price_state() is None, "without a steering there is nothing to show"
    running.engine.steering = steering_of(running, [], tuner=Tuner(talon_grid(12)))
    metrics.attach(running.engine)
    for _ in range(50):
        running.engine.steering.stepped("medium", tokens=1, ms=1e4, plain_ms=10.0)
    page = metrics.text().decode()
    assert 'graftserve_price_drift{model="target"} 1.0' in page
    assert 'graftserve_speedup_estimate{schedule="treegraft"} 1.0' in page
    assert 'graftserve_breaker_rung{schedule="treegraft"} 0.0' in page
    assert 'graftserve_breaker_rung{schedule="medium"} 0.0' not in page
    assert 'graftserve_talon_tuning_plays{budget="12",mu="0.03"}' in page
