"""The production walk: same verdicts as the reference, and never an impossible token."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tree.tree import TokenTree
from verify import VERIFIERS, Verdict
from verify.reference import choose_by, outcomes, walk_reference
from verify.walk import TargetWalk, descend, inverse_cdf

ALMOST_ONE = math.nextafter(1.0, 0.0)


def random_tree(rng: random.Random, size: int, vocab: int) -> TokenTree:
    """A tree of at most `size` nodes."""
    tree = TokenTree(0)
    for _ in range(3 * size):
        parent, token = rng.randrange(len(tree)), rng.randrange(vocab)
        if len(tree) < size and token not in tree.children[parent]:
            tree.add(parent, token, -rng.random(), "small")
    return tree


def random_rows(rng: random.Random, count: int, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    """Probability rows with zeros, of which float32 ones do not sum to exactly 1."""
    generator = torch.Generator().manual_seed(rng.randrange(10**9))
    rows = torch.rand(count, vocab, generator=generator, dtype=torch.float64).pow(3)
    rows[torch.rand(count, vocab, generator=generator) < 0.4] = 0.0
    rows[torch.arange(count), torch.randint(vocab, (count,), generator=generator)] = 0.5
    return (rows / rows.sum(-1, keepdim=True)).to(dtype)


def subset(rng: random.Random, tree: TokenTree) -> list[int]:
    """A random ancestor-closed subset."""
    kept = {0}
    for node in range(1, len(tree)):
        if tree.parent[node] in kept and rng.random() < 0.8:
            kept.add(node)
    return sorted(kept)


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 10**9), dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_production_and_reference_agree_element_by_element(seed: int, dtype: torch.dtype) -> None:
    """The reference is what the exactness proofs are about; a production rule that differs is unproven."""
    rng = random.Random(seed)
    vocab = rng.randint(2, 9)
    tree = random_tree(rng, rng.randint(1, 30), vocab)
    nodes = subset(rng, tree)
    rows = random_rows(rng, len(nodes), vocab, dtype)
    uniforms = [rng.choice([rng.random(), rng.random(), 0.0, ALMOST_ONE]) for _ in range(40)]
    verdict = TargetWalk()(tree, nodes, rows, uniforms.__getitem__)
    assert verdict == walk_reference(tree, nodes, rows.double().tolist(), choose_by(uniforms.__getitem__))
    assert set(verdict.path) <= set(nodes) and verdict.promotions == 0
    above = [0, *verdict.path]
    assert [tree.parent[node] for node in verdict.path] == above[:-1]
    emitted = [tree.token[node] for node in verdict.path] + [verdict.extra]
    assert all(rows[nodes.index(node), token] > 0 for node, token in zip(above, emitted, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("uniform", [0.0, 5e-324, 1e-17, 0.5, 1 - 2**-24, 1 - 2**-30, ALMOST_ONE])
def test_an_impossible_token_is_never_returned(dtype: torch.dtype, uniform: float) -> None:
    """Top-p and grammar masks are promises; an emitted token with p = 0 breaks them at the edges of [0, 1)."""
    rows = random_rows(random.Random(7), 500, 64, dtype)
    rows[0] = torch.tensor([0.0] * 63 + [1.0])
    rows[1] = torch.tensor([1.0] + [0.0] * 63)
    rows[2] = torch.tensor([0.0, 0.3, 0.0, 0.7] + [0.0] * 60)
    rows[3] = rows[2] * 0.999  # a row need not sum to 1
    rows[4] = rows[2] * 1.001
    tokens = inverse_cdf(rows, torch.full((500,), uniform, dtype=torch.float64))
    assert (rows[torch.arange(500), tokens] > 0).all()
    assert tokens[:2].tolist() == [63, 0]
    expected = 1 if uniform < 0.3 else 3
    assert tokens[2:5].tolist() == [expected] * 3


def test_the_smallest_probability_counts() -> None:
    """Possible is possible: uniform 0 belongs to the first token with p > 0, however small."""
    rows = torch.tensor([[0.0, 5e-324, 0.0, 1.0, 0.0]], dtype=torch.float64)
    for uniform, token in ((0.0, 1), (ALMOST_ONE, 3)):
        assert inverse_cdf(rows, torch.tensor([uniform], dtype=torch.float64)).tolist() == [token]


def test_a_lifted_sum_at_an_impossible_token_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parallel scan need not be monotone in its last bits; the noise must not make an impossible token possible."""
    rows = torch.tensor([[0.25, 0.0, 0.75]], dtype=torch.float64)
    sums = torch.tensor([[0.25, 0.25 + 1e-12, 1.0]], dtype=torch.float64)
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda self, dim: sums)
    assert inverse_cdf(rows, torch.tensor([0.25 + 1e-13], dtype=torch.float64)).tolist() == [2]


def test_the_inverse_follows_the_probabilities() -> None:
    """Golden cells of the inverse: [0, .5) -> 0, [.5, .75) -> 2, [.75, 1) -> 3."""
    row = torch.tensor([[0.5, 0.0, 0.25, 0.25]])
    for uniform, token in ((0.0, 0), (0.4999, 0), (0.5, 2), (0.7499, 2), (0.75, 3), (0.9999, 3)):
        assert inverse_cdf(row, torch.tensor([uniform], dtype=torch.float64)).tolist() == [token]


