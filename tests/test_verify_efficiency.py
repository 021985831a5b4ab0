"""How much the rules accept: golden vectors, the ceiling no rule can pass, and the expected length of a given tree."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import verify_world
from tests.verify_world import RULES, SHAPES, World, context_of, emitted_law, mean_accepted, worlds
from tree.draws import TreeKind, record_draws
from tree.tree import TokenTree
from verify.efficiency import (
    LAWS,
    Law,
    acceptance,
    ceiling,
    distinct_law,
    expected_tokens,
    khisti_law,
    naive_law,
    shuffled_law,
    specinfer_law,
    spectr_law,
    walk_law,
)
from verify.khisti import SIZE, tournament
from verify.reference import (
    Chosen,
    Solver,
    distinct,
    khisti,
    naive,
    outcomes,
    recursive,
    recursive_shuffled,
    smallest_rho,
    spectr,
    top_down_reference,
)
from verify.spectr import Division, accept_any, best_division, remainder

P = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
Q = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)


def random_row(rng: random.Random, vocab: int, zeros: bool = False) -> torch.Tensor:
    row = torch.tensor([rng.expovariate(1.0) for _ in range(vocab)], dtype=torch.float64)
    if zeros:
        row[[t for t in range(vocab) if rng.random() < 0.3 and t != vocab // 2]] = 0.0
    return row / row.sum()


def lists(q: torch.Tensor, k: int) -> list[tuple[float, tuple[int, ...]]]:
    """Every list of k independent draws with its probability."""
    found = []
    for drawn in itertools.product(range(len(q)), repeat=k):
        probability = math.prod(q[token].item() for token in drawn)
        if probability > 0:
            found.append((probability, drawn))
    return found


def distinct_lists(q: torch.Tensor, k: int) -> list[tuple[float, tuple[int, ...]]]:
    """Every list of k draws without replacement, or as many as q has tokens, with its probability."""
    found = []
    for drawn in itertools.permutations([t for t in range(len(q)) if q[t] > 0], min(k, int((q > 0).sum()))):
        probability, left = 1.0, 1.0
        for token in drawn:
            probability *= q[token].item() / left
            left -= q[token].item()
        found.append((probability, drawn))
    return found


def prepared(p: torch.Tensor, q: torch.Tensor, k: int, size: int = SIZE) -> Law:
    """Khisti's law for k draws, with the programs solved once."""
    duels = tournament(p, q, k, size)
    return lambda p, q, draws: khisti_law(p, q, draws, duels)


def rate(law: Law, p: torch.Tensor, q: torch.Tensor, k: int) -> float:
    """Probability of naming one of k draws, over the draws."""
    pairs = distinct_lists(q, k) if law is distinct_law else lists(q, k)
    return math.fsum(weight * acceptance(law(p, q, drawn), drawn) for weight, drawn in pairs)


GOLDEN = {
    "ceiling": [0.7, 0.86, 0.988],
    "walk": [0.31, 0.507, 0.6379],
    "naive": [0.7, 0.76, 0.808],
    "spectr": [0.7, 0.791355, 0.858519],
    "specinfer": [0.7, 0.76, 0.808],
    "khisti": [0.7, 0.86, 0.988],
    "specinfer-distinct": [0.7, 0.808571, 1.0],
}


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("name", GOLDEN)
def test_golden_acceptance_rates(name: str, k: int) -> None:
    """p = (.5, .3, .2), q = (.2, .5, .3), checked by hand and by another program."""
    found = ceiling(P, Q, k) if name == "ceiling" else rate(LAWS[name], P, Q, k)
    assert found == pytest.approx(GOLDEN[name][k - 1], abs=5e-7)


