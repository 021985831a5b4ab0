"""Prices of forwards: fitted to measurements, never cheaper for more work, and they follow the machine within bounds."""

from __future__ import annotations

import json
import math
import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.cost import CostProfile, LatencyModel, Origin, Point
from scheduler.isotonic import non_decreasing

ROWS = (1, 2, 4, 8, 16, 32)

measurements = st.lists(
    st.builds(
        lambda rows, sequences, context, ms: Point(max(rows, sequences), sequences, context, ms),
        st.integers(1, 64),
        st.integers(1, 8),
        st.integers(0, 4000),
        st.floats(1e-3, 1e5),
    ),
    min_size=2,
    max_size=25,
).filter(lambda points: len({point.rows for point in points}) > 1)


def origin() -> Origin:
    return Origin("a processor", "tiny", "fp16", "2", "2026-01-02T03:04:05+00:00")


def profile(**models: LatencyModel) -> CostProfile:
    return CostProfile(models or {"target": LatencyModel((1, 8), (10.0, 17.0))}, origin())


# ---- the closest non-decreasing sequence ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "weights", "expected"),
    [
        ([], [], []),
        ([1, 2, 3], [1, 1, 1], [1, 2, 3]),
        ([3, 2, 1], [1, 1, 1], [2, 2, 2]),
        ([1, 4, 2, 5], [1, 1, 1, 1], [1, 3, 3, 5]),
        ([1, 4, 2, 5], [1, 3, 1, 1], [1, 3.5, 3.5, 5]),
        ([2, 3, 1, 0], [1, 1, 1, 1], [1.5, 1.5, 1.5, 1.5]),  # a block that swallows an earlier one
    ],
)
def test_golden_vectors_of_pooling(values: list[float], weights: list[float], expected: list[float]) -> None:
    """By hand. A fit that is merely monotone (a running maximum, say) fails the second line."""
    assert non_decreasing(values, weights) == pytest.approx(expected)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3)), min_size=1, max_size=6))
def test_no_monotone_sequence_on_a_fine_grid_is_closer(pairs: list[tuple[int, int]]) -> None:
    """Against the definition, by the min-max formula: max over starts, min over ends, of weighted means."""
    values, weights = [float(v) for v, _ in pairs], [float(w) for _, w in pairs]

    def mean(a: int, b: int) -> float:
        return float(np.average(values[a : b + 1], weights=weights[a : b + 1]))

    size = len(values)
    formula = [max(min(mean(a, b) for b in range(i, size)) for a in range(i + 1)) for i in range(size)]
    assert non_decreasing(values, weights) == pytest.approx(formula)


@given(st.lists(st.tuples(st.floats(1e-300, 1e300), st.floats(1e-8, 1.0)), min_size=1, max_size=40))
def test_pooling_never_falls_and_stays_within_its_values(pairs: list[tuple[float, float]]) -> None:
    """Rounding included: a curve that falls by one bit would be refused by every check behind it."""
    fitted = non_decreasing([v for v, _ in pairs], [w for _, w in pairs])
    assert all(a <= b for a, b in pairwise(fitted))
    assert min(v for v, _ in pairs) <= fitted[0] and fitted[-1] <= max(v for v, _ in pairs)


# ---- the model ------------------------------------------------------------------------------------------------------


def measured(noise: float = 0.0, seed: int = 0) -> tuple[LatencyModel, list[Point]]:
    """A true model, and what a clock says of it at the points that calibration measures."""
    truth = LatencyModel(ROWS, (25.0, 26.0, 28.0, 32.0, 41.0, 60.0), 2e-3, 5e-4, 0.8)
    dice = random.Random(seed)
    asked = [(n, 1, c) for n in ROWS for c in (64, 512)] + [(4, 4, 256), (16, 4, 256), (16, 1, 64), (4, 1, 64)]
    return truth, [
        Point(n, s, c, truth.ms(n, sequences=s, context=c) * (1 + noise * dice.uniform(-1, 1))) for n, s, c in asked
    ]


