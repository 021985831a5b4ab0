"""From a drafter's probabilities to acceptance: calibrated, monotone, and never more in the children than in the parent."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.acceptance import ALL_DEPTHS, IDENTITY, Acceptance, Curve, FitRule, LiveAcceptance, fit_curve
from tree.tree import TokenTree

samples = st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=300)
probability = st.floats(0, 1)


def arrays(pairs: list[tuple[float, bool]]) -> tuple[np.ndarray, np.ndarray]:
    table = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def drawn(truth: Callable[[float], float], count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    dice = random.Random(seed)
    scores = [dice.random() for _ in range(count)]
    return arrays([(p, dice.random() < truth(p)) for p in scores])


def random_tree(seed: int, size: int = 40) -> TokenTree:
    """Edges by two drafters that know nothing of each other: siblings may sum to far more than 1."""
    dice = random.Random(seed)
    tree = TokenTree(0)
    for node in range(1, size):
        tree.add(dice.randrange(max(node // 2, 1)), node, math.log(dice.random()), dice.choice(("small", "medium")))
    return tree


# ---- one curve ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_an_over_confident_drafter_is_seen_through(seed: int) -> None:
    """Truth p^2. With 8000 samples a bin of 500 is off by 0.022 (one sigma); 0.1 is reached once in 100,000 bins."""
    curve = fit_curve(*drawn(lambda p: p * p, 8000, seed), FitRule())
    grid = np.linspace(0.05, 0.95, 19)
    assert np.abs(curve(grid) - grid**2).max() < 0.1
    assert np.abs(IDENTITY(grid) - grid**2).max() > 0.2  # negative control: what doing nothing is off by


def test_too_few_samples_change_nothing() -> None:
    """63 rejections are no proof against a drafter."""
    scores, accepted = np.full(63, 0.9), np.zeros(63)
    assert fit_curve(scores, accepted, FitRule(min_samples=64)) is IDENTITY
    assert fit_curve(np.append(scores, 0.9), np.append(accepted, 0), FitRule(min_samples=64)) != IDENTITY


def test_a_row_of_bad_luck_leaves_a_chance() -> None:
    """An edge of probability 0 is never verified again, so nothing would ever correct it. By hand: 4 * 0.5 / (64 + 4)."""
    curve = fit_curve(np.full(64, 0.5), np.zeros(64), FitRule(prior=4))
    assert curve.score == (0.5,) and curve.accepted == (pytest.approx(2 / 68),)
    assert fit_curve(np.full(64, 0.5), np.ones(64), FitRule(prior=4)).accepted == (pytest.approx(66 / 68),)


@given(samples, probability, probability)
def test_a_curve_is_monotone_and_a_probability_whatever_was_logged(
    pairs: list[tuple[float, bool]], a: float, b: float
) -> None:
    """A better score that counts for less would turn the ranking of nodes around."""
    curve = fit_curve(*arrays(pairs), FitRule(min_samples=1))
    low, high = curve(np.array(sorted((a, b))))
    assert 0 <= low <= high <= 1
    assert all(x < y for x, y in pairwise(curve.score)) and len(curve.score) <= FitRule().num_bins or curve is IDENTITY


def test_scores_of_zero_are_calibrated_as_well() -> None:
    """Prompt lookup leaves nodes unscored (-inf); if they are accepted half of the time, that is what they are worth."""
    curve = fit_curve(np.zeros(200), np.tile([0.0, 1.0], 100), FitRule())
    assert curve(np.array([0.0]))[0] == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(
    ("score", "accepted"),
    [
        ((), ()),
        ((0.5,), ()),
        ((0.5, 0.5), (0, 1)),
        ((0.1, 0.2), (0.3, 0.2)),
        ((-0.1,), (0,)),
        ((0.1,), (1.1,)),
        ((math.nan,), (0,)),
    ],
)
def test_curves_that_are_no_probabilities_are_refused(score: tuple, accepted: tuple) -> None:
    """Negative control of the property above."""
    with pytest.raises(ValueError, match="score|accepted"):
        Curve(score, accepted)


# ---- trees ----------------------------------------------------------------------------------------------------------

WILD = Acceptance(
    {
        "small": {ALL_DEPTHS: Curve((0.2, 0.9), (0.1, 0.95)), 1: Curve((0.0, 1.0), (0.6, 1.0))},
        "medium": {2: Curve((0.5,), (1.0,))},
    }
)


@pytest.mark.parametrize("acceptance", [Acceptance(), WILD], ids=["identity", "wild"])
@pytest.mark.parametrize("seed", range(10))
def test_children_sum_to_at_most_their_parent(acceptance: Acceptance, seed: int) -> None:
    """What the sound stop of drafting rests on; and no node is likelier than the one above it."""
    tree = random_tree(seed)
    paths = acceptance.paths(tree)
    assert paths[0] == 1.0 and len(paths) == len(tree)
    for node in range(len(tree)):
        children = list(tree.children[node].values())
        assert sum(paths[child] for child in children) <= paths[node] * (1 + 1e-12)
        assert all(0 <= paths[child] <= paths[node] for child in children)


def test_without_the_scaling_children_do_exceed_their_parent() -> None:
    """Negative control: the trees of the test above need it."""
    tree = random_tree(0)
    raw = np.exp(tree.score)
    assert any(raw[list(tree.children[node].values())].sum() > raw[node] * 1.5 for node in range(len(tree)))


def test_golden_paths() -> None:
    """By hand: identity, siblings 0.9 and 0.6 scaled by 1.5, their children not."""
    tree = TokenTree(0)
    a, b = (tree.add(0, token, math.log(p), "small") for token, p in ((1, 0.9), (2, 0.6)))
    tree.add(a, 3, math.log(0.5), "medium")
    tree.add(b, 4, -math.inf, "small")
    assert Acceptance().paths(tree) == pytest.approx([1, 0.6, 0.4, 0.3, 0])


def test_an_edge_is_read_by_the_drafter_that_scored_it_last() -> None:
    """After a rescore the log-probability is the other drafter's, and so must the curve be."""
    tree = TokenTree(0)
    node = tree.add(0, 1, math.log(0.5), "small")
    acceptance = Acceptance({"medium": {1: Curve((0.5,), (0.25,))}})
    assert acceptance.paths(tree)[node] == pytest.approx(0.5)
    tree.rescore(node, math.log(0.5), "medium")
    tree.refresh()
    assert acceptance.paths(tree)[node] == pytest.approx(0.25)


