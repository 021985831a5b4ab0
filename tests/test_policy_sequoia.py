"""Sequoia's plan is the best static tree for an acceptance-by-rank vector."""

from __future__ import annotations

import heapq
from functools import cache

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.policy_world import Path, check_cut, grow, paths, random_drafter
from tree.growth import Policy
from tree.policies.fixed import Template
from tree.policies.layers import LayerGrowth
from tree.policies.sequoia import GUESSED_ACCEPTANCE, Sequoia, expected_tokens, fastest

GOLDEN = (0.6, 0.2, 0.1)


def value(acceptance: tuple[float, ...], size: int, depth: int) -> float:
    return expected_tokens(acceptance, Sequoia(acceptance, size, depth).paths)


@cache
def shapes(num_nodes: int, num_ranks: int, levels: int) -> tuple[frozenset[Path], ...]:
    """Every ordered tree of that many nodes, root included, as sets of rank paths; children have ranks without gaps."""
    if levels == 0:
        return ()

    def forests(nodes: int, rank: int) -> list[frozenset[Path]]:
        if nodes == 0:
            return [frozenset()]
        if rank == num_ranks:
            return []
        return [
            frozenset({(rank,), *((rank, *path) for path in first)}) | rest
            for size in range(1, nodes + 1)
            for first in shapes(size, num_ranks, levels - 1)
            for rest in forests(nodes - size, rank + 1)
        ]

    return tuple(forests(num_nodes - 1, 0))


def best_by_force(acceptance: tuple[float, ...], size: int, depth: int) -> float:
    """The best F of all trees of at most `size` nodes."""
    return max(expected_tokens(acceptance, tree) for n in range(1, size + 1) for tree in shapes(n, len(acceptance), depth + 1))


@st.composite
def acceptances(draw: st.DrawFn, is_sorted: bool = False) -> tuple[float, ...]:
    weights = draw(st.lists(st.integers(0, 20), min_size=1, max_size=4))
    scale = sum(weights) + draw(st.integers(1, 20))
    return tuple(w / scale for w in (sorted(weights, reverse=True) if is_sorted else weights))


def test_golden_values() -> None:
    """Hand-checked, p = (.6, .2, .1)."""
    unlimited = [value(GOLDEN, size, 20) for size in range(2, 9)]
    assert unlimited == pytest.approx([1.6, 1.96, 2.176, 2.376, 2.5056, 2.6256, 2.7456], abs=1e-12)
    assert value(GOLDEN, 4, depth=2) == pytest.approx(2.16, abs=1e-12), "three levels"
    assert value(GOLDEN, 6, depth=3) == pytest.approx(2.496, abs=1e-12), "four levels"


@settings(max_examples=60)
@given(acceptance=acceptances(), size=st.integers(1, 7), depth=st.integers(0, 6))
def test_no_tree_emits_more(acceptance: tuple[float, ...], size: int, depth: int) -> None:
    """Brute force over all ordered trees, ranks in any order of quality; a worse plan would lose tokens in every step."""
    assert value(acceptance, size, depth) == pytest.approx(best_by_force(acceptance, size, depth), abs=1e-12)


@given(acceptance=acceptances(is_sorted=True), size=st.integers(1, 40), depth=st.integers(1, 8))
def test_it_takes_the_most_probable_rank_paths(acceptance: tuple[float, ...], size: int, depth: int) -> None:
    """With ranks in order of quality the best tree is greedy: an independent check on sizes that force cannot reach."""
    heap: list[tuple[float, Path]] = [(-p, (rank,)) for rank, p in enumerate(acceptance)]
    heapq.heapify(heap)
    total = 1.0
    for _ in range(size - 1):
        if not heap:
            break
        negative, path = heapq.heappop(heap)
        total -= negative
        if len(path) < depth:
            for rank, p in enumerate(acceptance):
                heapq.heappush(heap, (negative * p, (*path, rank)))
    assert value(acceptance, size, depth) == pytest.approx(total, abs=1e-10)


@given(acceptance=acceptances(), size=st.integers(1, 30), depth=st.integers(0, 7))
def test_a_plan_is_a_tree_within_its_bounds(acceptance: tuple[float, ...], size: int, depth: int) -> None:
    """What is replayed must be a template: parents first, ranks without gaps, neither too large nor too deep."""
    plan = Sequoia(acceptance, size, depth)
    Template(plan.paths)  # checks the order
    assert len(plan.paths) < size or size == 1
    assert plan.budget == 1 + len(plan.paths) <= size
    assert max(map(len, plan.paths), default=0) <= depth
    for path in plan.paths:
        assert path[-1] == 0 or (*path[:-1], path[-1] - 1) in plan.paths, "a rank was skipped"


@given(acceptance=acceptances(), size=st.integers(1, 20), depth=st.integers(0, 6))
def test_more_nodes_or_levels_never_hurt(acceptance: tuple[float, ...], size: int, depth: int) -> None:
    """If F fell with a larger bound, the search over sizes for a machine would pick wrong ones."""
    here = value(acceptance, size, depth)
    assert value(acceptance, size + 1, depth) >= here - 1e-12
    assert value(acceptance, size, depth + 1) >= here - 1e-12


