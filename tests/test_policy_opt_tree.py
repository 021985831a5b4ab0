"""OPT-Tree finds the tree with the largest sum of path probabilities."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.policy_world import Drafter, Path, check_cut, grow, paths, probability, random_drafter
from tree.growth import Policy
from tree.policies.eagle import Eagle
from tree.policies.opt_tree import OptTree, expected_accepted
from tree.tree import TokenTree


def largest_sum(q: Drafter, vocab: int, num_nodes: int, depth: int) -> float:
    """The largest E over ALL trees of `num_nodes` nodes, by sharing nodes among the children in every possible way.

    Uses nothing of what makes the policy work: no ranking, no monotony.
    """

    @cache
    def below(path: Path, nodes: int) -> float:
        """The best sum of probabilities, relative to `path`, of exactly that many nodes below it."""
        if nodes == 0:
            return 0.0
        if len(path) == depth:
            return -math.inf
        return share(path, 0, nodes)

    @cache
    def share(path: Path, token: int, nodes: int) -> float:
        if nodes == 0:
            return 0.0
        if token == vocab:
            return -math.inf
        p = q(path)[token]
        given_away = [p * (1 + below((*path, token), y - 1)) + share(path, token + 1, nodes - y) for y in range(1, nodes + 1)]
        return max(share(path, token + 1, nodes), *given_away)

    return below((), num_nodes)


def trees(depth: int, vocab: int, num_nodes: int) -> Iterator[frozenset[Path]]:
    """Every tree of that many nodes, one by one."""
    level: set[frozenset[Path]] = {frozenset()}
    everything = [path for length in range(1, depth + 1) for path in product(range(vocab), repeat=length)]
    for _ in range(num_nodes):
        level = {tree | {p} for tree in level for p in everything if p not in tree and (len(p) == 1 or p[:-1] in tree)}
    yield from level


def test_the_oracle_of_these_tests_is_an_exhaustive_search() -> None:
    """The oracle itself, against a plain list of all trees."""
    for seed in range(3):
        q = random_drafter(seed, 3)
        for num_nodes in range(1, 5):
            best = max(sum(probability(q, path) for path in tree) for tree in trees(3, 3, num_nodes))
            assert largest_sum(q, 3, num_nodes, 3) == pytest.approx(best, abs=1e-12)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10**9),
    num_nodes=st.integers(1, 14),
    sharpness=st.sampled_from([0.0, 1.0, 4.0]),
)
def test_no_tree_of_that_size_is_better(seed: int, num_nodes: int, sharpness: float) -> None:
    """If another tree had a larger E, the name would be a lie: drafted tokens were left on the table."""
    q = random_drafter(seed, 3, sharpness)
    growth, asked = grow(OptTree(budget=num_nodes + 1, gain=-1.0, depth=4), q, 3)
    nodes = check_cut(growth, num_nodes + 1)
    assert len(nodes) == num_nodes + 1
    found = sum(probability(q, path) for path in paths(growth, nodes))
    assert found == pytest.approx(largest_sum(q, 3, num_nodes, 4), abs=1e-12)
    assert found == pytest.approx(expected_accepted(growth.tree, num_nodes), abs=1e-12)
    assert len(asked) == min(4, num_nodes)


def test_fewer_nodes_per_layer_are_not_optimal() -> None:
    """Negative control: expanding K = 2 instead of n per layer misses the best tree somewhere."""
    worse = 0
    for seed in range(20):
        q = random_drafter(seed, 3, 0.3)
        growth, _ = grow(Eagle(width=2, depth=4, budget=13), q, 3)
        found = sum(probability(q, path) for path in paths(growth, growth.verify_nodes()))
        worse += found < largest_sum(q, 3, 12, 4) - 1e-3
    assert worse


@given(seed=st.integers(0, 10**9), num_nodes=st.integers(1, 12), sharpness=st.sampled_from([0.5, 3.0]))
def test_more_layers_never_lower_the_sum(seed: int, num_nodes: int, sharpness: float) -> None:
    """E over more of the same tree; if it fell, the rule that stops on small gains would stop for a wrong reason."""
    q = random_drafter(seed, 5, sharpness)
    sums = []
    for depth in range(6):
        growth, _ = grow(OptTree(num_nodes + 1, gain=-1.0, depth=depth), q, 5)
        sums.append(expected_accepted(growth.tree, num_nodes))
    assert sums == sorted(sums)


@given(seed=st.integers(0, 10**9), num_nodes=st.integers(2, 12), gain=st.sampled_from([0.02, 0.1, 0.3, 0.5]))
def test_it_stops_at_the_first_layer_that_adds_too_little(seed: int, num_nodes: int, gain: float) -> None:
    """A layer more is a drafter forward for nothing; a layer less loses what the parameter promises."""
    q = random_drafter(seed, 5, 2.0)
    sums = [0.0]
    for depth in range(1, num_nodes + 1):
        full, _ = grow(OptTree(num_nodes + 1, gain=-1.0, depth=depth), q, 5)
        sums.append(expected_accepted(full.tree, num_nodes))
    expected = next((d for d in range(2, num_nodes + 1) if sums[d] - sums[d - 1] <= gain), num_nodes)
    growth, asked = grow(OptTree(num_nodes + 1, gain, depth=20), q, 5)
    assert len(asked) == expected
    assert expected_accepted(growth.tree, num_nodes) == pytest.approx(sums[expected])


def test_hand_checked() -> None:
    """q = (.6, .3, .1), n = 4: E is 1, 1.44, 1.656, ... by layer, so a gain of 0.3 stops after the third."""
    q: Drafter = lambda path: (0.6, 0.3, 0.1)  # noqa: E731
    growth, asked = grow(OptTree(budget=5, gain=0.3, depth=10), q, 3)
    assert paths(growth, growth.verify_nodes()) == {(0,), (0, 0), (1,), (0, 0, 0)}
    assert len(asked) == 3
    sums = [
        expected_accepted(growth.tree, 4, [v for v in range(1, len(growth.tree)) if growth.tree.depth[v] <= d])
        for d in (1, 2, 3)
    ]
    assert sums == pytest.approx([1.0, 0.6 + 0.36 + 0.3 + 0.18, 0.6 + 0.36 + 0.3 + 0.216])


def test_a_uniform_drafter_stops_at_once() -> None:
    """The second layer adds nothing to E, and the third is never drafted, not even at a gain of exactly 0."""
    for gain in (0.5, 0.0):
        growth, asked = grow(OptTree(budget=11, gain=gain), lambda path: [0.01] * 100, 100)
        assert len(asked) == 2 and len(growth.verify_nodes()) == 11


def test_expected_accepted_counts_the_best_only() -> None:
    """Path probabilities, not edge probabilities, and never the root."""
    tree = TokenTree(0)
    tree.add(tree.add(0, 1, math.log(0.5), "m"), 2, math.log(0.5), "m")
    tree.add(0, 3, math.log(0.4), "m")
    assert expected_accepted(tree, 2) == pytest.approx(0.9)
    assert expected_accepted(tree, 9) == pytest.approx(1.15)
    assert expected_accepted(TokenTree(0), 5) == 0.0


def test_a_smaller_budget_keeps_the_other_parameters() -> None:
    """Load sharing cuts the budget; it must not reset the rule that stops."""
    policy: Policy = OptTree(30, 0.1, 4)
    assert policy.with_budget(9) == OptTree(9, 0.1, 4)
    assert grow(OptTree().with_budget(1), random_drafter(0, 3), 3)[1] == []


@pytest.mark.parametrize("bad", [{"budget": 0}, {"depth": -1}, {"gain": math.nan}])
def test_nonsense_parameters_are_refused(bad: dict[str, float]) -> None:
    """A bad configuration must fail at start, with the name of the key."""
    with pytest.raises(ValueError, match=next(iter(bad))):
        OptTree(**bad)  # type: ignore[arg-type]


def test_ties_are_broken_the_same_way_every_time() -> None:
    """A drafter full of ties must give the same tree in whatever order a set happens to be."""
    q: Drafter = lambda path: [0.25] * 4  # noqa: E731
    seen = {frozenset(paths(g, g.verify_nodes())) for g, _ in (grow(OptTree(12, -1.0, 3), q, 4) for _ in range(3))}
    assert len(seen) == 1
