"""The best number of nodes, and a stop that never comes before the optimum; both against exhaustive search."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.sizing import Size, best_first, choose_size, may_pay, open_mass

falling = st.lists(st.floats(0, 1), max_size=30).map(lambda ps: np.array([1.0, *sorted(ps, reverse=True)]))
rising = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=40).map(lambda ms: np.array(sorted(ms)))


@dataclass
class Growth:
    """A random tree that grows layer by layer, with the price of every layer."""

    parent: list[int]
    paths: np.ndarray
    layer: list[int]  # of each node
    layer_ms: list[float]  # of drafting layer 1, 2, …
    verify_ms: np.ndarray

    def until(self, depth: int) -> tuple[np.ndarray, list[int], float]:
        """The tree of so many layers, its parents, and what it cost to draft."""
        size = sum(layer <= depth for layer in self.layer)
        return self.paths[:size], self.parent[:size], sum(self.layer_ms[:depth])


def random_growth(dice: random.Random, *, price_of_width: float = 0.0, width: int = 3, depth: int = 5) -> Growth:
    """Sub-stochastic children below the best nodes of the last layer; prices rise with nodes in random steps.

    A layer of w rows costs base + price_of_width * (w - 1).
    """
    parent, paths, layer, layer_ms, last = [-1], [1.0], [0], [], [0]
    base = dice.uniform(0.5, 4)
    for number in range(1, depth + 1):
        frontier = sorted(last, key=lambda node: -paths[node])[: dice.randint(1, width)]
        layer_ms.append(base + price_of_width * (len(frontier) - 1))
        last = []
        for above in frontier:
            shares = [dice.random() ** 2 for _ in range(dice.randint(1, 3))]
            total = max(sum(shares) / dice.uniform(0.6, 1.0), 1e-9)
            for share in shares:
                last.append(len(paths))
                parent.append(above)
                paths.append(paths[above] * share / total)
                layer.append(number)
    steps = [dice.choice((0.0, 0.1, 0.5, 3.0)) * dice.random() for _ in paths]
    return Growth(parent, np.array(paths), layer, layer_ms, 10 + np.cumsum(steps))


def best_size(growth: Growth, depth: int) -> Size:
    paths, _, spent = growth.until(depth)
    return choose_size(paths[best_first(paths)], growth.verify_ms, spent_ms=spent)


def stop_depth(growth: Growth, layer_ms: Callable[[int], float], kappa: float = 1.0) -> int:
    """Where the rule ends drafting; `layer_ms` of the layer to come. Every unexpanded node counts as open, cut or not."""
    for depth in range(len(growth.layer_ms)):
        paths, parent, _ = growth.until(depth)
        mass = open_mass(paths, parent, [n for n in range(len(paths)) if growth.layer[n] == depth])
        if not may_pay(mass, best_size(growth, depth).rate, layer_ms(depth), kappa):
            return depth
    return len(growth.layer_ms)


def too_early(growth: Growth, stop: int) -> bool:
    """Whether a deeper tree has a strictly better rate than every tree up to the stop."""
    rates = [best_size(growth, depth).rate for depth in range(len(growth.layer_ms) + 1)]
    return max(rates) > max(rates[: stop + 1]) * (1 + 1e-12)


# ---- size -----------------------------------------------------------------------------------------------------------


def test_golden_size() -> None:
    """By hand: rates 1/10, 1.8/11, 2.3/12, 2.5/18, so three nodes."""
    size = choose_size(np.array([1, 0.8, 0.5, 0.2]), np.array([7.0, 8.0, 9.0, 15.0]), spent_ms=2, overhead_ms=1)
    assert (size.nodes, size.tokens, size.ms) == (3, pytest.approx(2.3), 12.0)
    assert size.rate == pytest.approx(2.3 / 12)


def test_a_dear_row_may_be_worth_a_cheap_one_behind_it() -> None:
    """The price jumps at 2 and is flat after it: a scan that ends at the first loss stays at the root."""
    assert choose_size(np.array([1, 0.5, 0.5, 0.5, 0.5]), np.array([10, 18, 18, 18, 18])).nodes == 5


@given(falling, rising, st.floats(0, 100), st.floats(0, 10))
def test_the_size_is_the_best_of_all(ranked: np.ndarray, verify_ms: np.ndarray, spent: float, overhead: float) -> None:
    """Against the definition, one n after the other."""
    size = choose_size(ranked, verify_ms, spent_ms=spent, overhead_ms=overhead)
    rates = [
        sum(ranked[:n]) / (verify_ms[n - 1] + spent + overhead) for n in range(1, min(len(ranked), len(verify_ms)) + 1)
    ]
    assert size.rate == pytest.approx(max(rates))
    assert rates[size.nodes - 1] == pytest.approx(max(rates))


@pytest.mark.parametrize("seed", range(40))
def test_no_subset_with_all_ancestors_has_a_better_rate(seed: int) -> None:
    """The ranked prefix is the best tree of its size: exhaustively over all subsets of up to 11 nodes that are trees."""
    growth = random_growth(random.Random(seed), depth=3, width=2)
    paths = growth.paths[:11]
    parent = growth.parent[:11]
    size = choose_size(paths[best_first(paths)], growth.verify_ms, spent_ms=3)
    best = 0.0
    for count in range(len(paths)):
        for chosen in combinations(range(1, len(paths)), count):
            if all(parent[node] in (0, *chosen) for node in chosen):
                best = max(best, (1 + paths[list(chosen)].sum()) / (growth.verify_ms[count] + 3))
    assert size.rate == pytest.approx(best)


@pytest.mark.parametrize("seed", range(20))
def test_the_first_nodes_of_the_order_are_always_a_tree(seed: int) -> None:
    """Ties included: a child as probable as its parent must not come first. Half of all edges here have probability 1."""
    dice = random.Random(seed)
    parent, paths = [-1], [1.0]
    for node in range(1, 30):
        parent.append(dice.randrange(node))
        paths.append(paths[parent[-1]] * dice.choice((1.0, 0.5)))
    seen: set[int] = {-1}
    for node in best_first(np.array(paths)).tolist():
        assert parent[node] in seen, f"node {node} before its parent {parent[node]}"
        seen.add(node)


def test_drafting_that_is_paid_for_makes_trees_larger() -> None:
    """The longer a step takes anyway, the less a row matters; a rule without the time spent would say the same for both."""
    ranked, ms = np.array([1, 0.5, 0.3, 0.2, 0.1]), np.array([10.0, 12, 14, 16, 18])
    sizes = [choose_size(ranked, ms, spent_ms=spent).nodes for spent in (0, 10, 30, 100)]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]


def test_maximizing_each_steps_rate_is_not_maximizing_the_rate() -> None:
    """Two kinds of steps in turn, 10 ms each before any row: one whose nodes are sure, one whose nodes are doubtful."""
    ms = np.array([10.0, 13.0, 16.0, 19.0])
    sure, doubtful = np.array([1, 0.95, 0.9, 0.9]), np.array([1, 0.32, 0.3, 0.3])

    def together(rate: float | None) -> float:
        sizes = [choose_size(ranked, ms, rate=rate) for ranked in (sure, doubtful)]
        return sum(size.tokens for size in sizes) / sum(size.ms for size in sizes)

    plain = together(None)
    better = together(plain)
    assert better > plain
    assert together(better) >= better


def calls_of(work: Callable[[], Any]) -> int:
    """Function calls, C functions included, that `work` makes."""
    count = 0

    def count_call(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(count_call)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_a_decision_takes_a_few_array_operations_however_large_the_tree() -> None:
    """A loop over nodes in Python would cost a millisecond at 512 of them, as much as a small drafter's forward."""
    counts = []
    for size in (2, 64, 512):
        paths = np.linspace(1, 0, size)
        parent = [-1, *range(size - 1)]
        ms = np.arange(1.0, size + 1)

        def decide(paths: np.ndarray = paths, parent: list[int] = parent, ms: np.ndarray = ms) -> None:
            choose_size(paths[best_first(paths)], ms)
            may_pay(open_mass(paths, parent, [len(paths) - 1]), 0.1, 1.0)

        decide()
        counts.append(calls_of(decide))
    assert counts[0] == counts[1] == counts[2] <= 40, counts