def test_useless_ranks_give_a_chain() -> None:
    """Nodes that can never be accepted must not take rows of the target's forward."""
    assert Sequoia((0.7, 0.0, 0.0), 9, 20).paths == tuple((0,) * n for n in range(1, 9))
    short = Sequoia((0.7, 0.0, 0.0), 9, 3)
    assert short.paths == ((0,), (0, 0), (0, 0, 0)) and short.budget == 4
    assert Sequoia((0.0,), 9).budget == 1 and Sequoia((), 9).budget == 1
    assert Sequoia((1.0,), 4).paths == ((0,), (0, 0), (0, 0, 0))


def test_a_good_second_rank_needs_its_elder() -> None:
    """Ranks have no gaps even where the first is worthless: it is what the drafter lists first."""
    assert Sequoia((0.0, 0.9), 3, 5).paths == ((1,), (0,))


@pytest.mark.parametrize("seed", range(4))
def test_the_plan_is_what_grows(seed: int) -> None:
    """The replay must put the drafter's candidates where the plan wants them."""
    plan: Policy = Sequoia(GOLDEN, 12, 4)
    growth, asked = grow(plan, random_drafter(seed, 6), 6)
    assert isinstance(plan, Sequoia) and isinstance(growth, LayerGrowth)
    assert len(check_cut(growth, 12)) == 12 == len(paths(growth)) + 1
    assert {growth.rank_path(node) for node in range(1, 12)} == set(plan.paths)
    assert len(asked) == max(map(len, plan.paths))


def test_another_budget_is_another_plan() -> None:
    """The best small tree need not be a part of the best large one, and a request's budget must be honored at once."""
    for budget in (1, 2, 17, 64, 65):
        assert Sequoia(size=64).with_budget(budget).budget == budget
    wide = Sequoia(GUESSED_ACCEPTANCE, 511, 16)
    assert wide.budget == 511 and wide.with_budget(60) == Sequoia(GUESSED_ACCEPTANCE, 60, 16)


def test_the_fastest_plan_weighs_drafting_against_verifying() -> None:
    """Free forwards want the deepest, largest tree; dear ones want none; in between the ratio decides."""
    sizes = {1: 1.0, 4: 1.0, 16: 1.0, 64: 1.0}
    assert fastest(GOLDEN, draft_s=0.0, verify_s=sizes).size == 64
    assert fastest(GOLDEN, draft_s=10.0, verify_s=sizes).budget == 1
    assert fastest(GOLDEN, draft_s=0.0, verify_s={1: 1.0, 64: 9.0}).budget == 1
    wide = fastest(GOLDEN, draft_s=0.6, verify_s={1: 1.0, 4: 1.1, 16: 2.5, 64: 9.0})
    assert wide == Sequoia(GOLDEN, 4, 1), "one forward, all three ranks: 1.7 / 1.9 beats plain decoding and 2.3 / 2.16"


@settings(max_examples=30)
@given(
    acceptance=acceptances(),
    draft=st.floats(0.0, 1.0),
    sizes=st.dictionaries(st.integers(1, 12), st.floats(0.5, 3.0), min_size=1, max_size=4),
)
def test_the_fastest_plan_is_the_minimum_of_the_ratio(
    acceptance: tuple[float, ...], draft: float, sizes: dict[int, float]
) -> None:
    """The choice against a plain scan of all sizes and depths."""
    plan = fastest(acceptance, draft_s=draft, verify_s=sizes, max_depth=4)
    depth = max(map(len, plan.paths), default=0)
    time = (depth * draft + sizes[plan.size]) / expected_tokens(acceptance, plan.paths)
    scan = min((d * draft + sizes[n]) / value(acceptance, n, d) for n in sizes for d in range(5))
    assert time == pytest.approx(scan, rel=1e-9) or time < scan


@given(p=st.floats(0.05, 0.95), size=st.integers(2, 12))
def test_a_lying_vector_is_worth_less(p: float, size: int) -> None:
    """Negative control: the plan for another vector must not be better on this one, and a wrong one is worse."""
    true, lie = (p * 0.9, p * 0.1), (0.05, 0.04)
    assume(p > 0.5 and size > 4)
    assert expected_tokens(true, Sequoia(lie, size).paths) < value(true, size, 10)


@pytest.mark.parametrize(
    ("bad", "name"),
    [
        ({"size": 0}, "size"),
        ({"depth": -1}, "depth"),
        ({"acceptance": (0.6, 0.6)}, "acceptance"),
        ({"acceptance": (-0.1,)}, "acceptance"),
        ({"acceptance": (float("nan"),)}, "acceptance"),
    ],
)
def test_nonsense_parameters_are_refused(bad: dict[str, object], name: str) -> None:
    """A bad configuration must fail at start, with the name of the key."""
    with pytest.raises(ValueError, match=name):
        Sequoia(**bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="verify_s"):
        fastest(GOLDEN, draft_s=0.1, verify_s={})
    with pytest.raises(ValueError, match="size"):
        fastest(GOLDEN, draft_s=0.1, verify_s={0: 1.0})