def test_curves_fall_back_from_depth_to_drafter_to_identity() -> None:
    """And depths beyond the deepest count as it."""
    acceptance = Acceptance({"small": {ALL_DEPTHS: Curve((1.0,), (0.5,)), 4: Curve((1.0,), (0.125,))}})
    assert [acceptance.edge("small", depth, 0.0) for depth in (1, 3, 4, 9)] == [0.5, 0.5, 0.125, 0.125]
    assert acceptance.edge("other", 1, math.log(0.3)) == pytest.approx(0.3)
    assert acceptance.edge("small", 1, -math.inf) == 0.0


# ---- learning -------------------------------------------------------------------------------------------------------


def test_each_depth_of_each_drafter_is_learned_from_its_own_samples() -> None:
    """Depth 1 as it says, depth 2 never right; mixing them would halve the first and raise the second."""
    live = LiveAcceptance(FitRule(refit_every=1000))
    dice = random.Random(0)
    for _ in range(1000):
        p = dice.random()
        live.observe("small", 1, math.log(p), dice.random() < p)
        live.observe("small", 2, math.log(p), False)
    known = live.acceptance
    assert known.edge("small", 1, math.log(0.8)) == pytest.approx(0.8, abs=0.12)
    assert known.edge("small", 2, math.log(0.8)) < 0.1
    assert known.edge("small", 3, math.log(0.8)) == pytest.approx(0.4, abs=0.12)  # of all depths
    assert known.edge("medium", 1, math.log(0.8)) == pytest.approx(0.8)


def test_the_window_is_bounded_and_forgets() -> None:
    """A server runs for months, and the traffic of last week is not today's."""
    live = LiveAcceptance(FitRule(window=500, refit_every=100))
    for accepted in (True, False):
        for _ in range(3000):
            live.observe("small", 1, math.log(0.5), accepted)
            live.observe("small", 99, math.log(0.5), accepted)
    assert live.num_samples("small") == 1000
    assert live.acceptance.edge("small", 1, math.log(0.5)) < 0.02
    assert live.acceptance.edge("small", 50, math.log(0.5)) < 0.02