# ---- stopping -------------------------------------------------------------------------------------------------------


def test_the_sound_rule_never_stops_before_the_optimum() -> None:
    """300 random growths with random prices; the rule must also stop often, or it says nothing."""
    growths = [random_growth(random.Random(seed), price_of_width=seed % 3) for seed in range(300)]
    stops = [stop_depth(growth, lambda _, growth=growth: min(growth.layer_ms)) for growth in growths]
    wrong = [seed for seed, (growth, stop) in enumerate(zip(growths, stops, strict=True)) if too_early(growth, stop)]
    assert not wrong, f"stopped before the optimum: seeds {wrong[:10]}"
    early = sum(stop < len(growth.layer_ms) for growth, stop in zip(growths, stops, strict=True))
    assert early >= 60, f"only {early} stops in 300"


def test_a_smaller_kappa_does_stop_too_early() -> None:
    """Negative control: a search that sees no wrong stop here would not see one above either."""
    growths = [random_growth(random.Random(seed)) for seed in range(300)]
    wrong = [g for g in growths if too_early(g, stop_depth(g, lambda _, g=g: min(g.layer_ms), kappa=0.2))]
    assert len(wrong) >= 10


def test_the_price_of_the_whole_frontier_is_no_bound() -> None:
    """Negative control: a wide layer may be dear and the ones below it narrow, so c must be the cheapest layer's price.

    Four rows cost 8 ms, one row 1 ms. Below the four nodes hangs one sure chain: U = 1 <= R * c(4), yet going on pays.
    """
    parent, paths, layer = [-1], [1.0], [0]
    for _ in range(4):
        parent.append(0)
        paths.append(0.25)
        layer.append(1)
    above = 1
    for number in range(2, 32):
        parent.append(above)
        above = len(paths)
        paths.append(0.25)
        layer.append(number)
    layer_ms = [1.0, 8.0, *[0.2] * 29]
    growth = Growth(parent, np.array(paths), layer, layer_ms, np.full(len(paths), 6.0))
    assert stop_depth(growth, lambda depth: layer_ms[depth]) == 1
    assert too_early(growth, 1)
    assert not too_early(growth, stop_depth(growth, lambda _: min(layer_ms)))


