"""The lossy rules do what their definitions say, are marked as lossy, and are greedy decoding at their strict ends."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.noise import TargetNoise
from tree.draws import TreeKind
from tree.tree import TokenTree
from verify import EVERY_VERIFIER, LOSSY_VERIFIERS, RATIO_VERIFIERS, VERIFIERS, Verdict, check_pair
from verify.fly import Fly, best_entropy
from verify.greedy import Greedy
from verify.margin import Margin

NOISE = TargetNoise(0, 0)


def random_case(seed: int, vocab: int = 5, size: int = 15) -> tuple[TokenTree, list[int], torch.Tensor]:
    """A random tree, an ancestor-closed part of it, and logits that favor its children."""
    rng = random.Random(seed)
    tree = TokenTree(0)
    for _ in range(3 * size):
        parent, token = rng.randrange(len(tree)), rng.randrange(vocab)
        if len(tree) < size and token not in tree.children[parent]:
            tree.add(parent, token, -1.0, "small")
    kept = {0}
    for node in range(1, len(tree)):
        if tree.parent[node] in kept and rng.random() < 0.9:
            kept.add(node)
    logits = torch.randn(len(kept), vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return tree, sorted(kept), logits


def chain(tokens: list[int]) -> TokenTree:
    tree = TokenTree(0)
    for node, token in enumerate(tokens):
        tree.add(node, token, -1.0, "small")
    return tree


def test_lossy_rules_are_kept_apart() -> None:
    """A client that asks for any lossless rule must never be served by one of these."""
    assert set(LOSSY_VERIFIERS) == {"margin", "fly"}
    assert not any(rule.lossless for rule in LOSSY_VERIFIERS.values())
    assert all(rule.lossless for rule in (*VERIFIERS.values(), *RATIO_VERIFIERS.values()))
    assert len(EVERY_VERIFIER) == len(VERIFIERS) + len(RATIO_VERIFIERS) + len(LOSSY_VERIFIERS)
    assert all(rule.name == name for name, rule in EVERY_VERIFIER.items())
    assert all(rule.reads_logits for rule in LOSSY_VERIFIERS.values())
    for kind in TreeKind:
        check_pair(LOSSY_VERIFIERS["margin"], kind)


# ------------------------------------------------------------------------------------------------------------------ margin


@given(seed=st.integers(0, 10**9))
def test_strict_margins_are_greedy_decoding(seed: int) -> None:
    """A margin above 1 forgives nothing, and no promotion allowed is no promotion."""
    tree, nodes, logits = random_case(seed)
    greedy = Greedy()(tree, nodes, logits, NOISE)
    assert Margin(kappa=1.001)(tree, nodes, logits, NOISE) == greedy
    assert Margin(kappa=0.0, max_promotions=0)(tree, nodes, logits, NOISE) == greedy


@given(seed=st.integers(0, 10**9))
def test_accepted_length_falls_with_kappa(seed: int) -> None:
    """For fixed rows a stricter margin never accepts more; at 0 the walk ends at a leaf."""
    tree, nodes, logits = random_case(seed)
    lengths = []
    for kappa in (0.0, 0.05, 0.2, 0.5, 0.9, 1.0, 1.5):
        verdict = Margin(kappa)(tree, nodes, logits, NOISE)
        lengths.append(len(verdict.path))
        assert verdict.promotions == promoted(tree, nodes, logits, verdict, kappa)
    assert lengths == sorted(lengths, reverse=True)
    last = Margin(0.0)(tree, nodes, logits, NOISE).path
    assert not any(child in nodes for child in tree.children[last[-1] if last else 0].values())


def promoted(tree: TokenTree, nodes: list[int], logits: torch.Tensor, verdict: Verdict, kappa: float) -> int:
    """Counts the promotions of a path, and asserts that each costs at most -log kappa nats."""
    count = 0
    for node in verdict.path:
        row = logits[nodes.index(tree.parent[node])]
        if row.argmax() != tree.token[node]:
            count += 1
            regret = (row.max() - row[tree.token[node]]).item()
            assert kappa == 0.0 or regret <= -math.log(kappa) + 1e-12
    return count


def test_the_best_child_is_promoted_and_promotions_are_counted() -> None:
    """Golden: p = (.5, .3, .2) at every node, children 1 and 2; then a single promotion allowed."""
    tree = TokenTree(0)
    a = tree.add(0, 2, -1.0, "small")
    b = tree.add(0, 1, -1.0, "small")
    c = tree.add(b, 1, -1.0, "small")
    logits = torch.tensor([[0.5, 0.3, 0.2]] * 4).log()
    nodes = [0, a, b, c]
    assert Margin(0.59)(tree, nodes, logits, NOISE) == Verdict((b, c), 0, promoted=(b, c))
    assert Margin(0.61)(tree, nodes, logits, NOISE) == Verdict((), 0)
    assert Margin(0.59, max_promotions=1)(tree, nodes, logits, NOISE) == Verdict((b,), 0, promoted=(b,))
    assert Margin(0.59)(tree, [0, a], logits[:2], NOISE) == Verdict((), 0), "an unverified child was promoted"


def test_an_impossible_token_is_not_promoted() -> None:
    """A masked token (grammar, bad words) must not be written however lenient the margin."""
    tree = chain([1])
    logits = torch.tensor([[0.0, -math.inf], [0.0, 0.0]])
    assert Margin(0.0)(tree, [0, 1], logits, NOISE) == Verdict((), 0)


@pytest.mark.parametrize(
    "build", [lambda: Margin(-0.1), lambda: Margin(math.nan), lambda: Margin(0.2, -1), lambda: Fly(window=-1)]
)
def test_parameters_are_checked(build: Callable[[], object]) -> None:
    """A NaN margin would compare false and silently be strict."""
    with pytest.raises(ValueError, match="must be at least 0"):
        build()


# --------------------------------------------------------------------------------------------------------------------- fly


def pattern(matches: str, entropy: str = "high") -> tuple[TokenTree, torch.Tensor]:
    """A chain of tokens 1 and rows in which the best token is 1 where the pattern says so, else 0."""
    tree = chain([1] * len(matches))
    runner_up = {"high": -0.1, "low": -20.0}[entropy]
    rows = [[runner_up, 0.0, runner_up] if match == "1" else [0.0, runner_up, runner_up] for match in matches]
    return tree, torch.tensor([*rows, [0.0, -20.0, -20.0]])


@pytest.mark.parametrize(
    ("matches", "window", "kept", "promotions"),
    [
        ("1111", 5, 4, 0),
        ("11101110", 5, 3, 0),  # the window meets another mismatch
        ("1110111110", 5, 9, 1),  # the mismatch at 4 is forgiven, the one at 10 is too close to the end
        ("111011111", 5, 9, 1),
        ("11101111", 5, 3, 0),  # only four follow
        ("11101111", 4, 8, 1),
        ("01", 1, 2, 1),
        ("0", 0, 1, 1),
        ("0", 1, 0, 0),
        ("1011111011111", 5, 13, 2),  # each judged alone, on the original matches
        ("", 5, 0, 0),
    ],
)
def test_golden_windows(matches: str, window: int, kept: int, promotions: int) -> None:
    """Match patterns and where the chain is cut."""
    tree, logits = pattern(matches)
    nodes = list(range(len(tree)))
    best = logits.argmax(-1).tolist()
    verdict = Fly(window=window)(tree, nodes, logits, NOISE)
    against = tuple(node for node in nodes[1 : kept + 1] if matches[node - 1] == "0")
    assert verdict == Verdict(tuple(nodes[1 : kept + 1]), best[kept], against)
    assert verdict.promotions == promotions


@pytest.mark.parametrize("matches", ["1110111110", "0111111", "101111101"])
def test_a_decided_target_is_not_overruled(matches: str) -> None:
    """Low entropy at the mismatch, or a threshold of infinity: greedy decoding."""
    for entropy, threshold in (("low", 0.3), ("high", math.inf)):
        tree, logits = pattern(matches, entropy)
        nodes = list(range(len(tree)))
        assert Fly(min_entropy=threshold)(tree, nodes, logits, NOISE) == Greedy()(tree, nodes, logits, NOISE)


def test_entropy_is_that_of_the_three_best_without_normalizing() -> None:
    """Golden: (.4, .3, .2, .1) gives the first three terms in nats; an impossible token adds nothing."""
    expected = -sum(p * math.log(p) for p in (0.4, 0.3, 0.2))
    rows = torch.tensor([[0.1, 0.4, 0.2, 0.3], [1.0, 0.0, 0.0, 0.0]]).log()
    assert best_entropy(rows) == pytest.approx([expected, 0.0], abs=1e-7)
    assert best_entropy(torch.zeros(1, 2)) == pytest.approx([math.log(2)])


def test_a_tree_that_branches_is_refused() -> None:
    """The window is defined on chains; on a tree it would read some sibling as what follows."""
    tree = chain([1, 1])
    tree.add(0, 2, -1.0, "small")
    with pytest.raises(ValueError, match="chains only"):
        Fly()(tree, [0, 1, 2, 3], torch.zeros(4, 3), NOISE)
    assert Fly()(tree, [0, 1, 2], torch.zeros(3, 3), NOISE) == Verdict((), 0), "the verified part is a chain"


def test_an_impossible_token_is_not_forgiven() -> None:
    """As for the margin: what is masked is not written."""
    tree, logits = pattern("0" + "1" * 5)
    assert Fly()(tree, list(range(7)), logits, NOISE).promotions == 1
    logits[0] = torch.tensor([0.0, -math.inf, -0.1])
    assert Fly()(tree, list(range(7)), logits, NOISE) == Verdict((), 0)
