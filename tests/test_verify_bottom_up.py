"""Block and Traversal Verification: closed forms, golden vectors, and why bottom-up is better and not wrong."""

from __future__ import annotations

import itertools
import math

import pytest

from tests.verify_world import (
    RULES,
    SHAPES,
    World,
    by_node,
    context_of,
    drawn,
    emitted_law,
    mean_accepted,
    own_proposals,
    paths,
    world,
    worlds,
)
from tree.draws import TreeKind
from verify.reference import Chosen, block_reference, outcomes, traversal_reference


def constant(row: list[float], length: int) -> World:
    """The same row after every context."""
    return {path: row for size in range(length + 1) for path in itertools.product(range(len(row)), repeat=size)}


def weights(p: World, q: World, text: tuple[int, ...]) -> list[float]:
    """w_0 .. w_L of a chain."""
    found = [1.0]
    for i, token in enumerate(text):
        found.append(min(1.0, found[-1] * p[text[:i]][token] / q[text[:i]][token]))
    return found


@pytest.mark.parametrize(("length", "block", "naive"), [(1, 6 / 9, 6 / 9), (2, 11 / 9, 10 / 9), (3, 15 / 9, 12.6667 / 9)])
def test_golden_lengths(length: int, block: float, naive: float) -> None:
    """Binary, p = (1/3, 2/3), q = (2/3, 1/3), the example of 2403.10444."""
    p, q = constant([1 / 3, 2 / 3], length), constant([2 / 3, 1 / 3], length)
    chains = drawn(paths(1, 0, length, TreeKind.IID), q)
    assert mean_accepted(emitted_law(block_reference, chains, p)) == pytest.approx(block, abs=1e-12)
    assert mean_accepted(emitted_law(traversal_reference, chains, p)) == pytest.approx(block, abs=1e-12)
    assert mean_accepted(emitted_law(RULES["naive"], chains, p)) == pytest.approx(naive, abs=5e-6)


@pytest.mark.parametrize("name", worlds())
def test_block_is_traversal_on_chains_and_never_less_than_naive(name: str) -> None:
    """The same law of text and length, and E[tau] is the sum of the weights' means."""
    p, q = worlds()[name]
    chains = drawn(SHAPES["chain"], q)
    laws = {rule: emitted_law(RULES[rule], chains, p) for rule in ("block", "traversal", "naive")}
    for text in laws["block"].keys() | laws["traversal"].keys():
        assert laws["block"].get(text, 0.0) == pytest.approx(laws["traversal"].get(text, 0.0), abs=1e-12)
    closed = math.fsum(chance * sum(weights(p, q, tuple(tree.token[1:]))[1:]) for chance, tree in chains)
    assert mean_accepted(laws["block"]) == pytest.approx(closed, abs=1e-11)
    assert mean_accepted(laws["block"]) >= mean_accepted(laws["naive"]) - 1e-12


def test_block_is_better_somewhere() -> None:
    """The relation above would hold for a rule that is Naive in disguise."""
    p, q = worlds()["ordinary"]
    chains = drawn(SHAPES["chain"], q)
    gain = mean_accepted(emitted_law(block_reference, chains, p)) - mean_accepted(emitted_law(RULES["naive"], chains, p))
    assert gain > 1e-3


def test_a_chain_is_kept_to_i_with_probability_w_i() -> None:
    """Given x_1..x_i and averaged over what is drawn after them; the identity the rule is built on."""
    p, q = worlds()["other"]
    reached: dict[tuple[int, ...], float] = {}
    for chance, tree in drawn(SHAPES["chain"], q):
        text = tuple(tree.token[1:])
        given = (tree, by_node(tree, p), own_proposals(tree))
        for probability, verdict in outcomes(lambda choose, given=given: block_reference(*given, Chosen(choose))):
            for i in range(1, len(verdict.path) + 1):
                reached[text[:i]] = reached.get(text[:i], 0.0) + chance * probability
    for text, probability in reached.items():
        drawn_so_far = math.prod(q[text[:i]][token] for i, token in enumerate(text))
        assert probability == pytest.approx(drawn_so_far * weights(p, q, text)[-1], abs=1e-13)


@pytest.mark.parametrize("shape", ["2 paths", "delayed (3,1,1)", "distinct 2 x 2", "distinct 3"])
def test_the_final_node_lies_below_a_node_as_often_as_its_weight_says(shape: str) -> None:
    """At every node that becomes current, averaged over what is drawn below it; for first children and for later ones."""
    p, q = worlds()["ordinary"]
    below: dict[tuple[tuple[int, ...], int], float] = {}
    seen: dict[tuple[int, ...], float] = {}
    for chance, tree in drawn(SHAPES[shape], q):
        children = tuple(dict.fromkeys(tree.draws[0]))
        key = tuple(tree.draws[0])
        seen[key] = seen.get(key, 0.0) + chance
        given = (tree, by_node(tree, p), own_proposals(tree))
        for probability, verdict in outcomes(lambda choose, given=given: traversal_reference(*given, Chosen(choose))):
            if verdict.path:
                index = children.index(tree.token[verdict.path[0]])
                below[key, index] = below.get((key, index), 0.0) + chance * probability
    for key, chance in seen.items():
        reduced_p, reduced_q, refused = list(p[()]), list(q[()]), 1.0
        for index, token in enumerate(dict.fromkeys(key)):
            weight = min(1.0, reduced_p[token] / reduced_q[token])
            assert below.get((key, index), 0.0) == pytest.approx(chance * refused * weight, abs=1e-13)
            refused *= 1 - weight
            left = [max(a - b, 0.0) for a, b in zip(reduced_p, reduced_q, strict=True)]
            reduced_q[token] = 0.0
            reduced_p = [a / sum(left) for a in left] if sum(left) > 0 else reduced_p
            reduced_q = [b / sum(reduced_q) for b in reduced_q] if sum(reduced_q) > 0 else reduced_q


def test_traversal_keeps_more_of_a_tree_than_rules_from_the_root() -> None:
    """What the extra work buys, on the average of several worlds; it is no theorem for each."""
    totals: dict[str, float] = {}
    for seed in range(6):
        p, q = world(f"target {seed}"), world(f"drafter {seed}")
        trees = drawn(SHAPES["2 paths"], q)
        for rule in ("traversal", "naive", "specinfer"):
            totals[rule] = totals.get(rule, 0.0) + mean_accepted(emitted_law(RULES[rule], trees, p))
    assert totals["traversal"] > max(totals["naive"], totals["specinfer"])


def test_only_ratios_of_one_context_matter_at_a_chain_of_one() -> None:
    """One drafted token leaves nothing to judge as a whole: all rules are the classic test."""
    p, q = worlds()["ordinary"]
    chains = drawn(paths(1, 0, 1, TreeKind.IID), q)
    expected = emitted_law(RULES["naive"], chains, p)
    for rule in ("block", "traversal", "specinfer", "spectr", "khisti"):
        law = emitted_law(RULES[rule], chains, p)
        assert all(law.get(text, 0.0) == pytest.approx(chance, abs=1e-13) for text, chance in expected.items())
    assert all(context_of(tree, 1) == (tree.token[1],) for _, tree in chains)
