"""The chain policy drafts one token after another."""

from __future__ import annotations

import math
import random

import pytest
import torch

from tree.flatten import ancestor_mask, subset_parents
from tree.growth import Answer, Candidates, Growth, Policy
from tree.policies.chain import Chain
from tree.tree import TokenTree

VOCAB = 8


def best_token(tree: TokenTree, node: int) -> int:
    """What the toy drafter says after the path to `node`."""
    return random.Random(str(tree.path_tokens(node))).randrange(VOCAB)


def grow(growth: Growth, drafters: tuple[str, ...] = ("small",)) -> int:
    """Draft until nothing is left to ask; returns the number of answers."""
    forwards = 0
    while (ask := growth.ask(drafters[forwards % len(drafters)])) is not None:
        (node,) = ask.nodes
        token = best_token(growth.tree, node)
        answer = Answer({node: Candidates((token,), (-0.5,))}, {})
        growth.attach(drafters[forwards % len(drafters)], answer)
        growth.tree.check()
        forwards += 1
    return forwards


@pytest.mark.parametrize("length", [0, 1, 4, 9])
def test_a_chain_of_n_takes_n_forwards(length: int) -> None:
    """More forwards would be paid for nothing; another shape would not be a chain."""
    policy: Policy = Chain(length)
    growth = policy.begin(0, vocab_size=VOCAB)
    assert grow(growth) == length
    nodes = growth.verify_nodes()
    assert len(growth.tree) == length + 1 == policy.budget and nodes == list(range(length + 1))
    mask = ancestor_mask(subset_parents(growth.tree, nodes))
    assert torch.equal(mask, torch.ones_like(mask).tril())
    expected = TokenTree(0)
    for _ in range(length):
        last = len(expected) - 1
        expected.add(last, best_token(expected, last), -0.5, "small")
    assert growth.tree.token == expected.token


def test_limits_end_the_chain() -> None:
    """Tokens after an end token or past the context end would be drafted and verified in vain."""
    assert grow(Chain(4).begin(0, max_depth=2, vocab_size=VOCAB)) == 2
    assert Chain(4).begin(0, max_depth=0, vocab_size=VOCAB).ask("small") is None
    tree = TokenTree(0)
    first = best_token(tree, 0)
    assert grow(Chain(4).begin(0, stop_tokens=frozenset({first}), vocab_size=VOCAB)) == 1
    assert grow(Chain(4).begin(0, stop_tokens=frozenset({0}) - {first}, vocab_size=VOCAB)) >= 1  # the root goes on


@pytest.mark.parametrize(
    "candidates",
    [Candidates(), Candidates((3,), (-math.inf,)), Candidates((VOCAB,), (-0.1,)), None],
    ids=["empty", "impossible", "foreign", "missing"],
)
def test_a_drafter_without_a_token_ends_the_chain(candidates: Candidates | None) -> None:
    """Otherwise the engine would ask the same question for ever, or verify a token that the target does not have."""
    growth = Chain(4).begin(0, vocab_size=VOCAB)
    assert growth.ask("small") is not None
    growth.attach("small", Answer({} if candidates is None else {0: candidates}, {}))
    assert growth.ask("small") is None and growth.verify_nodes() == [0]


def test_grafts_count_where_two_drafters_meet() -> None:
    """The count is the evidence that drafters really share a tree; the root belongs to neither."""
    growth = Chain(4).begin(0, vocab_size=VOCAB)
    grow(growth, ("small", "medium"))
    assert growth.tree.creator[1:] == ["small", "medium", "small", "medium"] and growth.num_grafts == 3
    alone = Chain(4).begin(0, vocab_size=VOCAB)
    grow(alone)
    assert alone.num_grafts == 0


def test_a_budget_cuts_the_length() -> None:
    """A loaded server hands out smaller budgets; drafting past them would be thrown away."""
    assert Chain(4).with_budget(3).budget == 3 and Chain(4).with_budget(1).budget == 1
    assert Chain(4).with_budget(64) == Chain(4)
    assert Chain(4).with_budget(1).begin(0, vocab_size=VOCAB).ask("small") is None
    with pytest.raises(ValueError, match="budget"):
        Chain(4).with_budget(0)
    with pytest.raises(ValueError, match="length"):
        Chain(-1)
