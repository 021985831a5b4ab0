"""AdaptiveSpec's shapes: from shallow and wide to a deep chain, by confidence and by what was accepted."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.policy_world import Drafter, check_cut, grow, paths, random_drafter
from tree.growth import Policy
from tree.policies.adaptive_shape import AdaptiveShape, Shape, ShapeHistory, reachable_shapes, shape_between
from tree.policies.eagle import Eagle

UNSURE, SURE = Shape(3, 4, 4), Shape(7, 1, 8)


def with_top(p: float, vocab: int = 6) -> Drafter:
    """A drafter that always gives its best token the probability `p`."""
    return lambda path: [p, *[(1.0 - p) / (vocab - 1)] * (vocab - 1)]


def test_end_points_and_all_between() -> None:
    """Hand-checked: knobs change at eighths and sixths, halves up; every triple is one that an engine can run."""
    assert shape_between(UNSURE, SURE, 0.0) == UNSURE and shape_between(UNSURE, SURE, 1.0) == SURE
    triples = [(shape.steps, shape.width, shape.nodes) for shape in reachable_shapes(UNSURE, SURE)]
    assert triples == [(3, 4, 4), (4, 4, 5), (4, 3, 5), (5, 3, 6), (5, 2, 6), (6, 2, 7), (6, 1, 7), (7, 1, 8)]
    assert shape_between(UNSURE, SURE, 0.5) == Shape(5, 3, 6), "4 - 1.5 is 2.5 and rounds up"


@given(g=st.lists(st.floats(0.0, 1.0), min_size=2, max_size=20))
def test_shapes_are_monotone_and_enumerated(g: list[float]) -> None:
    """A shape that was not enumerated has no captured graph; one that goes back and forth is no interpolation."""
    reachable = reachable_shapes(UNSURE, SURE)
    indices = [reachable.index(shape_between(UNSURE, SURE, x)) for x in sorted(g)]
    assert indices == sorted(indices)


@given(
    low=st.tuples(st.integers(1, 6), st.integers(2, 6), st.integers(2, 20)),
    high=st.tuples(st.integers(1, 9), st.integers(2, 6), st.integers(2, 20)),
    g=st.floats(0.0, 1.0),
)
def test_no_shape_escapes_the_enumeration(low: tuple[int, ...], high: tuple[int, ...], g: float) -> None:
    """For any end points: if all enumerated shapes are possible, so is every one that can come up."""
    try:
        unsure, sure = Shape(*low), Shape(*high)
        reachable = reachable_shapes(unsure, sure)
    except ValueError:
        return
    assert shape_between(unsure, sure, g) in reachable


@pytest.mark.parametrize("triple", [(3, 1, 3), (3, 1, 5), (1, 4, 6), (2, 2, 8), (0, 1, 1), (3, 0, 1), (3, 4, 0)])
def test_impossible_shapes_are_refused(triple: tuple[int, int, int]) -> None:
    """A chain is verified whole, and no more can be verified than is drafted; engines refuse such triples at start."""
    with pytest.raises(ValueError):
        Shape(*triple)
    with pytest.raises(ValueError):
        AdaptiveShape(unsure=Shape(2, 2, 7), sure=Shape(6, 1, 7)).shape(1.0)  # on the way: (4, 2, 7), (5, 1, 7)


@pytest.mark.parametrize("p", [0.2, 0.3, 0.5, 0.7, 0.99])
@pytest.mark.parametrize("rolling", [1.0, 0.5, 0.1])
def test_the_tree_has_the_shape_of_its_confidence(p: float, rolling: float) -> None:
    """p(top 1) is read in the very step, so a sudden change of certainty costs no step of a wrong shape."""
    policy = AdaptiveShape(history=ShapeHistory(rolling))
    shape = policy.shape(p)
    assert shape == shape_between(UNSURE, SURE, min(p * rolling / 0.5, 1.0))
    q = with_top(p)
    growth, asked = grow(policy, q, 6)
    eagle, _ = grow(Eagle(shape.width, shape.steps, shape.nodes), q, 6)
    assert paths(growth, growth.verify_nodes()) == paths(eagle, eagle.verify_nodes())
    assert len(growth.verify_nodes()) == shape.nodes and max(growth.tree.depth) == shape.steps == len(asked)
    width = min(shape.width, shape.nodes - 1)  # a fourth candidate cannot be among the best three nodes
    assert asked[0].width == 4 and all(ask.width == width and len(ask.nodes) <= width for ask in asked[1:])


@given(a=st.integers(0, 7), start=st.floats(0.0, 1.0), k=st.integers(0, 30))
def test_the_rolling_rate_forgets_at_its_weight(a: int, start: float, k: int) -> None:
    """After k equal observations a the average is a + (start - a) 0.7 ** k."""
    policy = AdaptiveShape(history=ShapeHistory(start))
    for _ in range(k):
        policy = policy.after(a, 7)
    assert policy.history.rolling == pytest.approx(a / 7 + (start - a / 7) * 0.7**k)


def test_the_breaker_trips_at_the_fifth_zero_and_not_before() -> None:
    """One too early and a short bad stretch costs depth; one too late and a hostile text costs drafts."""
    sure = AdaptiveShape(divisor=1e-6)  # without the breaker always the deep chain
    policy = sure
    for zeros in range(1, 8):
        policy = policy.after(0, 7)
        assert policy.is_tripped == (zeros >= 5)
        assert policy.shape(0.9) == (UNSURE if zeros >= 5 else SURE)
    policy = policy.after(1, 3)
    assert not policy.is_tripped and policy.shape(0.9) == SURE, "the first accepted token releases it"
    for accepted in (0, 0, 0, 0, 1, 0, 0, 0, 0):
        policy = policy.after(accepted, 7)
    assert not policy.is_tripped, "4 + 1 zeros with a success between"
    assert policy.after(0, 7).is_tripped
    tree, _ = grow(policy.after(0, 7), with_top(0.9), 6)
    assert len(tree.verify_nodes()) == UNSURE.nodes


def test_a_step_without_a_draft_teaches_nothing() -> None:
    """A drafter that had nothing to say, or no room for a draft, is no rejected draft."""
    policy = AdaptiveShape().after(3, 7)
    assert policy.after(0, 0) == policy
    for accepted, layers in ((-1, 3), (4, 3), (1, 0)):
        with pytest.raises(ValueError, match="accepted"):
            policy.after(accepted, layers)


def test_histories_do_not_mix() -> None:
    """A policy is shared by every sequence of a schedule; one that learned in place would leak between requests."""
    shared = AdaptiveShape()
    good, bad = shared.after(7, 7), shared.after(0, 7)
    assert shared == AdaptiveShape() and good.history != bad.history
    assert good.after(0, 7).history.zero_run == 1 == bad.history.zero_run
    growth, _ = grow(good, with_top(0.6), 6)
    assert good == shared.after(7, 7) and good.history.rolling == 1.0 and max(growth.tree.depth) == 7


def test_a_sequence_of_steps_moves_between_the_shapes() -> None:
    """The loop of the contract, with a drafter that is right at first, then wrong, then right."""
    policy, depths = AdaptiveShape(), []
    for accepts in [True] * 4 + [False] * 10 + [True] * 12:
        growth, _ = grow(policy, with_top(0.5), 6)
        layers = max(growth.tree.depth)
        policy = policy.after(layers if accepts else 0, layers)
        depths.append(layers)
    assert depths[:4] == [7] * 4 and depths[13] == 3 and depths[-1] == 7
    assert depths[4:14] == sorted(depths[4:14], reverse=True) and depths[14:] == sorted(depths[14:])


def test_budgets_only_cut() -> None:
    """Under load a sequence keeps what it has learned."""
    policy: Policy = AdaptiveShape().after(0, 7)
    small = policy.with_budget(3)
    assert isinstance(small, AdaptiveShape) and small.history.zero_run == 1 and small.budget == 3
    assert AdaptiveShape().budget == 8 == AdaptiveShape().with_budget(64).budget
    for p in (0.2, 0.99):
        growth, asked = grow(small, with_top(p), 6)
        assert len(check_cut(growth, 3)) == 3 and len(asked) <= 2
    assert grow(policy.with_budget(1), with_top(0.5), 6)[1] == []


def test_limits_and_empty_answers_end_the_growth() -> None:
    """The shape is a wish; the context end and a silent drafter have the last word."""
    assert max(grow(AdaptiveShape(), with_top(0.9), 6, max_depth=2)[0].tree.depth) == 2
    silent, asked = grow(AdaptiveShape(), lambda path: [], 6)
    assert silent.verify_nodes() == [0] and len(asked) == 1
    ended, _ = grow(AdaptiveShape(), random_drafter(1, 4), 4, stop=frozenset(range(4)))
    assert max(ended.tree.depth) == 1


@pytest.mark.parametrize(
    "bad", [{"divisor": 0.0}, {"divisor": math.nan}, {"weight": 0.0}, {"weight": 1.5}, {"patience": 0}, {"limit": 0}]
)
def test_nonsense_parameters_are_refused(bad: dict[str, float]) -> None:
    """A bad configuration must fail at start, with the name of the key."""
    with pytest.raises(ValueError, match=next(iter(bad))):
        AdaptiveShape(**bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="budget"):
        AdaptiveShape().with_budget(0)
