"""TALON spends its node budget where the drafter is confident."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.policy_world import random_drafter
from tree.growth import Answer, Ask, Candidates, Policy
from tree.policies.layers import LayerGrowth
from tree.policies.talon import Talon

Path = tuple[int, ...]
Drafter = Callable[[Path], Sequence[float]]


def candidates(row: Sequence[float], width: int) -> Candidates:
    """The best `width` tokens of a row of probabilities, as a drafter would give them."""
    best = sorted(range(len(row)), key=lambda token: (-row[token], token))[:width]
    return Candidates(tuple(best), tuple(math.log(row[t]) if row[t] > 0 else -math.inf for t in best))


def grow(
    policy: Talon, q: Drafter, vocab: int, *, stop: frozenset[int] = frozenset(), max_depth: int | None = None
) -> tuple[LayerGrowth, list[Ask]]:
    """Grow until done; returns the growth and every question asked."""
    growth = policy.begin(0, stop_tokens=stop, max_depth=max_depth, vocab_size=vocab)
    asked: list[Ask] = []
    while (ask := growth.ask("medium")) is not None:
        asked.append(ask)
        rows = {node: candidates(q(tuple(growth.tree.path_tokens(node))), ask.width) for node in ask.nodes}
        growth.attach("medium", Answer(rows, {}))
        growth.tree.check()
        assert len(asked) <= policy.budget, "does not end"
    return growth, asked


def paths(growth: LayerGrowth) -> set[Path]:
    """The grown tree as a set of token paths, root excluded."""
    return {tuple(growth.tree.path_tokens(node)) for node in range(1, len(growth.tree))}


def oracle(policy: Talon, q: Drafter, vocab: int) -> set[Path]:
    """The published loop on sets of paths, with the whole vocabulary of every parent in the pool."""
    score: dict[Path, float] = {(): 1.0}
    parents: list[Path] = [()]
    layer = 0
    while len(score) < policy.budget and (policy.depth_cap is None or layer < policy.depth_cap):
        pool = {(*v, w): score[v] * q(v)[w] for v in parents for w in range(vocab) if q(v)[w] > 0}
        ranked = sorted(pool, key=lambda u: -pool[u])
        if layer < policy.robust_layers:
            admitted = ranked[: policy.first_width]
        else:
            admitted = [u for u in ranked if pool[u] >= policy.mu * pool[ranked[0]]]
        admitted = admitted[: policy.budget - len(score)]
        score.update({u: pool[u] for u in admitted})
        parents = admitted
        layer += 1
    return set(score) - {()}


def test_golden_gate() -> None:
    """Hand-checked: the gate compares path scores across parents, and ties break by creation order."""
    growth, asked = grow(Talon(budget=8, first_width=2, mu=0.3), lambda path: (0.6, 0.3, 0.1), 3)
    assert paths(growth) == {(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1)}
    assert len(asked) == 3 and max(growth.tree.depth) == 3 and len(growth.tree) == 8
    score = {tuple(growth.tree.path_tokens(i)): math.exp(growth.tree.score[i]) for i in range(8)}
    assert score[0, 1] == pytest.approx(0.18) and score[0, 0, 0] == pytest.approx(0.216)


def test_golden_confident_chain() -> None:
    """Hand-checked: a confident drafter gets the first layer and then a pure chain."""
    growth, asked = grow(Talon(budget=8, first_width=2, mu=0.3), lambda path: (0.98, 0.01, 0.01), 3)
    assert paths(growth) == {(0,), (1,), *(((0,) * depth) for depth in range(2, 7))}
    assert len(asked) == 6 and max(growth.tree.depth) == 6 and len(growth.tree) == 8


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 10**9),
    vocab=st.integers(2, 7),
    budget=st.integers(1, 40),
    first=st.integers(1, 12),
    mu=st.sampled_from([0.003, 0.03, 0.3, 0.8, 1.0]),
    robust=st.integers(0, 2),
    sharpness=st.sampled_from([0.3, 1.0, 4.0]),
)
def test_grows_what_the_paper_says(
    seed: int, vocab: int, budget: int, first: int, mu: float, robust: int, sharpness: float
) -> None:
    """The production loop asks only for the best candidates per parent; the whole-vocabulary pool must agree."""
    policy = Talon(budget, first, mu, depth_cap=None, robust_layers=robust)
    q = random_drafter(seed, vocab, sharpness)
    growth, asked = grow(policy, q, vocab)
    tree = growth.tree
    assert paths(growth) == oracle(policy, q, vocab)
    assert len(tree) == budget and growth.verify_nodes() == list(range(budget)), "the budget is spent, root included"
    assert len(asked) == max(tree.depth), "one forward per layer"
    assert growth.num_grafts == 0
    for depth in range(1 + robust, max(tree.depth) + 1):  # the gate, from the definition
        layer = [v for v in range(budget) if tree.depth[v] == depth]
        parents = [v for v in range(budget) if tree.depth[v] == depth - 1]
        anchor = max(tree.score[v] + math.log(max(q(tuple(tree.path_tokens(v))))) for v in parents)
        assert all(tree.score[v] >= anchor + math.log(mu) - 1e-8 for v in layer)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**9), small=st.integers(1, 30), more=st.integers(0, 30))
def test_a_larger_budget_grows_a_supertree(seed: int, small: int, more: int) -> None:
    """The gate does not depend on N; if a larger budget changed early layers, it could lower the accepted length."""
    q = random_drafter(seed, 5)
    few, _ = grow(Talon(small, depth_cap=None), q, 5)
    many, _ = grow(Talon(small + more, depth_cap=None), q, 5)
    assert paths(few) <= paths(many)


def test_a_first_layer_wider_than_the_budget_is_the_whole_tree() -> None:
    """K >= N: one layer of N - 1 nodes, one forward."""
    growth, asked = grow(Talon(budget=5, first_width=10), random_drafter(1, 20), 20)
    assert len(growth.tree) == 5 and max(growth.tree.depth) == 1 and len(asked) == 1


def test_a_vocabulary_smaller_than_the_first_layer_is_taken_whole() -> None:
    """|V| < K: no more candidates than tokens are asked for."""
    growth, asked = grow(Talon(budget=20, first_width=10, depth_cap=None), random_drafter(1, 3), 3)
    assert asked[0].width == 3 and growth.tree.depth.count(1) == 3 and len(growth.tree) == 20


def test_masked_rows_contribute_nothing() -> None:
    """A parent without candidates must not stop its siblings; a tree without candidates must end."""
    q = random_drafter(2, 4)
    growth, _ = grow(Talon(budget=12, first_width=4), lambda path: (0.0,) * 4 if path[:1] == (1,) else q(path), 4)
    assert (1,) in paths(growth) and not any(path[:1] == (1,) and len(path) > 1 for path in paths(growth))
    assert len(growth.tree) == 12
    nothing, asked = grow(Talon(), lambda path: (0.0,) * 4, 4)
    assert nothing.verify_nodes() == [0] and len(asked) == 1
    dead, asked = grow(Talon(budget=12, first_width=3), lambda path: q(path) if path == () else (0.0,) * 4, 4)
    assert len(dead.tree) == 4 and len(asked) == 2, "all rows masked: the anchor is -inf and growth stops"
    empty = Talon().begin(0, vocab_size=4)
    assert empty.ask("medium") is not None
    empty.attach("medium", Answer({}, {}))
    assert empty.ask("medium") is None


def test_tokens_the_target_does_not_have_are_dropped() -> None:
    """A padded drafter may propose ids past the tokenizer; they would index outside the target's embedding."""
    growth = Talon(budget=4).begin(0, vocab_size=4)
    assert growth.ask("medium") is not None
    growth.attach("medium", Answer({0: Candidates((5, 1, 4), (-0.1, -2.0, -3.0))}, {}))
    assert growth.tree.token == [0, 1]


