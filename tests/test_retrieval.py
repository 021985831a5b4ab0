"""Prune, then graft: retrieval fills what pruning frees and displaces nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.base import DraftRequest
from drafters.ngram import NgramDrafter
from tests.policy_world import Drafter, answer, candidates, check_cut, check_question, holey_drafter, paths, random_drafter
from tree.draws import TreeKind
from tree.growth import Answer, Ask, Candidates, Policy
from tree.policies.eagle import Eagle
from tree.policies.fixed import Fixed
from tree.policies.talon import Talon
from tree.retrieval import PruneGraft, PruneGraftGrowth
from tree.tree import TokenTree

HALF = math.log(0.5)


def draft(growth: PruneGraftGrowth, q: Drafter, vocab: int) -> list[Ask]:
    """The model's phase."""
    asked: list[Ask] = []
    while (ask := growth.ask("medium")) is not None:
        check_question(growth.tree, ask, vocab)
        asked.append(ask)
        growth.attach("medium", answer(growth.tree, ask, q))
        growth.tree.check()
    return asked


def retrieve(growth: PruneGraftGrowth, q: Drafter, chain: Drafter | None = None, length: int = 0) -> Ask | None:
    """The retriever's turn: candidates from one table, each with a chain of another's best tokens below it."""
    ask = growth.ask("ngram")
    if ask is None:
        return None
    rows = {}
    for node in ask.nodes:
        path = tuple(growth.tree.path_tokens(node))
        row = candidates(q(path), ask.width)
        suffixes = []
        for token in row.tokens:
            below, suffix = (*path, token), []
            for _ in range(length if chain else 0):
                best = candidates(chain(below) if chain else (), 1)
                if not best.tokens:
                    break
                suffix.append((best.tokens[0], best.lps[0]))
                below = (*below, best.tokens[0])
            suffixes.append(tuple(suffix))
        rows[node] = Candidates(row.tokens, row.lps, tuple(suffixes))
    growth.attach("ngram", Answer(rows, {}))
    growth.tree.check()
    return ask


def test_retrieved_chains_fill_the_freed_slots() -> None:
    """Hand-checked: 4 of 6 drafted nodes survive 0.2; the two free slots go to the best part of a retrieved chain."""
    growth = PruneGraft(Fixed(width=2, depth=3), min_probability=0.2).begin(9, vocab_size=8)
    draft(growth, lambda path: (0.6, 0.3, 0.1), 8)
    kept = {(0,), (1,), (0, 0), (0, 0, 0)}  # .6 .3 .36 .216; pruned: (0, 1) .18, (0, 0, 1) .108
    assert paths(growth, growth.verify_nodes()) == kept

    ask = growth.ask("ngram")
    assert ask is not None and paths(growth, ask.nodes) == kept and ask.nodes[0] == 0 and ask.width == 4
    chain = ((6, HALF), (7, HALF), (5, HALF))
    growth.attach("ngram", Answer({0: Candidates((5,), (math.log(0.7),), (chain,))}, {}))
    assert paths(growth, growth.verify_nodes()) == kept | {(5,), (5, 6)}
    assert growth.tree.creator.count("ngram") == 4, "what does not fit stays in the tree, unverified"
    assert growth.num_grafts == 0, "the root belongs to nobody"
    assert growth.ask("ngram") is None and growth.ask("medium") is None


def test_a_retrieved_token_never_displaces_a_survivor() -> None:
    """However sure retrieval is: with no slot free it is not asked, and with one free it gets one."""
    base = Fixed(width=3, depth=2)  # 7 nodes
    full = PruneGraft(base, min_probability=0.0).begin(9, vocab_size=8)
    draft(full, lambda path: (0.5, 0.3, 0.2), 8)
    before = full.verify_nodes()
    assert full.ask("ngram") is None and full.verify_nodes() == before and len(before) == 7
    one = PruneGraft(base, min_probability=0.151).begin(9, vocab_size=8)
    draft(one, lambda path: (0.5, 0.3, 0.2), 8)
    survivors = one.verify_nodes()
    assert paths(one, survivors) == {(0,), (1,), (2,), (0, 0)}
    retrieve(one, lambda path: (0, 0, 0, 0, 0, 0, 0.5, 0.5))
    assert set(survivors) <= set(one.verify_nodes()) and len(one.verify_nodes()) == 7


