"""The draft tree keeps its invariants, whatever is done to it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tree.tree import TokenTree

EDGES = st.lists(
    st.tuples(st.integers(0, 10**6), st.integers(0, 4), st.sampled_from([0.0, -0.5, -1.25, -math.inf])), max_size=25
)


def grown(edges: list[tuple[int, int, float]]) -> TokenTree:
    """A tree from (parent choice, token, lp) triples; triples that would repeat a token are skipped."""
    tree = TokenTree(7)
    for choice, token, lp in edges:
        parent = choice % len(tree)
        if token not in tree.children[parent]:
            tree.add(parent, token, lp, "small")
    return tree


def test_a_new_tree_is_only_its_root() -> None:
    """If this failed, a step without drafts would verify something else than plain decoding."""
    tree = TokenTree(5)
    tree.check()
    assert (len(tree), tree.token, tree.parent, tree.creator) == (1, [5], [-1], ["target"])
    assert tree.path(0) == [] and tree.path_tokens(0) == []


def test_path_lists_nodes_top_down_without_the_root() -> None:
    """The engine emits path tokens in this order; a reversed or rooted path would scramble or repeat text."""
    tree = TokenTree(5)
    a = tree.add(0, 1, -0.5, "small")
    tree.add(0, 2, -0.5, "small")
    b = tree.add(a, 2, -0.25, "medium")
    assert tree.path(b) == [a, b] and tree.path_tokens(b) == [1, 2]
    assert tree.score[b] == -0.75 and tree.depth[b] == 2
    assert tree.creator == ["target", "small", "small", "medium"]


def test_a_token_is_one_node_under_a_parent() -> None:
    """Two nodes for one continuation would be verified twice and split its children."""
    tree = TokenTree(5)
    node = tree.add(0, 1, -0.5, "small")
    with pytest.raises(ValueError, match="already"):
        tree.add(0, 1, -0.1, "medium")
    tree.add(node, 1, -0.1, "medium")
    tree.check()


@pytest.mark.parametrize("lp", [math.nan, 0.01, math.inf])
def test_what_is_no_log_probability_is_refused(lp: float) -> None:
    """A NaN in a score makes sorting meaningless and could keep a child without its parent."""
    tree = TokenTree(5)
    with pytest.raises(ValueError, match="log-probability"):
        tree.add(0, 1, lp, "small")
    node = tree.add(0, 1, -1.0, "small")
    with pytest.raises(ValueError, match="log-probability"):
        tree.rescore(node, lp, "medium")
    with pytest.raises(ValueError, match="log-probability"):
        tree.record(node, lp, "medium")
    tree.check()


def test_rounding_above_zero_is_certainty() -> None:
    """A float32 softmax may give a probability just above 1; refusing it would fail requests for nothing."""
    tree = TokenTree(5)
    node = tree.add(0, 1, 1e-7, "small")
    assert tree.lp[node] == 0.0
    tree.rescore(node, 1e-7, "medium")
    assert tree.lp[node] == 0.0


def test_rescoring_an_edge_moves_the_scores_of_all_descendants() -> None:
    """Otherwise nodes below a rescored edge would be ranked by the old drafter's opinion of their path."""
    tree = TokenTree(5)
    a = tree.add(0, 1, -0.5, "small")
    b = tree.add(a, 2, -0.25, "small")
    tree.rescore(a, -2.0, "medium")
    tree.refresh()
    tree.check()
    assert tree.score == [0.0, -2.0, -2.25]
    assert tree.scorer[a] == "medium" and tree.creator[a] == "small" and tree.scorer[b] == "small"
    assert tree.edge_lp[a] == {"small": -0.5, "medium": -2.0}


def test_recording_leaves_the_owner_in_place() -> None:
    """A side value is for audit; it must not change a ranking."""
    tree = TokenTree(5)
    a = tree.add(0, 1, -0.5, "medium")
    tree.record(a, -3.0, "small")
    tree.refresh()
    tree.check()
    assert tree.score[a] == -0.5 and tree.edge_lp[a] == {"medium": -0.5, "small": -3.0}
    with pytest.raises(ValueError, match="side value"):
        tree.record(a, -3.0, "medium")


def test_the_root_has_no_edge() -> None:
    """Rescoring the root would scale every path of the tree."""
    tree = TokenTree(5)
    for change in (tree.rescore, tree.record):
        with pytest.raises(ValueError):
            change(0, -1.0, "medium")
    with pytest.raises(ValueError, match="no node"):
        tree.add(1, 3, -1.0, "small")


@settings(max_examples=100, deadline=None)
@given(EDGES, st.lists(st.tuples(st.integers(1, 10**6), st.sampled_from([0.0, -0.125, -3.0, -math.inf])), max_size=10))
def test_scores_are_the_sums_of_their_paths(
    edges: list[tuple[int, int, float]], changes: list[tuple[int, float]]
) -> None:
    """One pass after any rescoring must give what summing every path afresh gives."""
    tree = grown(edges)
    tree.check()
    for choice, lp in changes:
        if len(tree) > 1:
            tree.rescore(1 + choice % (len(tree) - 1), lp, "medium")
    tree.refresh()
    tree.check()
    for node in range(len(tree)):
        assert tree.score[node] == sum(tree.lp[i] for i in tree.path(node))  # exact: all values are dyadic
    once = list(tree.score)
    tree.refresh()
    assert tree.score == once


@pytest.mark.parametrize(
    ("field", "value"), [("parent", 2), ("depth", 3), ("token", 9), ("lp", math.nan), ("score", -9.0), ("scorer", "x")]
)
def test_check_notices_damage(field: str, value: object) -> None:
    """A check that lets damage pass would make every other test blind."""
    tree = TokenTree(5)
    tree.add(0, 1, -0.5, "small")
    tree.add(1, 2, -0.5, "small")
    tree.check()
    getattr(tree, field)[1] = value
    with pytest.raises((AssertionError, KeyError)):
        tree.check()
