"""Rows of one verification shared among sequences: optimal under the model, gives way under load, does not flap."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.load import ALL, BUDGET, HELD, LOAD, MARGINAL, NO_NODES, Share, share_rows
from scheduler.sizing import choose_size

lists = st.lists(st.floats(0, 1), max_size=8).map(lambda ps: np.array(sorted(ps, reverse=True)))
batches = st.lists(lists, min_size=1, max_size=5)
prices = st.lists(st.floats(0, 3), min_size=50, max_size=50).map(lambda steps: 5 + np.cumsum(steps))
convex = st.lists(st.floats(0, 1), min_size=50, max_size=50).map(lambda steps: 5 + np.cumsum(np.cumsum(sorted(steps)) / 10))


def knee(rows: int, slope: float = 2.0, most: int = 2000) -> np.ndarray:
    """Memory-bound, 20 ms, up to so many rows; then `slope` ms per row."""
    return 20 + slope * np.maximum(np.arange(1, most + 1) - rows, 0.0)


def rate_of(candidates: list[np.ndarray], nodes: tuple[int, ...], verify_ms: np.ndarray, draft_ms: float = 0.0) -> float:
    """Tokens per millisecond of any share, from the definition."""
    tokens = len(candidates) + sum(float(own[:count].sum()) for own, count in zip(candidates, nodes, strict=True))
    return tokens / (verify_ms[len(candidates) + sum(nodes) - 1] + (draft_ms if sum(nodes) else 0.0))


def equal_split(candidates: list[np.ndarray], rows: int) -> tuple[int, ...]:
    share = (rows - len(candidates)) // len(candidates)
    return tuple(min(share, len(own)) for own in candidates)


def test_golden_share() -> None:
    """By hand: with 1 ms per row the rates are 2/12, 2.9/13, 3.7/14, 4.3/15, 4.8/16, 4.9/17: four nodes, three of them A's."""
    a, b = np.array([0.9, 0.8, 0.6]), np.array([0.5, 0.1])
    share = share_rows([a, b], 10.0 + np.arange(1, 9))
    assert share.nodes == (3, 1) and share.reason == MARGINAL
    assert (share.tokens, share.ms) == (pytest.approx(4.8), 16.0)
    assert share.rate == pytest.approx(0.3) and share.plain == pytest.approx(2 / 12)


def test_equally_probable_nodes_go_round() -> None:
    """The expected tokens are the same either way, but one sequence should not take all rows for having come first."""
    candidates = [np.array([0.5, 0.5, 0.5]), np.array([0.5, 0.5, 0.5]), np.array([0.6, 0.5])]
    assert share_rows(candidates, np.full(7, 10.0)).nodes == (2, 1, 1)


@pytest.mark.parametrize("seed", range(12))
def test_no_other_share_is_better(seed: int) -> None:
    """Exhaustively over 3 sequences of up to 6 nodes, prices with jumps included, where greedy alone would stop too soon."""
    dice = np.random.default_rng(seed)
    candidates = [np.sort(dice.random(dice.integers(0, 7)))[::-1] for _ in range(3)]
    verify_ms = 5 + np.cumsum(dice.choice([0.0, 0.1, 2.0], 21) * dice.random(21))
    for budget in (3, 7, 21):
        share = share_rows(candidates, verify_ms, budget=budget, draft_ms=0.5)
        every = product(*(range(len(own) + 1) for own in candidates))
        best = max(rate_of(candidates, nodes, verify_ms, 0.5) for nodes in every if 3 + sum(nodes) <= budget)
        assert share.rate == pytest.approx(best)
        assert rate_of(candidates, share.nodes, verify_ms, 0.5) == pytest.approx(share.rate)


@given(batches, prices, st.integers(5, 50))
def test_never_worse_than_an_equal_split_or_than_plain_decoding(
    candidates: list[np.ndarray], verify_ms: np.ndarray, budget: int
) -> None:
    """What the sharing is for; an equal split is what a fixed budget per sequence does."""
    share = share_rows(candidates, verify_ms, budget=budget)
    split = rate_of(candidates, equal_split(candidates, budget), verify_ms)
    assert share.rate >= split * (1 - 1e-12)
    assert share.rate >= share.plain * (1 - 1e-12)
    assert len(candidates) + sum(share.nodes) <= budget


@given(batches, convex)
def test_with_convex_prices_it_is_the_greedy_rule(candidates: list[np.ndarray], verify_ms: np.ndarray) -> None:
    """Taken: probability above rate times the price of the row. Not taken: at most that. Up to ties."""
    share = share_rows(candidates, verify_ms)
    last = len(candidates) + sum(share.nodes) - 1  # index of the price that is paid
    for own, count in zip(candidates, share.nodes, strict=True):
        for p in own[:count]:
            assert p >= share.rate * (verify_ms[last] - verify_ms[last - 1]) - 1e-9
        for p in own[count:]:
            assert p <= share.rate * (verify_ms[last + 1] - verify_ms[last]) + 1e-9