def test_the_depth_cap_limits_forwards_and_can_be_switched_off() -> None:
    """Without a cap a confident context would cost N - K forwards; with None it must, as in the paper."""
    q: Drafter = lambda path: (0.98, 0.01, 0.01)  # noqa: E731
    capped, asked = grow(Talon(budget=60, first_width=2, mu=0.3, depth_cap=16), q, 3)
    assert len(asked) == 16 == max(capped.tree.depth) and len(capped.tree) == 18
    free, asked = grow(Talon(budget=60, first_width=2, mu=0.3, depth_cap=None), q, 3)
    assert len(asked) == 58 == max(free.tree.depth) and len(free.tree) == 60
    short, asked = grow(Talon(budget=60, first_width=2, mu=0.3, depth_cap=None), q, 3, max_depth=3)
    assert len(asked) == 3 == max(short.tree.depth)
    assert grow(Talon(), q, 3, max_depth=0)[0].verify_nodes() == [0]
    assert grow(Talon(depth_cap=0), q, 3)[0].verify_nodes() == [0]


def test_robust_layers_choose_where_the_gate_starts() -> None:
    """0 gates from the first layer, 1 is the method, 2 takes the K best of the second layer too."""
    q: Drafter = lambda path: (0.9, 0.06, 0.04)  # noqa: E731
    widths = {}
    for robust in (0, 1, 2):
        growth, _ = grow(Talon(budget=30, first_width=3, mu=0.3, depth_cap=3, robust_layers=robust), q, 3)
        widths[robust] = [growth.tree.depth.count(depth) for depth in (1, 2, 3)]
    assert widths == {0: [1, 1, 1], 1: [3, 1, 1], 2: [3, 3, 1]}


