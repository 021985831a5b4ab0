"""The production ratio rules: the verdicts of the references, on rows as they come from models, with numbers used once."""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from engine.noise import DraftNoise, TargetNoise
from tests.verify_world import RULES, Rule, solving
from tree.draws import TreeKind, best_tokens, draw, draw_distinct, record_draws, without
from tree.tree import TokenTree
from verify import EVERY_VERIFIER, RATIO_VERIFIERS, VERIFIERS, Noise, Verdict, Verifier
from verify.block import Block
from verify.greedy import Greedy
from verify.khisti import Khisti, _flow, duel, tournament
from verify.naive import Naive
from verify.ratio import Tests
from verify.reference import Replayed, khisti, recursive_shuffled
from verify.reference.top_down import Row
from verify.specinfer import SpecInfer
from verify.spectr import SpecTr
from verify.traversal import Traversal
from verify.walk import TargetWalk

SHUFFLED = SpecInfer(shuffled=True)
TREES_FOR = {"specinfer-distinct": TreeKind.WITHOUT_REPLACEMENT}  # IID for all others


def random_rows(rng: random.Random, count: int, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    """Probability rows with zeros; float32 ones do not sum to exactly 1."""
    generator = torch.Generator().manual_seed(rng.randrange(10**9))
    rows = torch.rand(count, vocab, generator=generator, dtype=torch.float64).pow(3)
    rows[torch.rand(count, vocab, generator=generator) < 0.25] = 0.0
    rows[torch.arange(count), torch.randint(vocab, (count,), generator=generator)] = 0.5
    return (rows / rows.sum(-1, keepdim=True)).to(dtype)


def random_drawn_tree(rng: random.Random, kind: TreeKind, q: torch.Tensor, is_chain: bool = False) -> TokenTree:
    """A tree of depth up to 3 whose node i draws from row ``q[i]``, as many as the rows last."""
    tree = TokenTree(0, kind)
    node = 0
    width = 1 if is_chain else rng.randint(1, 3)
    while node < len(tree) and node < len(q):
        if tree.depth[node] < 3:
            row = q[node]
            numbers = [rng.random() for _ in range(width if kind is not TreeKind.DELAYED or tree.depth[node] > 0 else 1)]
            if kind is TreeKind.WITHOUT_REPLACEMENT:
                record_draws(tree, node, draw_distinct(row, numbers), row, "medium")
            elif kind is TreeKind.ONE_SAMPLED:
                chosen = best_tokens(row, width - 1)
                for token in chosen:
                    tree.add(node, token, -1.0, "medium")
                rest = without(row, chosen)
                if rest.sum() > 0:
                    record_draws(tree, node, draw(rest, numbers[:1]), rest, "medium")
            else:
                record_draws(tree, node, draw(row, numbers), row, "medium")
        node += 1
    tree.check()
    return tree


def khisti_as_solved(rows: torch.Tensor, tree: TokenTree) -> Rule:
    """The reference with the duels that production solves at each node; the program has several optima."""
    solved = {}
    for node, q in tree.proposals.items():
        p = rows[node].double()
        duels = tournament(p / p.sum(), q.double() / q.double().sum(), len(tree.draws[node]))
        solved[tuple(tree.path(node))] = duels

    def chances(p: Row, q: Row, k: int) -> list:  # type: ignore[type-arg]
        for path, duels in solved.items():
            node = path[-1] if path else 0
            own = rows[node].double()
            if len(tree.draws[node]) == k and torch.allclose(own / own.sum(), torch.tensor(p, dtype=torch.float64)):
                return [step.chance for step in duels]
        raise AssertionError

    return solving(khisti(chances))


@settings(max_examples=120)
@given(seed=st.integers(0, 10**9), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_production_and_reference_agree_element_by_element(seed: int, dtype: torch.dtype) -> None:
    """The references are what the exactness proofs are about; a production rule that differs is unproven."""
    rng = random.Random(seed)
    vocab = rng.randint(2, 7)
    kind = rng.choice([kind for kind in TreeKind if kind is not TreeKind.DETERMINISTIC])
    is_chain = rng.random() < 0.3
    tree = random_drawn_tree(rng, kind, random_rows(rng, 12, vocab, dtype), is_chain)
    nodes = list(range(len(tree)))
    rows = random_rows(rng, len(nodes), vocab, dtype)
    for node in nodes[1:]:  # most of the mass is on the children, so that walks are long
        rows[tree.parent[node], tree.token[node]] += 0.3
    noise = TargetNoise(rng.randrange(10**9), 3)
    as_lists = {node: rows[node].double().tolist() for node in nodes}
    proposals = {node: q.double().tolist() for node, q in tree.proposals.items()}
    references: list[tuple[Verifier, Rule]] = [(RATIO_VERIFIERS[name], rule) for name, rule in RULES.items()]
    references.append((SHUFFLED, solving(recursive_shuffled)))
    num_compared = 0
    for verifier, rule in references:
        if kind not in verifier.accepts or (verifier.needs_chain and any(len(children) > 1 for children in tree.children)):
            continue
        rule = khisti_as_solved(rows, tree) if verifier.name == "khisti" else rule
        verdict = verifier(tree, nodes, rows, noise)
        assert verdict == rule(tree, as_lists, proposals, Replayed(noise)), verifier.name
        above = [0, *verdict.path]
        assert [tree.parent[node] for node in verdict.path] == above[:-1]
        emitted = [tree.token[node] for node in verdict.path] + [verdict.extra]
        assert all(rows[node, token] > 0 for node, token in zip(above, emitted, strict=True)), "an impossible token"
        num_compared += 1
    assert num_compared >= 1


def small_tree(kind: TreeKind = TreeKind.IID) -> TokenTree:
    """Root with the draws 1, 2, 1; node 1 (token 1) with the draws 0, 0; q = (.2, .5, .3) everywhere."""
    q = torch.tensor([0.2, 0.5, 0.3])
    tree = TokenTree(0, kind)
    record_draws(tree, 0, [1, 2, 1], q, "medium")
    record_draws(tree, 1, [0, 0], q, "medium")
    return tree


@dataclass
class Given:
    """Noise that was chosen beforehand, the same at every depth."""

    number: float
    vector: Sequence[float] = (1.0, 1.0, 1.0)

    def uniform(self, depth: int) -> float:
        raise AssertionError("one number per position is not enough for a ratio rule")

    def exponentials(self, depth: int, size: int) -> torch.Tensor:
        assert size == len(self.vector)
        return torch.tensor(self.vector)

    def uniforms(self, depth: int, size: int) -> list[float]:
        return [self.number] * size


@pytest.mark.parametrize("name", RATIO_VERIFIERS)
def test_an_empty_tree_is_plain_decoding(name: str) -> None:
    """Without drafts a seed must give the very token that the walk gives: a slow drafter then costs time, not text."""
    kind = TREES_FOR.get(name, TreeKind.IID)
    rows = random_rows(random.Random(1), 1, 50, torch.float32)
    for seed in range(20):
        noise = TargetNoise(seed, 0)
        assert RATIO_VERIFIERS[name](TokenTree(0, kind), [0], rows, noise) == TargetWalk()(TokenTree(0), [0], rows, noise)


@pytest.mark.parametrize("name", RATIO_VERIFIERS)
def test_a_one_hot_target_is_greedy(name: str) -> None:
    """At temperature towards 0 every rule tells the same text, whatever was drawn and whatever the numbers."""
    rng = random.Random(7)
    verifier = RATIO_VERIFIERS[name]
    for trial in range(25):
        kind = TREES_FOR.get(name, TreeKind.IID)
        tree = random_drawn_tree(rng, kind, random_rows(rng, 10, 4, torch.float32), verifier.needs_chain)
        nodes = list(range(len(tree)))
        logits = torch.rand(len(nodes), 4, generator=torch.Generator().manual_seed(trial))
        for node in nodes[1:]:
            logits[tree.parent[node], tree.token[node]] += 0.5
        one_hot = torch.nn.functional.one_hot(logits.argmax(-1), 4).float()
        assert verifier(tree, nodes, one_hot, TargetNoise(trial, 0)) == Greedy()(tree, nodes, logits, TargetNoise(trial, 0))


@pytest.mark.parametrize("name", [name for name in RATIO_VERIFIERS if name != "khisti"])
def test_a_drafter_that_is_the_target_is_always_right(name: str) -> None:
    """With p = q the first path is accepted to its leaf, even by the most unlucky number.

    Khisti is another matter: its truncated program prefers some draws to others, even if none deserves it.
    """
    rng = random.Random(3)
    verifier = RATIO_VERIFIERS[name]
    q = random_rows(rng, 40, 6, torch.float32)
    for _ in range(15):
        tree = random_drawn_tree(rng, TREES_FOR.get(name, TreeKind.IID), q, verifier.needs_chain)
        nodes = list(range(len(tree)))
        rows = torch.stack([q[min(node, len(q) - 1)] for node in nodes])
        verdict = verifier(tree, nodes, rows, Given(1 - 2**-53, (1.0,) * 6))
        assert verdict.num_fallbacks == 0
        assert verdict.path and verdict.path[-1] not in tree.draws, "the walk ended at a node that has draws"


@pytest.mark.parametrize("name", RATIO_VERIFIERS)
def test_disjoint_rows_accept_nothing(name: str) -> None:
    """Draws the target excludes are refused even by the luckiest number, and nothing divides by zero."""
    q, p = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([[0.25, 0.75, 0.0]] * 2)
    tree = TokenTree(0, TREES_FOR.get(name, TreeKind.IID))
    record_draws(tree, 0, [2] if name in ("specinfer-distinct",) else [2, 2], q, "medium")
    assert RATIO_VERIFIERS[name](tree, [0, 1], p, Given(0.0, (1.0, 1.5, 1.0))) == Verdict((), 1)


@pytest.mark.parametrize("verifier", [Naive(), SpecInfer(), SpecTr(), Khisti(), Block(), Traversal()], ids=lambda v: v.name)
def test_a_remainder_of_rounding_is_counted_and_the_target_sampled(verifier: Verifier) -> None:
    """p a rounding error away from q, and a number that refuses: the token comes from p, not from rounding noise."""
    q = torch.tensor([0.5, 0.5], dtype=torch.float64)
    p = torch.tensor([[0.5 - 1e-15, 0.5 + 1e-15]] * 2, dtype=torch.float64)
    tree = TokenTree(0, TreeKind.IID)
    record_draws(tree, 0, [0], q, "medium")
    assert verifier(tree, [0, 1], p, Given(1 - 2**-53, (1.1, 1.0))) == Verdict((), 1, num_fallbacks=1)
    verdict = verifier(tree, [0, 1], p, Given(1 - 2**-53, (1.0, 1.1)))
    path = () if verifier.name in ("block", "traversal") else (1,)  # the token is a child, where the walk goes on
    assert verdict == Verdict(path, 0, num_fallbacks=1)


@pytest.mark.parametrize("bad", [0.0, math.nan])
@pytest.mark.parametrize("name", RATIO_VERIFIERS)
def test_a_row_without_mass_is_an_error_where_it_is_reached(name: str, bad: float) -> None:
    """NaN or all-zero rows are our fault and must not turn into a token."""
    tree = TokenTree(0, TREES_FOR.get(name, TreeKind.IID))
    record_draws(tree, 0, [1], torch.tensor([0.0, 1.0, 0.0]), "medium")
    rows = torch.tensor([[0.0, 1.0, 0.0], [bad] * 3])
    with pytest.raises(AssertionError, match="no probability"):
        RATIO_VERIFIERS[name](tree, [0, 1], rows, Given(0.5))
    with pytest.raises(AssertionError, match="no probability"):
        RATIO_VERIFIERS[name](tree, [0, 1], rows.flip(0), Given(0.5))


@pytest.mark.parametrize("name", RATIO_VERIFIERS)
def test_vocabularies_may_differ_where_it_does_not_matter(name: str) -> None:
    """A shorter drafter row is padded; a longer one may have only zeros there, for a token p lacks cannot be drawn."""
    kind = TREES_FOR.get(name, TreeKind.IID)
    rows = torch.tensor([[0.2, 0.3, 0.5], [0.1, 0.8, 0.1]])

    def verdict(q: list[float]) -> Verdict:
        tree = TokenTree(0, kind)
        record_draws(tree, 0, [1], torch.tensor(q), "medium")
        return RATIO_VERIFIERS[name](tree, [0, 1], rows, Given(0.4))

    assert verdict([0.5, 0.5]) == verdict([0.5, 0.5, 0.0]) == verdict([0.5, 0.5, 0.0, 0.0])
    with pytest.raises(AssertionError, match="mass on tokens"):
        verdict([0.5, 0.4, 0.0, 0.1])


def test_wrong_trees_are_refused_when_they_are_verified() -> None:
    """A schedule may have been put together wrongly; silence here would be a wrong law."""
    rows = torch.full((4, 3), 1 / 3)
    tree = small_tree()
    for name, verifier in RATIO_VERIFIERS.items():
        if TreeKind.IID not in verifier.accepts:
            with pytest.raises(ValueError, match="cannot verify iid trees: their draws repeat"):
                verifier(tree, [0, 1, 2, 3], rows, Given(0.5))
        plain = TokenTree(0)
        plain.add(0, 1, -1.0, "small")
        with pytest.raises(ValueError, match=f"the {name} rule cannot verify deterministic trees"):
            verifier(plain, [0, 1], rows[:2], Given(0.5))
    with pytest.raises(ValueError, match="chains only"):
        Block()(tree, [0, 1, 2, 3], rows, Given(0.5))


def test_drawn_children_must_not_be_left_out() -> None:
    """Cutting the tree for verification is pruning: what is left is no sample of q."""
    rows = torch.full((3, 3), 1 / 3)
    for verifier in (Naive(), SpecTr(), Traversal()):
        with pytest.raises(AssertionError, match="drawn and then left out"):
            verifier(small_tree(), [0, 1, 3], rows, Given(0.5))
        with pytest.raises(AssertionError, match="rows"):
            verifier(small_tree(), [0, 1, 2, 3], rows, Given(0.5))


def test_one_sampled_child_may_be_left_out() -> None:
    """Its draw is remembered: its token is emitted as the extra one if the test passes."""
    tree = TokenTree(0, TreeKind.ONE_SAMPLED)
    tree.add(0, 1, -0.5, "medium")
    tree.add(0, 2, -0.6, "medium")
    record_draws(tree, 0, [2], torch.tensor([0.4, 0.0, 0.6]), "medium")
    rows = torch.tensor([[0.1, 0.3, 0.6], [0.0, 0.0, 1.0]])
    assert Naive()(tree, [0, 1], rows, Given(0.99)) == Verdict((), 2)
    rows[0] = torch.tensor([0.1, 0.6, 0.3])
    assert Naive()(tree, [0, 1], rows, Given(0.99)) == Verdict((1,), 2), "the remainder names a chosen sibling"


@pytest.mark.parametrize("verifier", [*RATIO_VERIFIERS.values(), SHUFFLED], ids=lambda v: v.name)
def test_a_real_vocabulary_needs_no_loop(verifier: Verifier) -> None:
    """49152 tokens: a loop over them in Python would take seconds, and not a few tensor operations per node."""
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(30, 49152, generator=generator).mul(3).softmax(-1) for _ in range(2))
    tree = random_drawn_tree(random.Random(2), TREES_FOR.get(verifier.name, TreeKind.IID), q[:4], verifier.needs_chain)
    nodes = list(range(len(tree)))
    for node in nodes[1:]:
        p[tree.parent[node], tree.token[node]] += 0.3
    verdict = verifier(tree, nodes, p[: len(nodes)], TargetNoise(5, 0))
    assert verdict.num_fallbacks == 0 and 0 <= verdict.extra < 49152


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
@pytest.mark.parametrize("verifier", [*RATIO_VERIFIERS.values(), SHUFFLED], ids=lambda v: v.name)
def test_all_devices_agree(verifier: Verifier) -> None:
    """Sums may differ in their last bits between devices; these rows leave no decision that close."""
    for seed in range(10):
        rng = random.Random(seed)
        kind = TREES_FOR.get(verifier.name, TreeKind.IID)
        tree = random_drawn_tree(rng, kind, random_rows(rng, 10, 5000, torch.float32), verifier.needs_chain)
        rows = random_rows(rng, len(tree), 5000, torch.float32)
        for node in range(1, len(tree)):
            rows[tree.parent[node], tree.token[node]] += 0.3
        nodes, noise = list(range(len(tree))), TargetNoise(seed, 0)
        elsewhere = copy.deepcopy(tree)
        elsewhere.proposals = {node: q.cuda() for node, q in tree.proposals.items()}
        assert verifier(elsewhere, nodes, rows.cuda(), noise) == verifier(tree, nodes, rows, noise)


# ------------------------------------------------------------------------------------------------------------------- khisti


@given(seed=st.integers(0, 10**9), size=st.integers(1, 7))
@settings(max_examples=60)
def test_the_flow_is_the_best_program(seed: int, size: int) -> None:
    """Against a solver of linear programs: a worse duel would be exact too, and slower without anybody noticing."""
    p, a, b = (row.numpy() for row in random_rows(random.Random(seed), 3, size, torch.float64))
    few = np.ones(size) * (0.5 if seed % 3 else 1.0)  # part of the mass may lie with tokens outside
    p, a, b = p * few, a * few, b * few
    fixed = a * b + a * (1 - b.sum()) + b * (1 - a.sum())
    meets = np.outer(a, b) + np.outer(b, a)
    weights = _flow(p, meets, fixed)
    law = fixed.copy()
    pairs = list(itertools.combinations(range(size), 2))
    flow, least = np.zeros((size, len(pairs))), fixed.copy()
    for column, (i, j) in enumerate(pairs):
        assert 0.0 <= weights[i, j] <= 1.0
        law[i] += weights[i, j] * meets[i, j]
        law[j] += (1 - weights[i, j]) * meets[i, j]
        flow[i, column], flow[j, column] = meets[i, j], -meets[i, j]
        least[j] += meets[i, j]
    found = linprog(
        np.concatenate([np.zeros(len(pairs)), -np.ones(size)]),
        A_ub=np.hstack([-flow, np.eye(size)]),
        b_ub=least,
        bounds=[(0.0, 1.0)] * len(pairs) + [(0.0, float(most)) for most in p],
    )
    assert np.minimum(p, law).sum() == pytest.approx(-found.fun, abs=1e-9)


def test_what_the_target_itself_would_draw_is_accepted() -> None:
    """Choosing the better-ranked of two draws would prefer likely tokens, and refuse what needs no choice at all."""
    (p,) = random_rows(random.Random(3), 1, 200, torch.float64)
    p /= p.sum()
    for step in tournament(p, p, 4):
        assert torch.allclose(step.law, p, atol=1e-12)


@given(seed=st.integers(0, 10**9), size=st.integers(1, 8), ranked=st.integers(1, 8))
@settings(max_examples=60)
def test_the_law_of_a_truncated_program_is_that_of_its_rule(seed: int, size: int, ranked: int) -> None:
    """The closed form of the tail, against the sum over all pairs."""
    p, a, b = random_rows(random.Random(seed), 3, 7, torch.float64)
    step = duel(p, a, b, size, ranked)
    law = [0.0] * 7
    for i in range(7):
        for j in range(7):
            kept = 1.0 if i == j else step.chance(i, j)
            assert i == j or kept + step.chance(j, i) == pytest.approx(1.0, abs=1e-15)
            law[i] += (a[i] * b[j]).item() * kept
            law[j] += (a[i] * b[j]).item() * (1 - kept)
    assert step.law.tolist() == pytest.approx(law, abs=1e-14)
    assert step.law.sum().item() == pytest.approx(1.0, abs=1e-14)


def test_khisti_needs_a_program() -> None:
    """A size of 0 would leave the best pair to chance."""
    with pytest.raises(ValueError, match="size"):
        Khisti(size=0)


# -------------------------------------------------------------------------------------------------------------------- noise


class Recorded:
    """The noise of one step, noting which numbers were handed out: (purpose, owner, index)."""

    def __init__(self, position: int, by_position: bool = False) -> None:
        self.noise = TargetNoise(11, position)
        self.by_position = by_position
        self.used: set[tuple[str, int, int, int]] = set()

    def uniform(self, depth: int) -> float:
        raise AssertionError

    def exponentials(self, depth: int, size: int) -> torch.Tensor:
        self.used.add(("race", self.noise.position + depth, 0, 0))
        return self.noise.exponentials(depth, size)

    def uniforms(self, depth: int, size: int) -> list[float]:
        owner = self.noise.position + depth if self.by_position else self.noise.position
        self.used |= {("test", owner, 0 if self.by_position else depth, index) for index in range(size)}
        if self.by_position:
            return TargetNoise(11, owner).uniforms(0, size)
        return self.noise.uniforms(depth, size)


def overlaps(verifier: Verifier, by_position: bool) -> int:
    """Numbers that decided in two steps of a text of ten steps."""
    rng = random.Random(5)
    position, count = 0, 0
    before: set[tuple[str, int, int, int]] = set()
    for _ in range(10):
        q = random_rows(rng, 8, 4, torch.float32)
        tree = random_drawn_tree(rng, TREES_FOR.get(verifier.name, TreeKind.IID), q, verifier.needs_chain)
        noise = Recorded(position, by_position)
        verdict = verifier(tree, list(range(len(tree))), random_rows(rng, len(tree), 4, torch.float32), noise)
        count += len(before & noise.used)
        before |= noise.used
        position += len(verdict.path) + 1
    return count


@pytest.mark.parametrize("name", [*RATIO_VERIFIERS])
def test_no_number_decides_in_two_steps(name: str) -> None:
    """Bottom-up rules refuse nodes beyond the emitted text; a number used again would depend on the text before it."""
    assert overlaps(RATIO_VERIFIERS[name], by_position=False) == 0


@pytest.mark.parametrize("name", ["traversal", "block"])
def test_numbers_that_belong_to_positions_are_caught(name: str) -> None:
    """Negative control: keyed like the exponentials, the tests of two steps share numbers."""
    assert overlaps(RATIO_VERIFIERS[name], by_position=True) > 0


def test_tests_use_each_number_once_in_order() -> None:
    """Asked for more numbers, the noise repeats the first ones; a test must not."""
    noise = TargetNoise(4, 9)
    numbers = noise.uniforms(2, 40)
    assert noise.uniforms(2, 7) == numbers[:7] and len(set(numbers)) == 40
    assert not set(numbers) & set(noise.uniforms(1, 40)) and not set(numbers) & set(TargetNoise(4, 10).uniforms(2, 40))
    tests = Tests(noise, 2)
    for number, after in zip(numbers[::2], numbers[1::2], strict=True):
        assert tests.accept(number + 1e-12) and not tests.accept(after)
    assert Tests(noise, 2).below(1000) == int(numbers[0] * 1000)
    assert not Tests(Given(0.0), 0).accept(0.0) and Tests(Given(1 - 2**-53), 0).accept(1.0)


def test_drafting_and_verification_share_no_number() -> None:
    """A test with the number that drew the token would not be a test; and every draw of a step has its own."""
    draft, target = DraftNoise(4, 9), TargetNoise(4, 9)
    drafted = [draft(depth, index) for depth in range(6) for index in range(6)]
    assert len(set(drafted)) == 36 and drafted == [DraftNoise(4, 9)(depth, index) for depth in range(6) for index in range(6)]
    tested = [number for depth in range(6) for number in target.uniforms(depth, 6)]
    assert not set(drafted) & {*tested, *(target.uniform(depth) for depth in range(6))}
    assert not set(drafted) & {DraftNoise(4, 10)(depth, index) for depth in range(6) for index in range(6)}


def test_the_tables_say_who_is_who() -> None:
    """The engine looks rules up by name and asks what they read and accept."""
    assert set(RATIO_VERIFIERS) == {"naive", "specinfer", "specinfer-distinct", "spectr", "khisti", "block", "traversal"}
    for name, verifier in EVERY_VERIFIER.items():
        assert verifier.name == name
        assert verifier.reads_logits == (name in ("greedy", "margin", "fly"))
        assert verifier.needs_chain == (name in ("block", "fly"))
    assert all(verifier.accepts == frozenset(TreeKind) for verifier in VERIFIERS.values())
    noise: Noise = TargetNoise(0, 0)
    assert noise.uniforms(0, 0) == []
