"""The production walk: same verdicts as the reference, and never an impossible token."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.noise import TargetNoise
from models.sampling import random_exponentials, random_uniform
from tree.tree import TokenTree
from verify import VERIFIERS, Noise, Verdict
from verify.reference import choose_by, outcomes, walk_reference
from verify.walk import TargetWalk, descend, race, walk_at_once, walk_lazily

Walk = Callable[[TokenTree, Sequence[int], torch.Tensor, Noise], Verdict]
WALKS: list[Walk] = [walk_lazily, walk_at_once]


@dataclass
class Given:
    """Noise that was chosen beforehand; notes the depths it was asked for."""

    vectors: Sequence[Sequence[float]]  # by depth
    asked: list[int] = field(default_factory=list)

    def uniform(self, depth: int) -> float:
        raise AssertionError("the walk races; it uses no uniforms")

    def exponentials(self, depth: int, size: int) -> torch.Tensor:
        self.asked.append(depth)
        assert len(self.vectors[depth]) == size
        return torch.tensor(self.vectors[depth])


class Stream:
    """Wrong: a generator that every call advances."""

    def __init__(self, seed: int, position: int) -> None:
        self.generator = torch.Generator().manual_seed(seed + position)

    def uniform(self, depth: int) -> float:
        raise AssertionError("the walk races; it uses no uniforms")

    def exponentials(self, depth: int, size: int) -> torch.Tensor:
        return torch.empty(size).exponential_(generator=self.generator)


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
    noise = TargetNoise(rng.randrange(10**9), 0)
    verdict = walk_lazily(tree, nodes, rows, noise)
    assert verdict == walk_at_once(tree, nodes, rows, noise) == TargetWalk()(tree, nodes, rows, noise)
    choose = choose_by(lambda depth: noise.exponentials(depth, vocab).tolist())
    assert verdict == walk_reference(tree, nodes, rows.double().tolist(), choose)
    assert set(verdict.path) <= set(nodes) and verdict.promotions == 0
    above = [0, *verdict.path]
    assert [tree.parent[node] for node in verdict.path] == above[:-1]
    emitted = [tree.token[node] for node in verdict.path] + [verdict.extra]
    assert all(rows[nodes.index(node), token] > 0 for node, token in zip(above, emitted, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
def test_all_devices_agree() -> None:
    """A seed must mean the same text on the machine with an accelerator, as far as the target's rows are the same."""
    for seed in range(50):
        rng = random.Random(seed)
        tree = random_tree(rng, 40, 5000)
        nodes = list(range(len(tree)))
        rows = random_rows(rng, len(nodes), 5000, torch.float32)
        for node in nodes[1:]:  # most of the mass is on the children, so that walks are long
            rows[tree.parent[node], tree.token[node]] += 1.0
        noise = TargetNoise(seed, 0)
        assert TargetWalk()(tree, nodes, rows.cuda(), noise) == TargetWalk()(tree, nodes, rows, noise)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("impossible", [2.0**-33, 1.0, 22.9])
@pytest.mark.parametrize("possible", [2.0**-33, 1.0, 22.9])
def test_an_impossible_token_is_never_returned(dtype: torch.dtype, impossible: float, possible: float) -> None:
    """Top-p and grammar masks are promises; an emitted token with p = 0 breaks them, however lucky its number."""
    rows = random_rows(random.Random(7), 500, 64, dtype)
    rows[0] = torch.tensor([0.0] * 63 + [1.0])
    rows[1] = torch.tensor([1.0] + [0.0] * 63)
    rows[2] = torch.tensor([0.0, 0.3, 0.0, 0.7] + [0.0] * 60)
    rows[3] = rows[2] * 0.999  # a row need not sum to 1
    rows[4] = rows[2] * 1.001
    tokens = race(rows, torch.where(rows > 0, possible, impossible))
    assert (rows[torch.arange(500), tokens] > 0).all()
    assert tokens[:5].tolist() == [63, 0, 3, 3, 3]


def test_the_smallest_probability_counts() -> None:
    """Possible is possible: next to 5e-324 an impossible token does not win, and a normal one does."""
    row = torch.tensor([0.0, 5e-324, 0.0], dtype=torch.float64)
    assert race(row, torch.tensor([1e-10, 0.5, 1e-10])).tolist() == 1
    row[2] = 1.0
    assert race(row, torch.tensor([1e-10, 1e-10, 22.9])).tolist() == 2


@pytest.mark.parametrize("bad", [[0.0, 0.0, 0.0], [math.nan] * 3, [0.5, math.nan, 0.5], [-0.0, 0.0, -1.0]])
def test_a_row_that_is_no_distribution_has_no_winner(bad: list[float]) -> None:
    """Broken rows are our fault and must be noticed, the rows beside them notwithstanding."""
    assert race(torch.tensor([bad, [0.2, 0.3, 0.5]]), torch.ones(2, 3)).tolist() == [-1, 2]