def test_open_mass_counts_what_is_left_of_nodes_with_children() -> None:
    """By hand: the root keeps 0.3, node 1 (with a child of 0.2) keeps 0.3, node 3 all of its 0.2; node 2 is closed."""
    paths, parent = np.array([1.0, 0.5, 0.2, 0.2]), [-1, 0, 0, 1]
    assert open_mass(paths, parent, [0, 1, 3]) == pytest.approx(0.8)
    assert open_mass(paths, parent, [3]) == pytest.approx(0.2)
    assert open_mass(paths, parent, []) == 0.0
    assert open_mass(np.array([1.0]), [-1], [0]) == 1.0


@pytest.mark.parametrize("seed", range(20))
def test_no_layer_is_worth_more_than_the_open_mass(seed: int) -> None:
    """What the proof rests on, also where nodes with children get more of them."""
    dice = random.Random(seed)
    parent, paths, left = [-1], [1.0], {0: 1.0}
    for _ in range(12):
        bound = open_mass(np.array(paths), parent, range(len(paths)))
        gain = 0.0
        for node in dice.sample(sorted(left), min(3, len(left))):
            share = left[node] * dice.random()
            left[node] -= share
            left[len(paths)] = share
            parent.append(node)
            paths.append(share)
            gain += share
        assert gain <= bound + 1e-12
        assert open_mass(np.array(paths), parent, range(len(paths))) <= bound + 1e-12