def test_a_model_is_found_again_from_exact_measurements() -> None:
    """The form fits what it is meant for; a wrong term would leave a misfit here."""
    truth, points = measured()
    fitted = LatencyModel.fit(points)
    assert fitted.misfit < 1e-9
    for n, s, c in [(1, 1, 0), (7, 3, 900), (32, 8, 4000), (60, 2, 100)]:
        assert fitted.ms(n, sequences=s, context=c) == pytest.approx(truth.ms(n, sequences=s, context=c), rel=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_noise_of_a_few_percent_stays_a_few_percent(seed: int) -> None:
    """Within the measured range; a fit that amplifies noise would be worse than a table."""
    truth, points = measured(0.03, seed)
    fitted = LatencyModel.fit(points)
    for n in range(1, 33):
        for c in (64, 200, 512):
            assert fitted.ms(n, context=c) == pytest.approx(truth.ms(n, context=c), rel=0.06), (n, c)


@given(measurements, st.integers(1, 200), st.integers(1, 200), st.integers(1, 9), st.integers(0, 10**6), st.integers(0, 10**6))
def test_more_work_is_never_cheaper_whatever_was_measured(
    points: list[Point], n: int, more: int, sequences: int, context: int, longer: int
) -> None:
    """A price that falls, or is no number, would make a scheduler ask for the work."""
    model = LatencyModel.fit(points)
    price = model.ms(n, sequences=sequences, context=context)
    assert math.isfinite(price) and price > 0
    tolerance = 1 + 1e-9
    assert model.ms(n + more, sequences=sequences, context=context) * tolerance >= price
    assert model.ms(n, sequences=sequences, context=context + longer) * tolerance >= price


@given(measurements, st.integers(1, 9), st.integers(0, 9000))
def test_the_curve_is_the_price_of_every_number_of_rows(points: list[Point], sequences: int, context: int) -> None:
    """Sizing looks at the curve, counters at single prices; they must not disagree."""
    model = LatencyModel.fit(points)
    curve = model.curve(100, sequences=sequences, context=context)
    assert curve == pytest.approx([model.ms(n, sequences=sequences, context=context) for n in range(1, 101)])


def test_golden_prices_within_between_and_beyond_the_knots() -> None:
    """By hand; beyond the last knot the steeper of last and mean slope, so that a flat end promises nothing."""
    model = LatencyModel((2, 4, 8), (10.0, 14.0, 14.0), context_ms=0.01, row_context_ms=0.001, sequences_ms=0.5)
    assert [model.ms(n) for n in (1, 2, 3, 4, 6, 8)] == [10, 10, 12, 14, 14, 14]
    assert model.ms(11) == pytest.approx(14 + 3 * 4 / 6)
    assert model.ms(4, sequences=2, context=100) == pytest.approx(14 + 1 + 0.001 * 4 * 50 + 0.5)


def test_one_number_of_rows_is_refused() -> None:
    """It says nothing of what a row costs."""
    with pytest.raises(ValueError, match=r"two numbers of rows, got \[4\]"):
        LatencyModel.fit([Point(4, 1, 0, 1.0), Point(4, 1, 9, 2.0)])


@pytest.mark.parametrize(
    "arguments",
    [
        ((), ()),
        ((1, 2), (1.0,)),
        ((0, 2), (1.0, 2.0)),
        ((2, 2), (1.0, 2.0)),
        ((1, 2), (2.0, 1.0)),
        ((1, 2), (0.0, 1.0)),
        ((1, 2), (1.0, math.inf)),
        ((1, 2), (1.0, math.nan)),
        ((1, 2), (1.0, 2.0), -1e-9),
        ((1, 2), (1.0, 2.0), 0.0, math.nan),
        ((1, 2), (1.0, 2.0), 0.0, 0.0, math.inf),
    ],
)
def test_models_that_would_reward_work_are_refused(arguments: tuple) -> None:
    """Negative control of the two properties above: the check sees every way to break them."""
    with pytest.raises(ValueError, match=r"rows|knot_ms|_ms"):
        LatencyModel(*arguments)


@pytest.mark.parametrize("values", [(0, 1, 0, 1.0), (1, 2, 0, 1.0), (1, 1, -1, 1.0), (1, 1, 0, 0.0), (1, 1, 0, math.nan)])
def test_points_that_nobody_can_have_measured_are_refused(values: tuple) -> None:
    """Else they would vanish in a mean."""
    with pytest.raises(ValueError, match="Point"):
        Point(*values)


# ---- documents ------------------------------------------------------------------------------------------------------


def test_a_profile_survives_its_document() -> None:
    """What was measured once is used for months."""
    before = profile(target=LatencyModel.fit(measured(0.05)[1]), small=LatencyModel((1, 4), (1.0, 1.5)))
    document = before.to_json()
    assert CostProfile.from_json(document) == before
    assert json.loads(document)["machine"] == "a processor" and json.loads(document)["weights"] == "fp16"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda d: d.pop("format"), "'format' is missing"),
        (lambda d: d.update(version=99), "version 1"),
        (lambda d: d.update(format="other"), "graftserve-costs"),
        (lambda d: d.pop("models"), "'models' is missing"),
        (lambda d: d.pop("machine"), "machine"),
        (lambda d: d.update(extra=1), "extra"),
        (lambda d: d["models"]["target"].update(knot_ms=[2.0, 1.0]), "knot_ms"),
        (lambda d: d["models"]["target"].pop("points"), "'points' is missing"),
        (lambda d: d["models"].update(target=3), "not a cost profile"),
    ],
)
def test_a_damaged_document_is_refused_by_name(change, named: str) -> None:
    """A profile of another version would be read as nonsense prices."""
    document = json.loads(profile().to_json())
    change(document)
    with pytest.raises(ValueError, match=named):
        CostProfile.from_json(json.dumps(document))


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "3"])
def test_what_is_no_document_is_refused(text: str) -> None:
    """A cut-off file, say."""
    with pytest.raises(ValueError, match="not a cost profile"):
        CostProfile.from_json(text)


def test_a_model_without_measurements_has_no_price() -> None:
    """Zero would be a price, and the best one."""
    with pytest.raises(KeyError, match="medium"):
        profile().ms("medium", 1)