def test_a_one_hot_row_is_greedy() -> None:
    """At temperature towards 0 both rules must tell the same text, whatever the uniforms."""
    rng = random.Random(3)
    for _ in range(50):
        tree = random_tree(rng, 20, 4)
        nodes = list(range(len(tree)))
        logits = torch.rand(len(nodes), 4, generator=torch.Generator().manual_seed(rng.randrange(10**9)))
        one_hot = torch.nn.functional.one_hot(logits.argmax(-1), 4).float()
        verdict = VERIFIERS["walk"](tree, nodes, one_hot, lambda depth: rng.random() if depth else ALMOST_ONE)
        assert verdict == VERIFIERS["greedy"](tree, nodes, logits, lambda depth: 0.0)


def test_text_is_a_function_of_the_uniforms_not_of_the_tree() -> None:
    """A seed must reproduce the text whatever was drafted: same rows, same uniforms, other tree, same tokens."""
    rng = random.Random(11)

    def p(path: tuple[int, ...]) -> list[float]:
        row = random.Random(str(path))
        weights = [row.random() for _ in range(4)]
        return [w / sum(weights) for w in weights]

    for trial in range(100):
        uniforms = [random.Random(f"{trial} {position}").random() for position in range(20)]
        plain: tuple[int, ...] = ()
        while len(plain) < 6:
            plain += (choose_by(uniforms[len(plain) :].__getitem__)(0, p(plain)),)
        text: tuple[int, ...] = ()
        while len(text) < 6:
            tree = random_tree(rng, 12, 4)
            nodes = list(range(len(tree)))
            rows = torch.tensor([p(text + tuple(tree.path_tokens(node))) for node in nodes], dtype=torch.float64)
            verdict = TargetWalk()(tree, nodes, rows, uniforms[len(text) :].__getitem__)
            text += tuple(tree.token[node] for node in verdict.path) + (verdict.extra,)
        assert text[:6] == plain


def test_one_uniform_is_drawn_per_depth() -> None:
    """Siblings share an output position; a second uniform for it would depend on the tree's shape."""
    tree = TokenTree(0)
    for token in range(3):
        tree.add(tree.add(0, token, -1.0, "small"), token, -1.0, "small")
    asked: list[int] = []
    rows = torch.full((7, 3), 1 / 3)
    TargetWalk()(tree, list(range(7)), rows, lambda depth: asked.append(depth) or 0.1)  # type: ignore[func-returns-value]
    assert sorted(asked) == [0, 1, 2]


def test_children_outside_the_verified_subset_are_absent() -> None:
    """They have no target row; walking into one would read some other node's."""
    tree = TokenTree(0)
    a = tree.add(0, 1, -0.1, "small")
    b = tree.add(a, 2, -0.1, "small")
    assert descend(tree, [0, a, b], [1, 2, 0]) == Verdict((a, b), 0)
    assert descend(tree, [0, a], [1, 2]) == Verdict((a,), 2)
    assert descend(tree, [0], [1]) == Verdict((), 1)


def test_an_empty_tree_still_makes_progress() -> None:
    """Exactly one token, drawn from the root's row: plain decoding."""
    rows = torch.tensor([[0.25, 0.75]])
    assert TargetWalk()(TokenTree(0), [0], rows, lambda depth: 0.3) == Verdict((), 1)
    assert TargetWalk()(TokenTree(0), [0], rows, lambda depth: 0.2) == Verdict((), 0)


def test_a_row_without_mass_is_an_error_only_if_it_is_reached() -> None:
    """NaN or all-zero rows are our fault and must not turn into a token; off the path they decide nothing."""
    tree = TokenTree(0)
    a = tree.add(0, 1, -0.1, "small")
    for bad in (0.0, math.nan):
        rows = torch.tensor([[0.0, 1.0], [bad, bad]])
        with pytest.raises(AssertionError, match="no probability"):
            TargetWalk()(tree, [0, a], rows, lambda depth: 0.5)
        rows[0] = torch.tensor([1.0, 0.0])
        assert TargetWalk()(tree, [0, a], rows, lambda depth: 0.5) == Verdict((), 0)


@pytest.mark.parametrize("uniform", [1.0, -0.1, math.nan])
def test_a_uniform_outside_its_range_is_refused(uniform: float) -> None:
    """A generator that returns 1.0 would favor the last token for ever without anyone noticing."""
    with pytest.raises(AssertionError, match="uniforms"):
        TargetWalk()(TokenTree(0), [0], torch.tensor([[0.5, 0.5]]), lambda depth: uniform)


def test_rows_and_nodes_must_match() -> None:
    """A row short or an extra dimension would pair nodes with strangers' rows."""
    for name in ("greedy", "walk"):
        with pytest.raises(AssertionError, match="rows"):
            VERIFIERS[name](TokenTree(0), [0], torch.rand(2, 4), lambda depth: 0.5)
        with pytest.raises(AssertionError, match="rows"):
            VERIFIERS[name](TokenTree(0), [0], torch.rand(4), lambda depth: 0.5)


def test_every_registered_rule_is_lossless_and_named() -> None:
    """Names come from requests and configuration; lossy rules must never slip into this table unmarked."""
    assert set(VERIFIERS) == {"greedy", "walk"}
    assert all(rule.name == name and rule.lossless for name, rule in VERIFIERS.items())


def test_outcomes_cover_all_decisions_once() -> None:
    """The enumerator itself: two draws from (.5, .3, .2) are nine outcomes with the product law; zeros never occur."""
    law = {pair: probability for probability, pair in outcomes(lambda c: (c(0, [5, 3, 2]), c(1, [0.5, 0.3, 0.2])))}
    assert len(law) == 9 and sum(law.values()) == pytest.approx(1.0)
    assert law[1, 2] == pytest.approx(0.06)
    assert [outcome for _, outcome in outcomes(lambda c: c(0, [0.0, 1.0, 0.0]))] == [1]