def test_a_grafted_node_below_the_models_is_counted() -> None:
    """The count is the evidence that two drafters share a tree."""
    growth = PruneGraft(Fixed(width=2, depth=1, limit=3), min_probability=0.5).begin(9, vocab_size=8)
    draft(growth, lambda path: (0.6, 0.4), 8)
    node = growth.tree.children[0][0]
    growth.attach("ngram", Answer({node: Candidates((3,), (-0.1,), (((4, -0.1),),))}, {}))
    assert growth.num_grafts == 1 and paths(growth, growth.verify_nodes()) == {(0,), (0, 3)}


def test_a_pruned_token_that_is_retrieved_is_the_same_node() -> None:
    """Two nodes with one token under one parent would be verified twice and break the tree."""
    growth = PruneGraft(Fixed(width=3, depth=1), min_probability=0.3).begin(9, vocab_size=8)
    draft(growth, lambda path: (0.6, 0.25, 0.15), 8)
    assert paths(growth, growth.verify_nodes()) == {(0,)}
    growth.attach("ngram", Answer({0: Candidates((1, 0), (-0.1, -2.0), (((5, -0.1),), ()))}, {}))
    growth.tree.check()
    assert paths(growth, growth.verify_nodes()) == {(0,), (1,), (1, 5)}
    again = growth.tree.children[0][1]
    assert growth.tree.scorer[again] == "medium" and growth.tree.edge_lp[again] == pytest.approx(
        {"medium": math.log(0.25), "ngram": -0.1}
    )


def test_pruned_nodes_cost_no_rows() -> None:
    """A branch below the floor can have no descendant above it, so it is not expanded, and drafting ends when none is left."""
    q: Drafter = lambda path: (0.5, 0.3, 0.2)  # noqa: E731
    growth = PruneGraft(Eagle(width=3, depth=5, budget=40), min_probability=0.24).begin(9, vocab_size=3)
    asked = draft(growth, q, 3)
    assert [paths(growth, ask.nodes) for ask in asked] == [set(), {(0,), (1,)}, {(0, 0)}]
    plain = PruneGraft(Eagle(width=3, depth=5, budget=40), min_probability=0.0).begin(9, vocab_size=3)
    draft(plain, q, 3)
    survivors = {v for v in plain.verify_nodes() if plain.tree.score[v] >= math.log(0.24)}
    assert paths(growth, growth.verify_nodes()) == paths(plain, sorted(survivors)), "no survivor was lost by it"


@settings(max_examples=120)
@given(
    seed=st.integers(0, 10**9),
    budget=st.integers(1, 20),
    floor=st.sampled_from([0.0, 0.02, 0.1, 0.3, 1.0]),
    base=st.sampled_from([Eagle(3, 4), Talon(first_width=3), Fixed(3, 4)]),
    is_holey=st.booleans(),
    max_depth=st.sampled_from([None, 0, 2, 5]),
    stop=st.sets(st.integers(0, 5), max_size=2),
)
def test_survivors_stay_and_the_best_retrieved_nodes_follow(
    seed: int, budget: int, floor: float, base: Policy, is_holey: bool, max_depth: int | None, stop: set[int]
) -> None:
    """The definition on random trees: pruned set, free slots, ranking, limits."""
    make = holey_drafter if is_holey else random_drafter
    policy = PruneGraft(base.with_budget(budget), min_probability=floor, frontier=4, width=2)
    growth = policy.begin(9, stop_tokens=frozenset(stop), max_depth=max_depth, vocab_size=6)
    draft(growth, make(seed, 6), 6)
    survivors = set(growth.verify_nodes())
    tree = growth.tree
    assert all(tree.score[v] >= (math.log(floor) if floor else -math.inf) for v in survivors)
    size = len(tree)
    retrieve(growth, make(seed + 1, 6), make(seed + 2, 6), length=3)
    nodes = set(check_cut(growth, policy.budget))
    assert survivors <= nodes and set(range(size, len(tree))) >= {v for v in nodes - survivors if v >= size}
    if growth.retrieved:
        worst = min(tree.score[v] for v in growth.retrieved)
        left_out = [v for v in range(size, len(tree)) if v not in nodes]
        assert all(tree.score[v] <= worst + 1e-8 for v in left_out), "a better retrieved node was left out"
        assert not left_out or len(nodes) == policy.budget, "a free slot was left empty"
    for v in range(1, len(tree)):
        assert tree.parent[v] == 0 or tree.token[tree.parent[v]] not in stop, "an end token was expanded"
        assert max_depth is None or tree.depth[v] <= max_depth
        assert tree.token[v] < 6 and tree.score[v] > -math.inf