def test_the_winner_is_the_smallest_quotient() -> None:
    """Golden races of one row, ties included: the lowest id wins them."""
    row = torch.tensor([0.5, 0.0, 0.25, 0.25])
    for exponentials, token in (
        ([1.0, 1.0, 1.0, 1.0], 0),
        ([1.0, 0.01, 0.49, 0.6], 2),
        ([1.0, 0.01, 0.51, 0.49], 3),
        ([1.0, 1.0, 0.5, 0.5], 0),
        ([1.5, 1.0, 0.5, 0.5], 2),
    ):
        assert race(row, torch.tensor(exponentials)).tolist() == token
    assert race(torch.full((3, 50001), 0.1), torch.ones(50001)).tolist() == [0, 0, 0]


def test_choices_have_the_targets_frequencies() -> None:
    """With the real numbers, over positions of one seed. Chi-square, 4 degrees of freedom: false alarm with 1e-6."""
    weights = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.04, 0.01])
    count = 40000
    vectors = torch.stack([random_exponentials(3, position, "target-race", 6) for position in range(count)])

    def statistic(tokens: torch.Tensor) -> float:
        observed, possible = torch.bincount(tokens, minlength=6), weights > 0
        assert observed[1] == 0
        expected = weights * count
        return float(((observed - expected) ** 2 / expected)[possible].sum())

    assert statistic(race(weights.expand(count, 6), vectors)) < 33.4
    assert statistic(race(weights.sqrt().expand(count, 6), vectors)) > 33.4, "the test cannot fail"


def test_rounding_errors_hardly_change_a_race() -> None:
    """Batch shapes round differently. One flip is another text for the same seed.

    Half of the mass is on the first token, the rest is a flat tail of 5000. The inverse of the cumulative sum, for
    comparison, flips far more often, because an error at the head moves all intervals of the tail.
    """
    generator = torch.Generator().manual_seed(0)
    count, vocab = 4000, 5000
    raced = inverted = 0
    for start in range(0, count, 200):
        p = torch.rand(200, vocab, generator=generator) + 0.5
        p[:, 0] *= vocab
        p /= p.sum(-1, keepdim=True)
        q = p * (1 + 1e-5 * torch.randn(200, vocab, generator=generator))
        q /= q.sum(-1, keepdim=True)
        noise = torch.stack([random_exponentials(1, start + i, "target-race", vocab) for i in range(200)])
        raced += int((race(p, noise) != race(q, noise)).sum())
        uniforms = torch.tensor([[random_uniform(1, start + i, "target")] for i in range(200)])
        of_p, of_q = (torch.searchsorted(row.double().cumsum(-1), uniforms.double()) for row in (p, q))
        inverted += int((of_p != of_q).sum())
    assert raced < 1e-3 * count
    assert inverted > 2e-3 * count, "the errors are too small for this test to say anything"


def test_a_one_hot_row_is_greedy() -> None:
    """At temperature towards 0 both rules must tell the same text, whatever the random numbers."""
    rng = random.Random(3)
    for trial in range(50):
        tree = random_tree(rng, 20, 4)
        nodes = list(range(len(tree)))
        logits = torch.rand(len(nodes), 4, generator=torch.Generator().manual_seed(rng.randrange(10**9)))
        one_hot = torch.nn.functional.one_hot(logits.argmax(-1), 4).float()
        verdict = VERIFIERS["walk"](tree, nodes, one_hot, TargetNoise(trial, 0))
        assert verdict == VERIFIERS["greedy"](tree, nodes, logits, TargetNoise(trial, 0))


def row_after(world: int, text: tuple[int, ...]) -> list[float]:
    """The toy target: a row per context, with impossible tokens."""
    rng = random.Random(f"{world} {text}")
    weights = [rng.random() if rng.random() < 0.8 else 0.0 for _ in range(3)] + [0.1 + rng.random()]
    return [w / sum(weights) for w in weights]


def decode(world: int, trees: int, noise_at: Callable[[int, int], Noise], largest: int, at_once: bool) -> list[int]:
    """8 tokens over random trees of up to `largest` nodes; `noise_at(seed, position)` is asked once per tree."""
    rng = random.Random(trees)
    text: tuple[int, ...] = ()
    while len(text) < 8:
        tree = random_tree(rng, rng.randint(1, largest), 4)
        nodes = subset(rng, tree)
        rows = torch.tensor([row_after(world, text + tuple(tree.path_tokens(node))) for node in nodes])
        verdict = WALKS[at_once](tree, nodes, rows, noise_at(world, len(text)))
        text += tuple(tree.token[node] for node in verdict.path) + (verdict.extra,)
    return list(text[:8])


@given(world=st.integers(0, 10**9), trees=st.integers(0, 10**9), at_once=st.booleans())
def test_text_is_a_function_of_the_seed_not_of_the_trees(world: int, trees: int, at_once: bool) -> None:
    """A seed must reproduce the text whatever was drafted; trees of one node are plain decoding."""
    plain = decode(world, 0, TargetNoise, 1, at_once=False)
    assert decode(world, trees, TargetNoise, 12, at_once) == plain


def test_random_numbers_from_a_stream_are_caught() -> None:
    """Negative control: numbers that are counted off as rows ask for them give another text with other trees."""
    texts = [[decode(world, 1, Stream, size, at_once=True) for size in (1, 12)] for world in range(20)]
    assert sum(plain != drafted for plain, drafted in texts) >= 5


