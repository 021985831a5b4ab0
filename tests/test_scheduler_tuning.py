"""The bandit over TALON's budget and gate, on rewards whose best arm is known."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable

import pytest

from scheduler.tuning import Arm, Tuner, TuningRule, talon_grid
from tree.policies.talon import Talon

PLAIN_S = 0.02
GRID = talon_grid(60)


def play(
    tuner: Tuner,
    speed: Callable[[Arm, int], float],
    blocks: int,
    *,
    noise: float = 0.2,
    load: Callable[[int], float] = lambda _: 1.0,
) -> list[Arm]:
    """The arms of so many blocks; each step is `speed(arm, block)` times as fast as plain decoding on average."""
    generator, chosen = random.Random(7), []
    for block in range(blocks):
        chosen.append(tuner.arm)
        for _ in range(tuner.rule.block):
            tokens, plain = generator.randint(1, 6), PLAIN_S * load(block)
            seconds = tokens * plain / speed(tuner.arm, block) * math.exp(generator.gauss(0.0, noise))
            tuner.observe(tokens, seconds, plain)
    return chosen


def bump(arm: Arm, best: Arm) -> float:
    """2 at the best arm, falling with distance on the grid."""
    return 2.0 - 0.3 * abs(math.log2(arm.budget / best.budget)) - 0.15 * abs(math.log(arm.mu / best.mu))


@pytest.mark.parametrize("best", [GRID[0], GRID[6], GRID[-1]])
def test_the_best_arm_is_found_and_mostly_played(best: Arm) -> None:
    """Else the grid would be a random choice of parameters."""
    tuner = Tuner(GRID)
    chosen = play(tuner, lambda arm, _: bump(arm, best), 400)
    assert tuner.best == best
    late = Counter(chosen[200:])
    assert late.most_common(1)[0][0] == best, late
    speed = sum(bump(arm, best) for arm in chosen[200:]) / 200
    assert speed > 1.9, f"{speed:.2f} where 2 is the best and {sum(bump(arm, best) for arm in GRID) / len(GRID):.2f} is chance"


def test_it_follows_a_change_of_traffic() -> None:
    """What was best an hour ago is forgotten."""
    tuner = Tuner(GRID)
    play(tuner, lambda arm, _: bump(arm, GRID[0]), 300)
    assert tuner.best == GRID[0]
    chosen = play(tuner, lambda arm, _: bump(arm, GRID[-1]), 400)
    assert tuner.best == GRID[-1]
    assert sum(bump(arm, GRID[-1]) for arm in chosen[-100:]) / 100 > 1.85


def test_load_that_all_arms_share_looks_like_no_bad_parameter() -> None:
    """Rewards are relative to plain decoding under the same load."""
    tuner = Tuner(GRID)
    play(tuner, lambda arm, _: bump(arm, GRID[5]), 300, load=lambda block: 1.0 + 4.0 * (block % 50 < 25))
    assert tuner.best == GRID[5]


def test_every_arm_is_tried_first_in_an_order_of_the_seed() -> None:
    """And the same rewards and seed give the same choices: a run can be replayed."""
    runs = [play(Tuner(GRID, TuningRule(seed=seed)), lambda arm, _: bump(arm, GRID[3]), 60) for seed in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]
    for chosen in runs:
        assert set(chosen[: len(GRID)]) == set(GRID)


def test_rewards_that_do_not_differ_explore_nothing_further() -> None:
    """A grid that does not matter must not cost switching for ever."""
    tuner = Tuner(GRID)
    chosen = play(tuner, lambda *_: 1.5, 100, noise=0.0)
    assert len(set(chosen[40:])) <= 2


def test_what_no_clock_can_mean_is_passed_over() -> None:
    """One infinity in a sum would make an arm the best for ever."""
    tuner = Tuner(GRID[:2], TuningRule(block=2))
    for values in ((0, 1.0, 1.0), (1, math.nan, 1.0), (1, 1.0, -1.0), (math.inf, 1.0, 1.0)):
        assert not tuner.observe(*values)
    assert not tuner.observe(1, 1.0, 1.0) and tuner.observe(1, 1.0, 1.0)
    assert sum(state.plays for state in tuner.states) == 1


def test_what_is_kept_does_not_grow() -> None:
    """A server runs for months; and the exported numbers name every arm."""
    tuner = Tuner(GRID[:3], TuningRule(block=1, half_life=4.0))
    for step in range(5000):
        tuner.observe(1 + step % 3, 0.02, 0.02)
    assert all(0.0 < state.weight <= 1 / (1 - 0.5 ** (1 / 4)) + 1 for state in tuner.states)
    assert {f"budget={arm.budget},mu={arm.mu:g} plays" for arm in GRID[:3]} <= set(tuner.export())
    assert sum(value for name, value in tuner.export().items() if name.endswith("plays")) == 5000


def test_a_point_of_the_grid_is_a_policy() -> None:
    """A first layer that eats the budget would leave no tree."""
    policy = Arm(16, 0.1).applied(Talon())
    assert (policy.budget, policy.mu, policy.first_width) == (16, 0.1, 4)
    assert Arm(60, 0.03).applied(Talon()) == Talon()
    assert {arm.budget for arm in talon_grid(60)} == {15, 30, 45, 60} and len(GRID) == 16
    assert {arm.budget for arm in talon_grid(2)} == {2}


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Tuner(()), "arms"),
        (lambda: Tuner((GRID[0], GRID[0])), "distinct"),
        (lambda: Arm(1, 0.1), "budget"),
        (lambda: Arm(8, 0.0), "mu"),
        (lambda: talon_grid(1), "budget"),
        (lambda: TuningRule(block=0), "block"),
        (lambda: TuningRule(half_life=0.0), "half_life"),
        (lambda: TuningRule(explore=math.nan), "explore"),
    ],
)
def test_bad_parameters_are_refused_by_name(make: Callable[[], object], named: str) -> None:
    """Not at the thousandth step."""
    with pytest.raises(ValueError, match=named):
        make()