def test_it_works_with_the_lookup_drafter() -> None:
    """What the real retriever answers must be usable: chains, terminal nodes, scores."""
    text = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    growth = PruneGraft(Fixed(width=2, depth=2), min_probability=0.5).begin(3, vocab_size=8)
    draft(growth, lambda path: (0, 0, 0, 0, 0.3, 0, 0, 0.6), 8)
    assert paths(growth, growth.verify_nodes()) == {(7,)}
    ngram = NgramDrafter()
    ask = growth.ask("ngram")
    assert ask is not None
    (reply,) = ngram.propose([DraftRequest(ngram.open(), text, growth.tree, ask)])
    assert isinstance(reply, Answer)
    growth.attach("ngram", reply)
    growth.tree.check()
    # Pruned at 0.3, but the text says that 4, 5, 6 come next.
    assert paths(growth, check_cut(growth, 5)) == {(7,), (4,), (4, 5), (4, 5, 6)}


def test_retrieval_alone_is_a_tree_too() -> None:
    """If the model gives up before its first answer, the step is prompt lookup and not nothing."""
    growth = PruneGraft(Eagle(budget=5)).begin(9, vocab_size=8)
    assert retrieve(growth, lambda path: (0.5, 0.3, 0.2), lambda path: (0.0, 1.0), length=2) is not None
    assert len(check_cut(growth, 5)) == 5 and growth.ask("medium") is None


def test_a_sampled_tree_is_refused() -> None:
    """Pruning sampled nodes by score makes every ratio rule lossy."""

    @dataclass(frozen=True)
    class Sampled:
        base: Policy = Fixed()
        budget: int = 9

        def with_budget(self, budget: int) -> Sampled:
            return self

        def begin(self, root_token: int, **limits: object) -> object:
            growth = self.base.begin(root_token, vocab_size=4)
            growth.tree = TokenTree(root_token, TreeKind.IID)
            return growth

    with pytest.raises(ValueError, match="sampled"):
        PruneGraft(Sampled()).begin(0, vocab_size=4)  # type: ignore[arg-type]


def test_a_smaller_budget_keeps_the_other_parameters() -> None:
    """Load sharing cuts the budget; it must not reset the floor."""
    policy: Policy = PruneGraft(Eagle(3, 4, 30), min_probability=0.2, retriever="small")
    assert policy.budget == 30
    assert policy.with_budget(9) == PruneGraft(Eagle(3, 4, 9), min_probability=0.2, retriever="small")


@pytest.mark.parametrize("bad", [{"frontier": 0}, {"width": 0}, {"min_probability": -0.1}, {"min_probability": math.nan}])
def test_nonsense_parameters_are_refused(bad: dict[str, float]) -> None:
    """A bad configuration must fail at start, with the name of the key."""
    with pytest.raises(ValueError, match=next(iter(bad))):
        PruneGraft(Eagle(), **bad)  # type: ignore[arg-type]