def test_a_verified_tree_tells_of_edges_below_accepted_nodes_only() -> None:
    """A child of a rejected node was never put to the test: counting it as rejected would punish deep nodes."""
    tree = TokenTree(0)
    a, b = (tree.add(0, token, -0.5, "small") for token in (1, 2))
    c, d = tree.add(a, 3, -0.1, "medium"), tree.add(b, 4, -0.1, "medium")
    tree.add(c, 5, -0.2, "small")  # not verified
    seen: list[tuple[str, int, float, bool]] = []
    live = LiveAcceptance()
    live.observe = lambda *sample: seen.append(sample)  # type: ignore[method-assign]
    live.observe_tree(tree, [0, a, b, c, d], [a, c])
    assert seen == [("small", 1, -0.5, True), ("small", 1, -0.5, False), ("medium", 2, -0.1, True)]


def test_what_was_believed_before_is_the_fallback_and_the_prior() -> None:
    """A server that starts with yesterday's curves must not begin at identity again."""
    start = Acceptance({"small": {1: Curve((1.0,), (0.3,))}}, deepest=2)
    live = LiveAcceptance(FitRule(deepest=2, min_samples=64, refit_every=10, prior=64), start)
    for _ in range(60):
        live.observe("small", 1, 0.0, False)
    assert live.acceptance.edge("small", 1, 0.0) == pytest.approx(0.3)
    for _ in range(10):
        live.observe("small", 1, 0.0, False)
    assert live.acceptance.edge("small", 1, 0.0) < 0.3
    assert live.acceptance.edge("small", 1, 0.0) > 0.05
    assert LiveAcceptance(start=start).rule.deepest == 2
    with pytest.raises(ValueError, match="deepest"):
        LiveAcceptance(FitRule(deepest=3), start)


@given(st.lists(st.tuples(st.integers(-3, 9), st.floats(), st.booleans()), max_size=80))
def test_no_sample_can_spoil_the_curves(logged: list[tuple[int, float, bool]]) -> None:
    """NaN, positive and infinite log-probabilities, depths that do not exist."""
    live = LiveAcceptance(FitRule(min_samples=1, refit_every=1))
    for depth, log_prob, accepted in logged:
        live.observe("small", depth, log_prob, accepted)
    values = [live.acceptance.edge("small", depth, lp) for depth in (1, 2, 9) for lp in (-math.inf, -3.0, -1.0, 0.0)]
    assert all(0 <= value <= 1 for value in values)


# ---- documents ------------------------------------------------------------------------------------------------------


def test_curves_survive_their_document() -> None:
    """What was learned is kept over a restart."""
    live = LiveAcceptance(FitRule(refit_every=50))
    for p, accepted in zip(*drawn(lambda p: p * p, 500), strict=True):
        live.observe("medium", 1 + int(p * 3), math.log(p), bool(accepted))
    assert Acceptance.from_json(live.acceptance.to_json()) == live.acceptance
    assert Acceptance.from_json(WILD.to_json()) == WILD


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda d: d.pop("drafters"), "'drafters' is missing"),
        (lambda d: d.update(version=2), "version 1"),
        (lambda d: d["drafters"]["small"].update({"1": [[0.5], [2.0]]}), "accepted"),
        (lambda d: d["drafters"]["small"].update({"x": [[0.5], [0.5]]}), "not a table"),
        (lambda d: d["drafters"].update(small=3), "not a table"),
    ],
)
def test_a_damaged_document_is_refused_by_name(change: Callable[[dict], object], named: str) -> None:
    """A curve that falls, or that belongs to another version, would misplace every tree."""
    document = json.loads(WILD.to_json())
    change(document)
    with pytest.raises(ValueError, match=named):
        Acceptance.from_json(json.dumps(document))


@pytest.mark.parametrize("rule", [{"min_samples": 0}, {"window": 0}, {"num_bins": 0}, {"prior": 0.0}, {"prior": math.nan}])
def test_rules_that_cannot_be_followed_are_refused(rule: dict[str, float]) -> None:
    """At the start, not at the first refit."""
    with pytest.raises(ValueError, match=next(iter(rule))):
        FitRule(**rule)  # type: ignore[arg-type]


# In thousandths: between knots that are closer than the smallest normal number numpy's slopes are infinite.
@given(curves=st.lists(st.tuples(*[st.integers(0, 1000)] * 2), min_size=1, max_size=6, unique_by=lambda pair: pair[0]))
def test_one_probability_reads_the_curve_as_an_array_does(curves: list[tuple[int, int]]) -> None:
    scores, heights = (sorted(side[which] / 1000 for side in curves) for which in (0, 1))
    curve = Curve(tuple(scores), tuple(heights))
    places = [0.0, 1.0, *scores, *(score / 2 for score in scores), *np.linspace(0, 1, 13).tolist()]
    assert [curve.at(place) for place in places] == pytest.approx(curve(np.array(places)).tolist(), abs=1e-12)
