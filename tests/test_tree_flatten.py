"""Masks, positions and parents say the same about a tree as its paths do."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tree.flatten import ancestor_mask, positions, subset_parents, visible
from tree.tree import TokenTree


def random_tree(rng: random.Random, size: int, vocab: int = 6) -> TokenTree:
    """A tree of `size` nodes with random shape and scores."""
    tree = TokenTree(0)
    while len(tree) < size:
        parent, token = rng.randrange(len(tree)), rng.randrange(vocab)
        if token not in tree.children[parent]:
            tree.add(parent, token, -rng.random(), "small")
    return tree


def random_subset(rng: random.Random, tree: TokenTree) -> list[int]:
    """A random ancestor-closed subset, ascending."""
    kept = {0}
    for node in range(1, len(tree)):
        if tree.parent[node] in kept and rng.random() < 0.7:
            kept.add(node)
    return sorted(kept)


def test_a_hand_made_tree_has_the_mask_one_would_draw() -> None:
    """Golden case: root, two children, one grandchild below the second."""
    mask = ancestor_mask([-1, 0, 0, 2])
    assert mask.dtype == torch.bool
    assert mask.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]


def test_a_chain_has_a_lower_triangular_mask() -> None:
    """A chain must look to the model like ordinary causal text."""
    assert torch.equal(ancestor_mask([-1, 0, 1, 2, 3]), torch.ones(5, 5, dtype=torch.bool).tril())


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 40))
def test_a_node_sees_its_path_and_nothing_else(seed: int, size: int) -> None:
    """One bit too many leaks a sibling into a node's context; one too few hides its history."""
    rng = random.Random(seed)
    tree = random_tree(rng, size)
    nodes = random_subset(rng, tree)
    mask = ancestor_mask(subset_parents(tree, nodes))
    assert mask.sum(dim=1).tolist() == [tree.depth[node] + 1 for node in nodes]
    for i, node in enumerate(nodes):
        assert {nodes[j] for j in mask[i].nonzero().flatten().tolist()} == {0, *tree.path(node)}
    as_int = mask.int()
    assert torch.equal((as_int @ as_int) > 0, mask), "not transitive"


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 40))
def test_visible_agrees_with_the_mask(seed: int, size: int) -> None:
    """Drafters that feed only new nodes must see exactly what one pass over the whole tree would see."""
    rng = random.Random(seed)
    tree = random_tree(rng, size)
    nodes = random_subset(rng, tree)
    mask = ancestor_mask(subset_parents(tree, nodes))
    assert torch.equal(visible(tree, nodes, nodes), mask)
    slots = rng.sample(nodes, len(nodes))  # cache rows may lie in any order, and some nodes may have none
    slots = slots[: rng.randint(1, len(slots))]
    new = rng.sample(slots, rng.randint(0, len(slots)))
    seen = visible(tree, new, slots)
    assert seen.shape == (len(new), len(slots))
    row = {node: i for i, node in enumerate(nodes)}
    for i, node in enumerate(new):
        for j, slot in enumerate(slots):
            assert bool(seen[i, j]) == bool(mask[row[node], row[slot]])


def test_positions_count_depth_from_the_prefix() -> None:
    """Siblings at different positions, or a child at its sibling's, would be rotated wrongly."""
    tree = TokenTree(0)
    a = tree.add(0, 1, -1.0, "small")
    tree.add(0, 2, -1.0, "small")
    tree.add(a, 3, -1.0, "small")
    assert positions(tree, [0, 1, 2, 3], 10) == [10, 11, 11, 12]
    assert positions(tree, [0, 1, 3], 0) == [0, 1, 2]


def test_a_subset_without_a_parent_is_refused() -> None:
    """A missing parent must never turn into a neighboring row."""
    tree = TokenTree(0)
    a = tree.add(0, 1, -1.0, "small")
    b = tree.add(a, 2, -1.0, "small")
    for bad in ([0, b], [a, b], [0, b, a], [0, a, a], []):
        with pytest.raises(AssertionError):
            subset_parents(tree, bad)
    assert subset_parents(tree, [0, a, b]) == [-1, 0, 1]
    with pytest.raises(AssertionError):
        ancestor_mask([-1, 1])
