"""EAGLE-2's tree: expand the best of each layer, keep the best of all."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.policy_world import Drafter, Path, candidates, check_cut, grow, paths, random_drafter
from tree.growth import Answer, Candidates, Policy
from tree.policies.eagle import Eagle


def pool_by_definition(q: Drafter, width: int, depth: int) -> list[tuple[Path, float]]:
    """The released loop on paths: everything proposed, in order of creation, whatever the budget."""

    def best(path: Path, above: float) -> list[tuple[Path, float]]:
        row = candidates(q(path), width)
        return [((*path, t), above + lp) for t, lp in zip(row.tokens, row.lps, strict=True) if lp > -math.inf]

    pool: list[tuple[Path, float]] = []
    layer: list[tuple[Path, float]] = [((), 0.0)]
    for _ in range(depth):
        proposed = [child for path, score in layer for child in best(path, score)]
        proposed.sort(key=lambda entry: -round(entry[1], 9))
        pool += proposed
        layer = proposed[:width]
    return pool


def kept_by_definition(pool: list[tuple[Path, float]], budget: int) -> set[Path]:
    order = sorted(range(len(pool)), key=lambda i: (-round(pool[i][1], 9), len(pool[i][0]), i))
    return {pool[i][0] for i in order[: budget - 1]}


@settings(max_examples=150)
@given(
    seed=st.integers(0, 10**9),
    vocab=st.integers(1, 6),
    width=st.integers(1, 4),
    depth=st.integers(0, 4),
    budget=st.integers(1, 40),
    sharpness=st.sampled_from([0.0, 1.0, 6.0]),
)
def test_it_keeps_the_best_of_the_whole_pool(
    seed: int, vocab: int, width: int, depth: int, budget: int, sharpness: float
) -> None:
    """The tree holds less than the released pool does; leaving candidates out early must never change what is verified."""
    q = random_drafter(seed, vocab, sharpness)
    growth, asked = grow(Eagle(width, depth, budget), q, vocab)
    kept = paths(growth, check_cut(growth, budget))
    assert kept == kept_by_definition(pool_by_definition(q, width, depth), budget)
    assert len(asked) == min(depth, budget - 1), "one forward per layer"
    assert all(len(ask.nodes) <= width and ask.width <= width for ask in asked)


def test_pool_and_expansion_differ() -> None:
    """Hand-checked: K = 2. The third-best second-layer node is verified, but only two of that layer are expanded."""
    q: Drafter = lambda path: (0.6, 0.3, 0.1)  # noqa: E731
    growth, asked = grow(Eagle(width=2, depth=2, budget=7), q, 3)
    assert paths(growth, growth.verify_nodes()) == {(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)}
    growth, asked = grow(Eagle(width=2, depth=3, budget=6), q, 3)
    # .6 .36 .3 .216 and then .18 twice: (0, 1) and (1, 0), of which the earlier one is kept
    assert paths(growth, growth.verify_nodes()) == {(0,), (0, 0), (1,), (0, 0, 0), (0, 1)}
    assert paths(growth, asked[2].nodes) == {(0, 0), (0, 1)}


def certain(path: Path) -> tuple[float, ...]:
    """Sure of token 2 after token 2, as a float32 softmax may be."""
    return (0.0, 0.0, 1.0) if path[-1:] == (2,) else (0.2, 0.3, 0.5)


@pytest.mark.parametrize("budget", range(1, 12))
def test_certain_edges_keep_the_cut_a_tree(budget: int) -> None:
    """Probability 1 makes parent and child tie; the depth must decide, or a node is verified without its parent."""
    growth, _ = grow(Eagle(width=2, depth=5, budget=budget), certain, 3)
    nodes = check_cut(growth, budget)
    assert len(nodes) == budget
    assert all(growth.tree.parent[node] in nodes for node in nodes[1:])


def test_without_the_depth_key_the_cut_is_no_tree() -> None:
    """Negative control: ties sorted any other way lose a parent."""
    growth, _ = grow(Eagle(width=2, depth=5, budget=12), certain, 3)
    tree = growth.tree
    wrong = sorted(range(1, len(tree)), key=lambda node: (-tree.score[node], -node))[:2]
    assert any(tree.parent[node] not in {0, *wrong} for node in wrong)


def test_defaults_are_the_published_ones() -> None:
    """8 forwards of at most 10 rows, 60 verified nodes."""
    growth, asked = grow(Eagle(), random_drafter(1, 40), 40)
    assert len(asked) == 8 and [len(ask.nodes) for ask in asked] == [1] + [10] * 7
    assert len(growth.verify_nodes()) == 60


def test_tokens_the_target_does_not_have_are_dropped() -> None:
    """A padded drafter may propose ids past the tokenizer; they would index outside the target's embedding."""
    growth = Eagle(width=3).begin(0, vocab_size=4)
    assert growth.ask("medium") is not None
    growth.attach("medium", Answer({0: Candidates((5, 1, -1, 2), (-0.1, -2.0, -2.5, -3.0))}, {}))
    assert growth.tree.token == [0, 1, 2]


def test_a_smaller_budget_keeps_the_other_parameters() -> None:
    """Load sharing cuts the budget; it must not reset the shape."""
    policy: Policy = Eagle(width=3, depth=4, budget=30)
    assert policy.with_budget(9) == Eagle(3, 4, 9)
    assert grow(Eagle().with_budget(1), random_drafter(0, 3), 3)[1] == []


@pytest.mark.parametrize("bad", [{"width": 0}, {"depth": -1}, {"budget": 0}])
def test_nonsense_parameters_are_refused(bad: dict[str, int]) -> None:
    """A bad configuration must fail at start, with the name of the key."""
    with pytest.raises(ValueError, match=next(iter(bad))):
        Eagle(**bad)
