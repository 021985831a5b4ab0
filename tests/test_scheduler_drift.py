"""Prices follow the machine: within bounds, per model, load and size, and what nobody measures any more is forgotten."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.cost import CostProfile, LatencyModel, Origin
from scheduler.drift import DriftRule, LiveCosts

TARGET = LatencyModel((1, 8), (10.0, 17.0))
SMALL = LatencyModel((1, 8), (1.0, 2.0))


def live(rule: DriftRule | None = None, **models: LatencyModel) -> LiveCosts:
    """Costs of a machine that was never seen to drift."""
    return LiveCosts(CostProfile(models or {"target": TARGET}, Origin("none", "none", "none", "1", "never")), rule)


def test_a_machine_that_gets_slower_is_followed_and_found_again() -> None:
    """With a half-life of 8, 80 forwards leave a thousandth of the old belief; sizes that nobody asks for follow."""
    costs = live(DriftRule(half_life=8))
    assert costs.drift("target") == 1.0
    for factor in (2.0, 0.5, 1.0):
        for _ in range(80):
            costs.observe("target", 4, 1, 0, factor * costs.profile.ms("target", 4))
        assert costs.drift("target") == pytest.approx(factor, rel=0.01)
        assert costs.ms("target", 8) == pytest.approx(17.0 * factor, rel=0.01)
        assert costs.curve("target", range(1, 9))[-1] == pytest.approx(costs.ms("target", 8))


def test_half_of_a_change_is_believed_after_the_half_life() -> None:
    """The parameter means what it says."""
    costs = live(DriftRule(half_life=10))
    for _ in range(10):
        costs.observe("target", 1, 1, 0, 20.0)
    assert costs.drift("target") == pytest.approx(math.sqrt(2))


def test_a_single_pause_moves_little() -> None:
    """A garbage collection of a second must not stop speculation; without the cut it would be a factor of 1.1 here."""
    costs = live()
    costs.observe("target", 1, 1, 0, 1e6)
    assert costs.drift("target") < 1.03


def test_one_models_drift_is_mostly_its_own() -> None:
    """A drafter on other cores, in use beside the target: both prices come out right."""
    costs = live(target=TARGET, small=SMALL)
    for _ in range(400):
        costs.observe("small", 1, 1, 0, 2.0)
        costs.observe("target", 1, 1, 0, 10.0)
    assert costs.ms("small", 1) == pytest.approx(2.0, rel=0.02)
    assert costs.ms("target", 1) == pytest.approx(10.0, rel=0.02)


def test_what_is_slow_together_is_not_slow_alone() -> None:
    """Eight at once run at 1.8 times their price here, eight rows of one as profiled: one factor would be wrong for both."""
    costs = live()
    for _ in range(60):
        for _ in range(8):
            costs.observe("target", 8, 8, 0, 1.8 * 17.0)
        for _ in range(8):
            costs.observe("target", 8, 1, 0, 17.0)
    assert costs.ms("target", 8, sequences=1) == pytest.approx(17.0, rel=0.1)
    assert costs.ms("target", 8, sequences=8) == pytest.approx(1.8 * 17.0, rel=0.1)


def test_a_shape_that_was_measured_in_noise_is_put_right_where_it_is_used() -> None:
    """The profile says that eight rows cost 2.4 rows, in truth 1.67 of them; a factor alone leaves the ratio as it was."""
    wrong = LatencyModel((1, 2, 4, 8, 16), (42.7, 42.7, 73.5, 103.2, 161.2))
    truth = LatencyModel((1, 2, 4, 8, 16), (24.9, 27.3, 30.7, 41.7, 69.1))
    costs, rng = live(target=wrong), random.Random(1)
    for _ in range(1500):
        rows = rng.choice((1, 1, 2, 3, 5, 8, 12))
        costs.observe("target", rows, 1, 0, truth.ms(rows) * math.exp(rng.gauss(0, 0.05)))
    for rows in (1, 2, 4, 8, 12):
        assert costs.ms("target", rows) == pytest.approx(truth.ms(rows), rel=0.12), rows
    assert wrong.ms(8) / wrong.ms(1) > 2.4 > 2 > costs.ms("target", 8) / costs.ms("target", 1)


def test_a_size_that_was_never_seen_is_corrected_like_the_next_smaller_one() -> None:
    """Else a price that is too high by mistake would never be paid, and never be found wrong."""
    costs = live(target=LatencyModel((1, 16), (40.0, 160.0)), small=LatencyModel((1, 16), (40.0, 160.0)))
    for _ in range(3000):
        costs.observe("target", 2, 1, 0, 24.0)  # profiled 48
        costs.observe("small", 2, 1, 0, 48.0)
    for rows in (4, 8, 16):
        assert costs.ms("target", rows) == pytest.approx(0.5 * costs.profile.ms("target", rows), rel=0.06)
        assert costs.ms("small", rows) == pytest.approx(costs.profile.ms("small", rows), rel=0.06)


def test_a_model_that_is_no_longer_asked_is_believed_to_be_as_profiled_again() -> None:
    """A drafter that was timed while other programs ran looked dear, so it was not asked, so it went on looking dear."""
    costs = live(target=TARGET, small=SMALL)
    for _ in range(200):
        costs.observe("small", 1, 1, 0, 3.0)
        costs.observe("target", 1, 1, 0, 10.0)
    assert costs.ms("small", 1) > 2.8
    for _ in range(3000):
        costs.observe("target", 1, 1, 0, 10.0)
    assert costs.ms("small", 1) < 2.0


def test_what_all_models_share_is_learned_from_any() -> None:
    """The profile was measured at half speed. Plain decoding alone must find that out for a drafter too, at least in part."""
    costs = live(target=TARGET, small=SMALL)
    for _ in range(400):
        costs.observe("target", 1, 1, 0, 5.0)
    assert costs.ms("target", 1) == pytest.approx(5.0, rel=0.01)
    assert costs.ms("small", 1) < 0.85


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([1, 2, 3, 7, 30, 10**5]), st.integers(1, 9), st.floats(allow_nan=True, allow_infinity=True)),
        max_size=60,
    ),
    st.floats(1.0, 5.0),
    st.floats(0.1, 50),
)
def test_whatever_the_clock_says_prices_stay_positive_ordered_and_bounded(
    clock: list[tuple[int, int, float]], limit: float, half_life: float
) -> None:
    """NaN, negative, infinite, denormal: a price that is one of these would end drafting, or never end it."""
    costs = live(DriftRule(half_life, limit=limit))
    for rows, sequences, ms in clock:
        costs.observe("target", max(rows, sequences), sequences, 50, ms)
        assert 1 / limit * (1 - 1e-12) <= costs.drift("target") <= limit * (1 + 1e-12)
    for sequences in (1, 4):
        curve = np.array(costs.curve("target", range(sequences, 31), sequences=sequences, context=9))
        assert np.all(np.isfinite(curve)) and np.all(curve > 0) and np.all(np.diff(curve) >= 0)
        profiled = costs.profile.ms("target", 30, sequences=sequences, context=9)
        corrected = costs.ms("target", 30, sequences=sequences, context=9)
        assert 1 / limit * (1 - 1e-9) <= corrected / profiled <= limit * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 60), st.integers(1, 8))
def test_the_bounds_do_not_hold_a_correction_back_afterwards(rows: int, sequences: int) -> None:
    """A minute of nonsense is forgotten as fast as it was believed."""
    rows = max(rows, sequences)
    costs = live(DriftRule(half_life=8, cut=100.0, limit=4.0))
    for _ in range(500):
        costs.observe("target", rows, sequences, 0, 1e9)
    for _ in range(80):
        costs.observe("target", rows, sequences, 0, costs.profile.ms("target", rows, sequences=sequences))
    assert costs.drift("target") == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize(
    "rule", [{"half_life": 0}, {"half_life": math.nan}, {"limit": 0.5}, {"limit": math.inf}, {"cut": 0.9}, {"fading": -1}]
)
def test_rules_without_bounds_are_refused(rule: dict[str, float]) -> None:
    """They could correct a price to nothing."""
    with pytest.raises(ValueError, match=next(iter(rule))):
        DriftRule(**rule)