@pytest.mark.parametrize(
    ("drawn", "law", "row"),
    [
        ((1, 1), naive_law, [0.4, 0.6, 0.0]),
        ((1, 1), spectr_law, [0.345899, 0.654101, 0.0]),
        ((1, 1), specinfer_law, [0.4, 0.6, 0.0]),
        ((1, 1), shuffled_law, [0.4, 0.6, 0.0]),
        ((1, 0), naive_law, [0.4, 0.6, 0.0]),
        ((1, 0), spectr_law, [0.588132, 0.411868, 0.0]),
        ((1, 0), specinfer_law, [0.4, 0.6, 0.0]),
        ((1, 0), shuffled_law, [0.7, 0.3, 0.0]),
        ((0, 1), naive_law, [1.0, 0.0, 0.0]),
        ((0, 1), spectr_law, [1.0, 0.0, 0.0]),
        ((0, 1), specinfer_law, [1.0, 0.0, 0.0]),
        ((0, 1), shuffled_law, [0.7, 0.3, 0.0]),
        ((1, 2), naive_law, [0.4, 0.6, 0.0]),
        ((1, 2), spectr_law, [0.318984, 0.411868, 0.269148]),
        ((1, 2), specinfer_law, [0.4, 0.6, 0.0]),
        ((1, 2), shuffled_law, [0.366667, 0.3, 0.333333]),
    ],
)
def test_golden_branching_rows(drawn: tuple[int, ...], law: Law, row: list[float]) -> None:
    """The law of the named token for given draws, with the golden p and q."""
    assert law(P, Q, drawn).tolist() == pytest.approx(row, abs=5e-7)


def test_golden_divisors_and_what_a_smaller_one_does() -> None:
    """SpecTr's rho to six digits; one part in a thousand less and the law is off, so bisection must err upward."""
    for k, rho, off in ((2, 1.456776, 3.8e-4), (3, 1.792593, 3.4e-4)):
        best = best_division(P, Q, k)
        assert best.rho == pytest.approx(rho, abs=5e-7)
        assert best.pacc <= best.rho * best.beta
        assert best.rho == pytest.approx(smallest_rho(P.tolist(), Q.tolist(), k), abs=1e-14)
        assert marginal_error(k, best.rho) < 1e-15
        assert marginal_error(k, (best.rho + k) / 2) < 1e-15, "any larger divisor is exact too"
        assert marginal_error(k, best.rho * (1 - 1e-3)) == pytest.approx(off, rel=0.05)
    assert marginal_error(2, 1.0) == pytest.approx(0.15, abs=5e-3)
    assert marginal_error(3, 1.0) == pytest.approx(0.195, abs=5e-3)


def marginal_error(k: int, rho: float) -> float:
    """Largest error of SpecTr's law with this divisor."""
    beta = torch.minimum(P / rho, Q).sum().item()
    division = Division(rho, beta, accept_any(beta, k))
    left = remainder(P, Q, division, k)
    accepted = torch.minimum(P / rho, Q) * (division.pacc / beta)
    return (accepted + (1 - division.pacc) * left / left.sum() - P).abs().max().item()


@settings(max_examples=60)
@given(seed=st.integers(0, 10**9), vocab=st.integers(2, 4), k=st.integers(1, 3), zeros=st.booleans())
def test_every_law_averages_to_the_target_and_stays_below_the_ceiling(seed: int, vocab: int, k: int, zeros: bool) -> None:
    """Both are what a rule is: exact over the draws, and no better than a maximum flow allows."""
    rng = random.Random(seed)
    p, q = random_row(rng, vocab, zeros), random_row(rng, vocab, zeros)
    most = ceiling(p, q, k)
    for law in (walk_law, naive_law, specinfer_law, shuffled_law, spectr_law, prepared(p, q, k)):
        pairs = lists(q, k)
        mean = torch.stack([weight * law(p, q, drawn) for weight, drawn in pairs]).sum(0)
        assert torch.allclose(mean, p, atol=1e-13, rtol=0), law
        assert rate(law, p, q, k) <= most + 1e-12, law
    mean = torch.stack([weight * distinct_law(p, q, drawn) for weight, drawn in distinct_lists(q, k)]).sum(0)
    assert torch.allclose(mean, p, atol=1e-13, rtol=0)


@given(seed=st.integers(0, 10**9), vocab=st.integers(1, 6), k=st.integers(1, 4), zeros=st.booleans())
def test_the_ceiling_is_the_minimum_over_all_sets(seed: int, vocab: int, k: int, zeros: bool) -> None:
    """The shortcut by sorting, against all 2^|V| sets; for one draw it is 1 - TV."""
    rng = random.Random(seed)
    p, q = random_row(rng, vocab, zeros), random_row(rng, vocab, zeros)
    sets = [list(s) for size in range(vocab + 1) for s in itertools.combinations(range(vocab), size)]
    slow = 1 + min(p[s].sum().item() - q[s].sum().item() ** k for s in sets)
    assert ceiling(p, q, k) == pytest.approx(slow, abs=1e-13)
    assert ceiling(p, q, 1) == pytest.approx(torch.minimum(p, q).sum().item(), abs=1e-13)