@pytest.mark.parametrize("walk", WALKS)
def test_one_vector_is_drawn_per_depth(walk: Walk) -> None:
    """Siblings share an output position; a second vector for it would depend on the tree's shape."""
    tree = TokenTree(0)
    for token in range(3):
        tree.add(tree.add(0, token, -1.0, "small"), token, -1.0, "small")
    noise = Given([[0.1, 1.0, 1.0]] * 3)
    assert walk(tree, list(range(7)), torch.full((7, 3), 1 / 3), noise) == Verdict((1, 2), 0)
    assert noise.asked == [0, 1, 2]


def test_lazily_only_reached_rows_are_raced() -> None:
    """The vectors cost a third of a millisecond each, and most trees are deeper than what is accepted."""
    tree = TokenTree(0)
    node = 0
    for token in (1, 1, 2, 1):
        node = tree.add(node, token, -1.0, "small")
    noise = Given([[0.5, 0.1, 0.9]] * 5)
    assert walk_lazily(tree, list(range(5)), torch.full((5, 3), 1 / 3), noise) == Verdict((1, 2), 1)
    assert noise.asked == [0, 1, 2]


def test_children_outside_the_verified_subset_are_absent() -> None:
    """They have no target row; walking into one would read some other node's."""
    tree = TokenTree(0)
    a = tree.add(0, 1, -0.1, "small")
    b = tree.add(a, 2, -0.1, "small")
    assert descend(tree, [0, a, b], [1, 2, 0].__getitem__) == Verdict((a, b), 0)
    assert descend(tree, [0, a], [1, 2].__getitem__) == Verdict((a,), 2)
    assert descend(tree, [0], [1].__getitem__) == Verdict((), 1)


@pytest.mark.parametrize("walk", WALKS)
def test_an_empty_tree_still_makes_progress(walk: Walk) -> None:
    """Exactly one token, drawn from the root's row: plain decoding."""
    rows = torch.tensor([[0.25, 0.75]])
    assert walk(TokenTree(0), [0], rows, Given([[1.0, 2.9]])) == Verdict((), 1)
    assert walk(TokenTree(0), [0], rows, Given([[1.0, 3.1]])) == Verdict((), 0)


@pytest.mark.parametrize("walk", WALKS)
@pytest.mark.parametrize("bad", [0.0, math.nan])
def test_a_row_without_mass_is_an_error_only_if_it_is_reached(walk: Walk, bad: float) -> None:
    """NaN or all-zero rows are our fault and must not turn into a token; off the path they decide nothing."""
    tree = TokenTree(0)
    a = tree.add(0, 1, -0.1, "small")
    rows = torch.tensor([[0.0, 1.0], [bad, bad]])
    with pytest.raises(AssertionError, match="no probability"):
        walk(tree, [0, a], rows, Given([[1.0, 1.0]] * 2))
    rows[0] = torch.tensor([1.0, 0.0])
    assert walk(tree, [0, a], rows, Given([[1.0, 1.0]] * 2)) == Verdict((), 0)


@pytest.mark.parametrize("walk", WALKS)
@pytest.mark.parametrize("number", [0.0, -0.1, math.inf, math.nan])
def test_an_exponential_outside_its_range_is_refused(walk: Walk, number: float) -> None:
    """A generator that returns 0 would favor a token, one that returns infinity forbid it, and nobody would notice."""
    with pytest.raises(AssertionError, match="positive and finite"):
        walk(TokenTree(0), [0], torch.tensor([[0.5, 0.5]]), Given([[1.0, number]]))


def test_the_wrong_number_of_exponentials_is_refused() -> None:
    """A vector of one would be stretched over the whole vocabulary and make the choice greedy."""

    class Short(Given):
        def exponentials(self, depth: int, size: int) -> torch.Tensor:
            return torch.ones(1)

    for walk in WALKS:
        with pytest.raises(AssertionError, match="exponentials"):
            walk(TokenTree(0), [0], torch.tensor([[0.5, 0.5]]), Short([]))


def test_rows_and_nodes_must_match() -> None:
    """A row short or an extra dimension would pair nodes with strangers' rows."""
    for name in ("greedy", "walk"):
        with pytest.raises(AssertionError, match="rows"):
            VERIFIERS[name](TokenTree(0), [0], torch.rand(2, 4), TargetNoise(0, 0))
        with pytest.raises(AssertionError, match="rows"):
            VERIFIERS[name](TokenTree(0), [0], torch.rand(4), TargetNoise(0, 0))


def test_noise_belongs_to_the_output_position() -> None:
    """A tree that starts later must find the same numbers at the same positions, and no two positions share any."""
    early, late = TargetNoise(9, 4), TargetNoise(9, 6)
    assert early.uniform(2) == late.uniform(0) != early.uniform(0)
    assert torch.equal(early.exponentials(3, 50), late.exponentials(1, 50))
    assert not (early.exponentials(0, 50) == early.exponentials(1, 50)).any()
    assert not (early.exponentials(0, 50) == TargetNoise(10, 4).exponentials(0, 50)).any()


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
