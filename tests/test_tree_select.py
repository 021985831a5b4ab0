"""The verify set is the best tree that fits the budget."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tree.select import rank_key, verify_set
from tree.tree import TokenTree


def random_tree(seed: int, size: int) -> TokenTree:
    """Edges from few dyadic values, so that ties, certainty and unscored edges occur and sums are exact."""
    rng = random.Random(seed)
    tree = TokenTree(0)
    while len(tree) < size:
        parent, token = rng.randrange(len(tree)), rng.randrange(5)
        if token not in tree.children[parent]:
            tree.add(parent, token, rng.choice([0.0, 0.0, -0.5, -0.75, -1.5, -math.inf]), "small")
    return tree


def brute_force(tree: TokenTree, budget: int) -> list[int]:
    """Of all ancestor-closed subsets of the right size, the one whose members, best first, come first in rank order."""
    size = min(budget, len(tree))
    subsets = (
        {0, *chosen}
        for chosen in itertools.combinations(range(1, len(tree)), size - 1)
        if all(tree.parent[node] in {0, *chosen} for node in chosen)
    )
    return sorted(min(subsets, key=lambda kept: sorted(rank_key(tree, node) for node in kept)))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 12), st.integers(1, 13))
def test_the_cut_equals_brute_force(seed: int, size: int, budget: int) -> None:
    """A worse cut wastes verified nodes; a cut that is not closed attaches children to strangers."""
    tree = random_tree(seed, size)
    kept = verify_set(tree, budget)
    assert kept == brute_force(tree, budget)
    assert kept[0] == 0 and kept == sorted(set(kept)) and len(kept) == min(budget, size)
    best = sum(math.exp(tree.score[node]) for node in kept)
    for chosen in itertools.combinations(range(1, size), min(budget, size) - 1):
        if all(tree.parent[node] in {0, *chosen} for node in chosen):
            assert sum(math.exp(tree.score[node]) for node in (0, *chosen)) <= best + 1e-12


def test_a_certain_chain_is_never_torn() -> None:
    """Edges of probability 1 tie a child with its parent; the parent must come first, whatever the indices say."""
    tree = TokenTree(0)
    node = 0
    for token in range(6):
        node = tree.add(node, token, 0.0, "small")
    tree.add(0, 9, 0.0, "small")
    assert verify_set(tree, 4) == [0, 1, 2, 7]


def test_unscored_nodes_only_fill_what_is_left() -> None:
    """Suffix nodes without a score must not push out scored ones, but may use room that would be idle."""
    tree = TokenTree(0)
    a = tree.add(0, 1, -1.0, "ngram")
    b = tree.add(a, 2, -math.inf, "ngram")
    c = tree.add(b, 3, -math.inf, "ngram")
    d = tree.add(0, 4, -9.0, "ngram")
    e = tree.add(d, 5, -math.inf, "ngram")
    assert verify_set(tree, 3) == [0, a, d]
    assert verify_set(tree, 5) == [0, a, b, d, e]  # depth first, then index
    assert verify_set(tree, 6) == [0, a, b, c, d, e]


def test_sums_in_another_order_are_still_ties() -> None:
    """log .9 + log .3 + log .9 depends on the order in its last bit; the index must decide, not the rounding."""
    x, y = math.log(0.9), math.log(0.3)
    tree = TokenTree(0)
    for edges in ((x, y, x), (y, x, x), (x, x, y)):
        node = 0
        for depth, lp in enumerate(edges):
            token = depth + 3 * edges.index(y)
            node = tree.add(node, token, lp, "small")
    leaves = [3, 6, 9]
    assert len({tree.score[leaf] for leaf in leaves}) > 1, "this machine rounds differently; choose other numbers"
    assert sorted(leaves, key=lambda node: rank_key(tree, node)) == leaves


def test_a_budget_of_one_is_plain_decoding() -> None:
    """The root alone is one step without speculation; less than that has no meaning."""
    tree = random_tree(1, 9)
    assert verify_set(tree, 1) == [0]
    assert verify_set(TokenTree(3), 64) == [0]
    with pytest.raises(ValueError, match="budget"):
        verify_set(tree, 0)


def test_scores_that_are_not_monotone_still_give_a_tree() -> None:
    """A calibrated score may rank a child above its parent; its ancestors then come with it or it is skipped."""
    tree = TokenTree(0)
    a = tree.add(0, 1, -5.0, "small")
    b = tree.add(a, 2, -1.0, "small")
    c = tree.add(0, 3, -2.0, "small")
    tree.score[b] = -0.5  # not what refresh() would give
    assert verify_set(tree, 3) == [0, a, b]
    assert verify_set(tree, 2) == [0, c]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 12), st.integers(1, 13), st.sampled_from([-0.5, -1.0, -2.0]))
def test_below_the_floor_no_row_is_spent(seed: int, size: int, budget: int, floor: float) -> None:
    """What stays is the cut of the tree of worthy nodes alone; room that is left is left empty."""
    tree = random_tree(seed, size)
    kept = verify_set(tree, budget, floor)
    worthy = [node for node in range(1, size) if tree.score[node] >= floor]
    assert set(kept) <= {0, *worthy}
    assert len(kept) == min(budget, 1 + len(worthy))
    assert all(tree.parent[node] in kept for node in kept if node)
    assert set(kept) <= set(verify_set(tree, budget))