def test_a_rule_that_cheats_passes_the_ceiling() -> None:
    """Negative control: a rule that takes whatever was drawn."""

    def cheat(p: torch.Tensor, q: torch.Tensor, draws: tuple[int, ...]) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor(draws[0]), len(p)).double()

    assert rate(cheat, P, Q, 2) > ceiling(P, Q, 2) + 1e-3  # type: ignore[arg-type]


def test_closed_forms_of_acceptance() -> None:
    """Formulas that the laws were not made from."""
    for seed in range(20):
        rng = random.Random(seed)
        p, q = random_row(rng, 3), random_row(rng, 3)
        one = torch.ones_like(p)
        for k in (1, 2, 3):
            assert rate(walk_law, p, q, k) == pytest.approx((p * (1 - (1 - q) ** k)).sum().item(), abs=1e-13)
            rest = (p - q).clamp(min=0) * (1 - (1 - q) ** (k - 1))
            assert rate(naive_law, p, q, k) == pytest.approx((torch.minimum(p, q) + rest).sum().item(), abs=1e-13)
            division = best_division(p, q, k)
            refused = (q - p / division.rho).clamp(min=0) / (1 - division.beta)
            left = remainder(p, q, division, k)
            missed = (1 - (one - refused) ** k) * left / left.sum()
            expected = division.pacc + (1 - division.pacc) * missed.sum().item()
            assert rate(spectr_law, p, q, k) == pytest.approx(expected, abs=1e-12)
            chance, passed, left = 1.0, one, p
            for _ in range(k):
                accepted = torch.minimum(left, q).sum().item()
                passed = passed * (1 - (q - left).clamp(min=0) / (1 - accepted))
                chance *= 1 - accepted
                left = (left - q).clamp(min=0) / (1 - accepted)
            expected = 1 - chance + chance * (left * (1 - passed)).sum().item()
            assert rate(specinfer_law, p, q, k) == pytest.approx(expected, abs=1e-12)
            assert rate(shuffled_law, p, q, k) == pytest.approx(expected, abs=1e-12)


def test_the_full_program_attains_the_ceiling_for_two_draws() -> None:
    """Khisti's first step is optimal for two draws; a worse program would waste what it costs."""
    for seed in range(30):
        rng = random.Random(seed)
        p, q = random_row(rng, 4), random_row(rng, 4)
        assert rate(prepared(p, q, 2), p, q, 2) == pytest.approx(ceiling(p, q, 2), abs=1e-7)
        assert rate(prepared(p, q, 2, size=2), p, q, 2) <= ceiling(p, q, 2) + 1e-12


def test_order_relations_of_acceptance() -> None:
    """All agree with one draw; with |V| draws without replacement everything is accepted; some never lose to Naive."""
    for seed in range(30):
        rng = random.Random(seed)
        p, q = random_row(rng, 3), random_row(rng, 3)
        single = rate(naive_law, p, q, 1)
        for law in (specinfer_law, shuffled_law, spectr_law, khisti_law, distinct_law):
            assert rate(law, p, q, 1) == pytest.approx(single, abs=1e-12)
        assert rate(distinct_law, p, q, 3) == pytest.approx(1.0, abs=1e-12)
        assert torch.equal(walk_law(p, q, [0]), walk_law(p, p, [1]))


SOLVERS: dict[Law, Solver] = {
    walk_law: lambda p, q, draws, decisions, depth: list(p),
    naive_law: naive,
    specinfer_law: recursive,
    shuffled_law: recursive_shuffled,
    spectr_law: spectr(),
}


@given(seed=st.integers(0, 10**9), k=st.integers(1, 3))
def test_laws_are_those_of_the_references(seed: int, k: int) -> None:
    """Two ways to the same numbers: every decision of the reference enumerated, and the formula on tensors."""
    rng = random.Random(seed)
    vocab = rng.randint(2, 4)
    p, q = random_row(rng, vocab), random_row(rng, vocab)
    drawn = tuple(rng.randrange(vocab) for _ in range(k))
    for law, solver in SOLVERS.items():
        assert law(p, q, drawn).tolist() == pytest.approx(enumerated(solver, p, q, drawn), abs=1e-12)
    apart = rng.sample(range(vocab), min(k, vocab))
    assert distinct_law(p, q, apart).tolist() == pytest.approx(enumerated(distinct, p, q, apart), abs=1e-12)


