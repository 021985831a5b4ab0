"""Greedy matching tells exactly the text of plain greedy decoding."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tree.tree import TokenTree
from verify import VERIFIERS, Noise, Verdict
from verify.reference import greedy_reference

Text = tuple[int, ...]
VOCAB = 5


class NoNoise:
    """Fails when asked: nothing random decides at temperature 0."""

    def uniform(self, depth: int) -> float:
        raise AssertionError("greedy matching asked for a random number")

    def exponentials(self, depth: int, size: int) -> torch.Tensor:
        raise AssertionError("greedy matching asked for random numbers")


NO_NOISE: Noise = NoNoise()


def logits(seed: int, text: Text) -> list[float]:
    """The toy target: a row per context from few values, so that ties happen all the time."""
    rng = random.Random(f"{seed} {text[-3:]} {len(text) % 7}")
    return [rng.choice([-1.5, 0.0, 0.25, 2.0]) for _ in range(VOCAB)]


def best(row: Sequence[float]) -> int:
    """The lowest id among the largest values."""
    return min(t for t in range(len(row)) if row[t] == max(row))


def drafted(rng: random.Random, seed: int, text: Text) -> TokenTree:
    """A random tree; part of the time it contains the true continuation for a while."""
    tree = TokenTree(text[-1])
    node = 0
    for _ in range(rng.randrange(6)):
        token = best(logits(seed, text + tuple(tree.path_tokens(node))))
        node = tree.add(node, token, -0.1, "medium")
    for _ in range(rng.randrange(12)):
        parent, token = rng.randrange(len(tree)), rng.randrange(VOCAB)
        if token not in tree.children[parent]:
            tree.add(parent, token, -1.0, "small")
    return tree


def decode(rule: Callable[..., Verdict], seed: int, length: int) -> tuple[Text, int, int]:
    """Text of `length` tokens after a one-token prompt; also the trees verified and the tokens accepted."""
    rng = random.Random(f"trees {seed}")
    text: Text = (0,)
    trees = accepted = 0
    while len(text) < 1 + length:
        tree = drafted(rng, seed, text)
        nodes = list(range(len(tree)))
        rows = torch.tensor([logits(seed, text + tuple(tree.path_tokens(node))) for node in nodes])
        verdict = rule(tree, nodes, rows, NO_NOISE)
        text += tuple(tree.token[node] for node in verdict.path) + (verdict.extra,)
        trees, accepted = trees + 1, accepted + len(verdict.path)
    return text[: 1 + length], trees, accepted


def plain(seed: int, length: int) -> Text:
    """The same by one token at a time."""
    text: Text = (0,)
    while len(text) < 1 + length:
        text += (best(logits(seed, text)),)
    return text


def test_output_equals_plain_greedy_decoding() -> None:
    """The promise at temperature 0, over thousands of random trees and with exact ties in most rows."""
    trees = accepted = 0
    for seed in range(300):
        text, more, kept = decode(VERIFIERS["greedy"], seed, 40)
        assert text == plain(seed, 40)
        trees, accepted = trees + more, accepted + kept
    assert trees > 3000 and accepted > 3000, "too few trees, or trees that never helped"


def test_accepting_a_likely_sibling_is_caught() -> None:
    """Negative control: a rule that takes the best child present, argmax or not, must change the text."""

    def best_child(tree: TokenTree, nodes: Sequence[int], rows: torch.Tensor, noise: object) -> Verdict:
        path: list[int] = []
        node = 0
        while tree.children[node]:
            token = max(tree.children[node], key=lambda t: float(rows[node, t]))
            node = tree.children[node][token]
            path.append(node)
        return Verdict(tuple(path), int(rows[node].argmax()))

    assert all(decode(best_child, seed, 40)[0] != plain(seed, 40) for seed in range(10))


def test_taking_the_extra_token_from_the_parents_row_is_caught() -> None:
    """Negative control: the row of the last accepted node's parent repeats words instead of going on."""

    def stale(tree: TokenTree, nodes: Sequence[int], rows: torch.Tensor, noise: object) -> Verdict:
        verdict = VERIFIERS["greedy"](tree, nodes, rows, NO_NOISE)
        if not verdict.path:
            return verdict
        return Verdict(verdict.path, int(rows[tree.parent[verdict.path[-1]]].argmax()))

    assert all(decode(stale, seed, 40)[0] != plain(seed, 40) for seed in range(10))


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10**9), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_production_and_reference_agree(seed: int, dtype: torch.dtype) -> None:
    """Also on subsets of the tree, where children that are not verified count as absent."""
    rng = random.Random(seed)
    tree = drafted(rng, seed, (rng.randrange(VOCAB),))
    kept = {0}
    for node in range(1, len(tree)):
        if tree.parent[node] in kept and rng.random() < 0.8:
            kept.add(node)
    nodes = sorted(kept)
    rows = torch.tensor([logits(seed, tuple(tree.path_tokens(node))) for node in nodes], dtype=dtype)
    verdict = VERIFIERS["greedy"](tree, nodes, rows, NO_NOISE)
    assert verdict == greedy_reference(tree, nodes, rows.tolist())


@pytest.mark.parametrize("vocab", [2, 33, 4097, 50001])
def test_ties_go_to_the_lowest_id(vocab: int) -> None:
    """Plain decoding takes the lowest id; another choice in long, vectorized rows would change the text."""
    rows = torch.zeros(3, vocab)
    rows[1, vocab // 2 :] = 1.0
    rows[2, [vocab - 1, 1]] = 3.0
    tree = TokenTree(0)
    a = tree.add(0, 0, -1.0, "small")
    b = tree.add(a, vocab // 2, -1.0, "small")
    assert VERIFIERS["greedy"](tree, [0, a, b], rows, NO_NOISE) == Verdict((a, b), 1)


def test_an_empty_tree_still_makes_progress() -> None:
    """The root's row alone is plain decoding, masked tokens included."""
    rows = torch.tensor([[-float("inf"), 0.5, 0.25]])
    assert VERIFIERS["greedy"](TokenTree(0), [0], rows, NO_NOISE) == Verdict((), 1)