def test_mu_of_one_keeps_the_best_and_exact_ties() -> None:
    """An anchor tie lost to rounding would make runs depend on the machine."""
    growth, _ = grow(Talon(budget=9, first_width=2, mu=1.0, depth_cap=3), lambda path: (0.5, 0.3, 0.2), 3)
    assert paths(growth) == {(0,), (1,), (0, 0), (0, 0, 0)}
    tied, _ = grow(Talon(budget=30, first_width=2, mu=1.0, depth_cap=3), lambda path: (0.5, 0.5), 2)
    assert [tied.tree.depth.count(depth) for depth in (1, 2, 3)] == [2, 4, 8]


@pytest.mark.parametrize("mu", [0.5, 0.3, 0.7, 0.1])
@pytest.mark.parametrize("best", [0.6, 0.55, 0.59, 0.45])
def test_a_candidate_exactly_at_the_gate_is_admitted(best: float, mu: float) -> None:
    """score == mu * anchor passes; log space must not lose it by a last bit."""
    growth, _ = grow(Talon(budget=9, first_width=1, mu=mu, depth_cap=2), lambda path: (best, mu * best, 0.01), 3)
    assert paths(growth) == {(0,), (0, 0), (0, 1)}


def test_stop_tokens_are_kept_but_not_expanded() -> None:
    """The end token itself may be accepted; anything drafted after it is waste."""
    growth, _ = grow(Talon(budget=20, first_width=3), random_drafter(3, 3), 3, stop=frozenset({1}))
    assert any(path[-1] == 1 for path in paths(growth))
    assert not any(1 in path[:-1] for path in paths(growth))
    assert len(growth.tree) == 20
    ended, asked = grow(Talon(budget=20, first_width=3), random_drafter(3, 3), 3, stop=frozenset({0, 1, 2}))
    assert len(ended.tree) == 4 and len(asked) == 1


def test_drafters_may_take_turns() -> None:
    """Layers of two drafters in one tree are grafts, counted node by node, never at the root."""
    growth = Talon(budget=7, first_width=2, mu=0.001).begin(0, vocab_size=3)
    for drafter in ("small", "medium", "small"):
        ask = growth.ask(drafter)
        assert ask is not None and not ask.rescore
        growth.attach(drafter, Answer({node: candidates((0.5, 0.3, 0.2), ask.width) for node in ask.nodes}, {}))
        if growth.ask(drafter) is None:
            break
    assert growth.num_grafts == 4 and len(growth.tree) == 7


def test_a_smaller_budget_keeps_the_other_parameters() -> None:
    """Load sharing cuts the budget; it must not reset the gate."""
    policy: Policy = Talon(budget=60, first_width=3, mu=0.2, depth_cap=None)
    assert policy.with_budget(9) == Talon(9, 3, 0.2, None)
    assert grow(Talon().with_budget(1), random_drafter(0, 3), 3)[1] == []


@pytest.mark.parametrize(
    "bad",
    [
        {"budget": 0},
        {"first_width": 0},
        {"mu": 0.0},
        {"mu": 1.5},
        {"mu": math.nan},
        {"depth_cap": -1},
        {"robust_layers": -1},
    ],
)
def test_nonsense_parameters_are_refused(bad: dict[str, float]) -> None:
    """A bad configuration must fail at start, with the name of the key."""
    with pytest.raises(ValueError, match=next(iter(bad))):
        Talon(**bad)  # type: ignore[arg-type]