def enumerated(solver: Solver, p: torch.Tensor, q: torch.Tensor, drawn: list[int] | tuple[int, ...]) -> list[float]:
    """The law of the first token that a step emits."""
    tree = TokenTree(0, TreeKind.IID)
    record_draws(tree, 0, drawn, q, "medium")
    law = [0.0] * len(p)
    rows = {0: p.tolist()}  # no row for the children: the walk ends with the first token
    for probability, verdict in outcomes(
        lambda choose: top_down_reference(tree, rows, {0: q.tolist()}, Chosen(choose), solver)
    ):
        law[verdict.extra] += probability
    return law


def test_khistis_law_is_that_of_the_reference() -> None:
    """With the very duels of production, since the program has several optima."""
    for seed in range(15):
        rng = random.Random(seed)
        p, q = random_row(rng, 4), random_row(rng, 4)
        for k in (1, 2, 3):
            duels = tournament(p, q, k)
            drawn = tuple(rng.randrange(4) for _ in range(k))
            solver = khisti(lambda p, q, k, duels=duels: [duel.chance for duel in duels])  # type: ignore[misc]
            assert khisti_law(p, q, drawn).tolist() == pytest.approx(enumerated(solver, p, q, drawn), abs=1e-12)


# ------------------------------------------------------------------------------------------------------------- whole trees


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("naive", "2 paths"),
        ("naive", "one sampled of 2"),
        ("specinfer", "2 paths"),
        ("spectr", "delayed (3,1,1)"),
        ("khisti", "delayed (2,1,1)"),
        ("specinfer-distinct", "distinct 2 x 2"),
    ],
)
def test_expected_tokens_are_what_verification_emits(name: str, shape: str) -> None:
    """Labels for choosing shapes are made from this sum; it must be the mean of real verifications, without their noise."""
    p, q = worlds()["ordinary"]
    trees = verify_world.drawn(SHAPES[shape], q)
    rows = {id(tree): rows_of(tree, p) for _, tree in trees}
    computed = math.fsum(
        weight * expected_tokens(tree, list(range(len(tree))), rows[id(tree)], LAWS[name]) for weight, tree in trees
    )
    emitted = emitted_law(RULES[name], trees, p)
    assert computed == pytest.approx(mean_accepted(emitted) + 1, abs=1e-12)
    shallow = math.fsum(
        weight * expected_tokens(tree, list(range(len(tree))), rows[id(tree)], LAWS[name], max_depth=1)
        for weight, tree in trees
    )
    assert shallow == pytest.approx(1 + sum(chance for text, chance in emitted.items() if len(text) > 1), abs=1e-12)


def rows_of(tree: TokenTree, p: World) -> torch.Tensor:
    return torch.tensor([p[context_of(tree, node)] for node in range(len(tree))], dtype=torch.float64)


def test_expected_tokens_of_the_walk_are_the_targets_mass() -> None:
    """On any tree, drawn or chosen: the sum of path probabilities under the target."""
    p, _ = worlds()["ordinary"]
    tree = TokenTree(0)
    for token in (0, 2):
        child = tree.add(0, token, -1.0, "small")
        tree.add(child, 1, -1.0, "small")
    mass = sum(math.prod(p[path[:i]][path[i]] for i in range(len(path))) for path in [(0,), (0, 1), (2,), (2, 1)])
    rows = rows_of(tree, p)
    assert expected_tokens(tree, range(5), rows, walk_law) == pytest.approx(1 + mass, abs=1e-14)
    assert expected_tokens(tree, [0], rows[:1], walk_law) == 1.0


def test_one_sampled_child_reaches_the_best_that_its_candidates_allow() -> None:
    """p(A) + sum of min(p, r) outside A; for the golden p and q and the best token chosen."""
    row = Q.clone()
    chosen = 1
    r = row.clone()
    r[chosen] = 0.0
    r /= r.sum()
    best = P[chosen].item() + sum(min(P[t].item(), r[t].item()) for t in (0, 2))
    found = sum(r[t].item() * acceptance(naive_law(P, r, [t]), [t, chosen]) for t in (0, 2))
    assert found == pytest.approx(best, abs=1e-14)
    assert best > rate(naive_law, P, Q, 2)