@given(lists, prices, st.floats(0, 20))
def test_one_sequence_is_sized_as_alone(own: np.ndarray, verify_ms: np.ndarray, spent: float) -> None:
    """Two rules that disagree about the same question would make batches of one a special case."""
    share = share_rows([own], verify_ms, spent_ms=spent)
    size = choose_size(np.concatenate(([1.0], own)), verify_ms, spent_ms=spent)
    assert share.rate == pytest.approx(size.rate)
    assert (share.tokens, share.ms) == (pytest.approx(size.tokens), pytest.approx(size.ms))


@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize("slope", [0.5, 2.0])
def test_the_share_of_each_shrinks_to_nothing_as_sequences_grow(rows: int, slope: float) -> None:
    """Under heavy load plain decoding wins; a fixed budget would go on paying for rows that are mostly thrown away."""
    own = 0.8 ** np.arange(1, 20)
    most, counts = [], (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 400)
    for sequences in counts:
        share = share_rows([own] * sequences, knee(rows, slope))
        assert max(share.nodes) - min(share.nodes) <= 1, "identical sequences, different shares"
        most.append(max(share.nodes))
    assert all(a >= b for a, b in pairwise(most)), list(zip(counts, most, strict=True))
    assert most[0] > 0 and most[-1] == 0, most
    assert share.reason == LOAD and not share.speculates


@given(batches, prices, st.integers(5, 49))
def test_a_larger_budget_never_lowers_the_rate(candidates: list[np.ndarray], verify_ms: np.ndarray, budget: int) -> None:
    """More choice cannot hurt the one who chooses best."""
    less, more = (share_rows(candidates, verify_ms, budget=rows).rate for rows in (budget, budget + 1))
    assert more >= less * (1 - 1e-12)


@given(lists, batches, prices, st.lists(st.floats(0, 1), min_size=8, max_size=8))
def test_the_better_drafted_gets_at_least_as_much(
    own: np.ndarray, others: list[np.ndarray], verify_ms: np.ndarray, factors: list[float]
) -> None:
    """Rows go where they are accepted; otherwise a sequence would gain by drafting worse."""
    worse = np.sort(own * factors[: len(own)])[::-1]
    nodes = share_rows([own, worse, *others[:3]], verify_ms).nodes
    assert nodes[0] >= nodes[1]


def test_drafting_still_to_be_paid_counts_against_speculation_only() -> None:
    """Before drafting it is a reason not to begin, after it no longer: the same share, two decisions."""
    own, ms = [np.array([0.5, 0.3])], np.array([10.0, 11.0, 12.0])
    assert share_rows(own, ms, draft_ms=20).reason == LOAD
    assert share_rows(own, ms, draft_ms=20).ms == 10.0
    assert share_rows(own, ms, spent_ms=20).nodes == (2,)
    assert share_rows(own, ms, spent_ms=20).plain == pytest.approx(1 / 30)


@pytest.mark.parametrize(
    ("gain", "speculated", "reason"),
    [(0.2, False, ALL), (0.2, True, ALL), (0.02, False, HELD), (0.02, True, ALL), (-0.02, True, LOAD), (-0.02, False, LOAD)],
)
def test_speculation_comes_back_only_for_a_real_gain(gain: float, speculated: bool, reason: str) -> None:
    """Between the two thresholds things stay as they are, so a clock that trembles by 2 % switches nothing."""
    share = share_rows([np.array([0.5])], np.array([10.0, 15.0 / (1 + gain)]), speculated=speculated, margin=0.05)
    assert share.reason == reason
    assert share.nodes == ((1,) if reason == ALL else (0,))


def test_a_trembling_clock_switches_at_most_once() -> None:
    """A gain that wanders between -1 and +4 % around the threshold; without the margin it would switch every other step."""

    def switches(margin: float) -> int:
        dice = np.random.default_rng(3)
        states = [True]
        for _ in range(200):
            gain = dice.choice([-0.01, 0.04])
            ms = np.array([10.0, 15.0 / (1 + gain)])
            states.append(share_rows([np.array([0.5])], ms, speculated=states[-1], margin=margin).speculates)
        return sum(a != b for a, b in pairwise(states))

    assert switches(0.05) == 1
    assert switches(0.0) > 50  # negative control


@pytest.mark.parametrize(
    ("candidates", "prices", "budget", "expected"),
    [
        ([[], []], [1.0, 1.0, 1.0], None, NO_NODES),
        ([[0.5], [0.5]], [1.0, 1.0], None, BUDGET),
        ([[0.5], [0.5]], [1.0, 1.0, 1.0, 1.0], 1, BUDGET),
        ([[0.5], [0.5]], [1.0, 1.0, 1.0, 1.0], 3, BUDGET),
        ([[0.5], [0.5]], [1.0, 1.0, 1.0, 1.0], 4, ALL),
        ([[0.5], [0.4]], [1.0, 1.0, 1.0, 9.0], 4, MARGINAL),
        ([[0.5], [0.5]], [1.0, 1.0, 9.0, 9.0], 4, LOAD),
    ],
)
def test_the_reason_is_the_one_that_decided(
    candidates: list[list[float]], prices: list[float], budget: int | None, expected: str
) -> None:
    """It becomes a metric label; people tune by it."""
    share = share_rows([np.array(own) for own in candidates], np.array(prices), budget=budget)
    assert share.reason == expected
    assert isinstance(share, Share) and len(share.nodes) == len(candidates)
