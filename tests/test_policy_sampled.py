"""Sampled trees: drawn from the right rows, with the right multiplicity, and shaped by nothing but what was known before."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.noise import DraftNoise
from tree.draws import TreeKind, best_tokens, draw, draw_distinct, record_draws, usable_row, without
from tree.growth import Answer, Ask
from tree.policies.one_sampled import OneSampled
from tree.policies.sampled import Delayed, Iid, SampledGrowth, SampledPolicy, WithoutReplacement
from tree.tree import TokenTree

Rows = dict[tuple[int, ...], torch.Tensor]
POLICIES: list[SampledPolicy] = [
    Delayed(3, 2, 2),
    Delayed(1, 2, 2),
    Delayed(4, 0, 3),
    Iid(3, 3),
    WithoutReplacement((3, 2, 1)),
    OneSampled(width=3, frontier=3, depth=3, budget=9),
    OneSampled(width=1, frontier=2, depth=4, budget=5),
]


def row_after(world: int, path: tuple[int, ...], vocab: int) -> torch.Tensor:
    """A table drafter: a random row with zeros per context."""
    rng = random.Random(f"{world} {path}")
    weights = [rng.random() if rng.random() < 0.7 else 0.0 for _ in range(vocab)]
    weights[rng.randrange(vocab)] += 0.1
    return torch.tensor(weights) / sum(weights)


def answer(growth: SampledGrowth, ask: Ask, world: int, vocab: int) -> Answer:
    return Answer({}, {}, {node: row_after(world, tuple(growth.tree.path_tokens(node)), vocab) for node in ask.nodes})


def grow(
    policy: SampledPolicy,
    world: int = 0,
    seed: int = 0,
    *,
    vocab: int = 6,
    vocab_size: int | None = None,
    stop_tokens: frozenset[int] = frozenset(),
    max_depth: int | None = None,
) -> tuple[SampledGrowth, list[Ask]]:
    """Grow with the table drafter to the end; also what was asked."""
    growth = policy.begin(
        0,
        stop_tokens=stop_tokens,
        max_depth=max_depth,
        vocab_size=vocab if vocab_size is None else vocab_size,
        uniform=DraftNoise(seed, 0),
    )
    asks: list[Ask] = []
    while (ask := growth.ask("medium")) is not None:
        assert ask.wants_rows and ask.nodes and len(set(ask.nodes)) == len(ask.nodes)
        asks.append(ask)
        growth.attach("medium", answer(growth, ask, world, vocab))
        growth.tree.check()
    return growth, asks


# ------------------------------------------------------------------------------------------------------------------ drawing


def test_inversion_has_exactly_the_rows_law() -> None:
    """Golden cells of (.2, 0, .5, .3): a draw from anything but q makes every ratio rule wrong."""
    q = torch.tensor([0.2, 0.0, 0.5, 0.3], dtype=torch.float64)
    assert draw(q, [0.0, 0.19, 0.21, 0.69, 0.71, 1 - 2**-53]) == [0, 0, 2, 2, 3, 3]
    grid = [(i + 0.5) / 1000 for i in range(1000)]
    assert Counter(draw(q, grid)) == {0: 200, 2: 500, 3: 300}
    assert draw(q * 7, grid) == draw(q, grid), "weights need not sum to 1"


@given(seed=st.integers(0, 10**9), number=st.sampled_from([0.0, 2.0**-53, 0.5, 1 - 2.0**-53]))
def test_an_excluded_token_is_never_drawn(seed: int, number: float) -> None:
    """At the ends of the numbers' range rounding is tempted to return a neighbor."""
    q = row_after(seed, (), 9) * (1 + seed % 5)
    assert q[draw(q, [number])[0]] > 0
    distinct = draw_distinct(q, [number] * 12)
    assert len(distinct) == len(set(distinct)) == int((q > 0).sum()), "draws end when q has no more tokens"
    assert all(q[token] > 0 for token in distinct)


@given(seed=st.integers(0, 10**9), size=st.sampled_from([255, 256, 257, 1000]), share=st.sampled_from([0.01, 0.3, 1.0]))
@settings(max_examples=60)
def test_draws_from_a_wide_row_are_inversions(seed: int, size: int, share: float) -> None:
    """Rows are searched block by block; at the seams between blocks a draw must not be lost or go to an excluded token."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.rand(size, generator=generator) * (torch.rand(size, generator=generator) < share)
    q[seed % size] = 0.5
    ends = q.double().cumsum(0)
    seams = [(ends[i] / ends[-1]).item() for i in range(255, size - 1, 256)]
    numbers = [0.0, 1 - 2.0**-53, *torch.rand(50, generator=generator, dtype=torch.float64).tolist(), *seams]
    drawn = draw(q, [min(number, 1 - 2.0**-53) for number in numbers])
    assert all(q[token] > 0 for token in drawn)
    for number, token in zip(numbers, drawn, strict=True):
        before, after = (ends[token] - q[token].double()).item(), ends[token].item()
        assert before - 1e-9 <= number * ends[-1].item() <= after + 1e-9


@given(seed=st.integers(0, 10**9), count=st.integers(1, 12), levels=st.sampled_from([2, 5, 100000]))
@settings(max_examples=60)
def test_best_tokens_are_those_of_a_stable_sort(seed: int, count: int, levels: int) -> None:
    """Finding them without a sort must not change the order, ties included."""
    q = torch.randint(0, levels, (300,), generator=torch.Generator().manual_seed(seed)) / levels
    values, tokens = q.sort(descending=True, stable=True)
    expected = [token for token, value in zip(tokens.tolist(), values.tolist(), strict=True) if value > 0]
    assert best_tokens(q, count) == expected[:count]


def test_draws_without_replacement_renormalize() -> None:
    """Golden: after token 1 the row (.25, .5, .25) is (.5, 0, .5)."""
    q = torch.tensor([0.25, 0.5, 0.25])
    assert draw_distinct(q, [0.5, 0.49, 0.9]) == [1, 0, 2]
    assert draw_distinct(q, [0.5, 0.51]) == [1, 2]
    assert q.tolist() == [0.25, 0.5, 0.25], "the row itself must stay as it was drawn from"


def test_numbers_outside_their_range_are_refused() -> None:
    """A number of 1 would ask for a token behind the last."""
    with pytest.raises(AssertionError, match="outside"):
        draw(torch.tensor([0.5, 0.5]), [1.0])


def test_best_tokens_break_ties_by_id_and_skip_the_impossible() -> None:
    """Otherwise the chosen siblings would depend on a sorting routine."""
    q = torch.tensor([0.2, 0.3, 0.3, 0.2, 0.0])
    assert best_tokens(q, 3) == [1, 2, 0] and best_tokens(q, 9) == [1, 2, 0, 3] and best_tokens(q, 0) == []
    assert without(q, [1, 2]).tolist() == pytest.approx([0.2, 0.0, 0.0, 0.2, 0.0])


@pytest.mark.parametrize("bad", [[0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0], []])
def test_rows_that_are_no_distribution_give_no_draws(bad: list[float]) -> None:
    """A drafter may fail; its row then ends a branch and fails nothing."""
    assert usable_row(torch.tensor(bad), 4) is None and usable_row(None, 4) is None


def test_tokens_outside_the_vocabulary_leave_the_row_before_drawing() -> None:
    """Dropping them after they were drawn would be pruning by value."""
    q = torch.tensor([0.1, 0.3, 0.6], dtype=torch.bfloat16)
    row = usable_row(q, 2)
    assert row is not None and row.dtype == torch.float64 and len(row) == 2
    growth, _ = grow(Iid(4, 2), vocab=6, vocab_size=3)
    assert max(growth.tree.token[1:]) < 3
    assert all(len(q) == 3 for q in growth.tree.proposals.values())


# ------------------------------------------------------------------------------------------------------------------- shapes


@given(
    seed=st.integers(0, 10**9),
    index=st.integers(0, len(POLICIES) - 1),
    max_depth=st.sampled_from([None, 0, 1, 2]),
    stop=st.booleans(),
    budget=st.integers(1, 20),
)
def test_every_policy_keeps_the_trees_promises(seed: int, index: int, max_depth: int | None, stop: bool, budget: int) -> None:
    """Limits, budget and closure hold whatever is drawn; the engine relies on all of them."""
    policy = POLICIES[index].with_budget(budget) if seed % 2 else POLICIES[index]  # type: ignore[attr-defined]
    stop_tokens = frozenset({1, 2}) if stop else frozenset()
    growth, _ = grow(policy, seed, seed, stop_tokens=stop_tokens, max_depth=max_depth)
    tree, nodes = growth.tree, growth.verify_nodes()
    assert tree.kind is policy.kind
    assert nodes[0] == 0 and nodes == sorted(set(nodes)) and len(nodes) <= policy.budget  # type: ignore[attr-defined]
    assert all(tree.parent[node] in nodes for node in nodes[1:])
    assert max(tree.depth) <= (math.inf if max_depth is None else max_depth)
    assert not any(tree.children[node] for node in range(1, len(tree)) if tree.token[node] in stop_tokens)
    if seed % 2:
        assert len(nodes) <= budget
    if policy.kind is not TreeKind.ONE_SAMPLED:
        assert nodes == list(range(len(tree))), "a drawn node was cut"


@given(seed=st.integers(0, 10**9), shape=st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(0, 3)))
def test_a_node_has_as_many_draws_as_paths_through_it(seed: int, shape: tuple[int, int, int]) -> None:
    """Multiplicity is what ratio rules count; the trunk has one draw per node, its end has K."""
    num_paths, trunk, branch = shape
    growth, asks = grow(Delayed(*shape), seed, seed)
    tree = growth.tree
    assert len(asks) == trunk + branch, "one forward per layer"
    assert len(tree) <= 1 + trunk + num_paths * branch
    for node, drawn in tree.draws.items():
        depth = tree.depth[node]
        if depth < trunk:
            assert len(drawn) == 1
        elif depth == trunk:
            assert len(drawn) == num_paths or branch == 0
        else:
            assert len(drawn) == tree.draws[tree.parent[node]].count(tree.token[node])
    for depth in range(trunk, trunk + branch):
        assert sum(len(drawn) for node, drawn in tree.draws.items() if tree.depth[node] == depth) == num_paths


def test_of_324_actions_233_shapes_are_distinct() -> None:
    """Labels are cached by shape; two names of one shape would be measured twice."""
    actions = [Delayed(*action) for action in itertools.product(range(1, 5), range(9), range(9))]
    assert len(actions) == 324 and len({action.canonical() for action in actions}) == 233
    for action in actions[::7]:
        same = action.canonical()
        assert same.canonical() == same and same.budget <= action.budget
        ours, other = (grow(policy, 3, 8)[0].tree for policy in (action, same))
        assert (ours.token, ours.parent, ours.draws) == (other.token, other.parent, other.draws)


def test_paths_that_coincide_share_nodes() -> None:
    """A certain drafter draws one path K times: one chain, K draws per node."""
    growth = Iid(3, 2).begin(0, vocab_size=4, uniform=DraftNoise(0, 0))
    while (ask := growth.ask("small")) is not None:
        growth.attach("small", Answer({}, {}, {node: torch.tensor([0.0, 1.0, 0.0, 0.0]) for node in ask.nodes}))
    assert growth.tree.token == [0, 1, 1] and growth.tree.draws == {0: [1, 1, 1], 1: [1, 1, 1]}
    assert growth.tree.lp == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("policy", "budgets"),
    [
        (Delayed(3, 2, 3), {1: (3, 0, 0), 3: (3, 2, 0), 8: (3, 2, 1), 11: (3, 2, 2), 12: (3, 2, 3), 99: (3, 2, 3)}),
        (Iid(4, 2), {1: (1, 0), 3: (2, 1), 5: (4, 1), 9: (4, 2), 99: (4, 2)}),
    ],
)
def test_a_smaller_budget_draws_less(policy: Delayed | Iid, budgets: dict[int, tuple[int, ...]]) -> None:
    """A sampled tree is made to fit before it is drawn, since it must not be cut afterwards."""
    for budget, shape in budgets.items():
        smaller = policy.with_budget(budget)
        assert smaller == type(policy)(*shape) and smaller.budget <= budget
    with pytest.raises(ValueError, match="budget"):
        policy.with_budget(0)


def test_widths_shrink_to_the_budget() -> None:
    """(3, 2, 1) has 1 + 3 + 6 + 6 nodes."""
    policy = WithoutReplacement((3, 2, 1))
    assert policy.budget == 16
    shapes = {1: (), 3: (2,), 4: (3,), 6: (3,), 7: (3, 1), 10: (3, 2), 15: (3, 2), 16: (3, 2, 1), 99: (3, 2, 1)}
    for budget, widths in shapes.items():
        assert policy.with_budget(budget).widths == widths


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_seed_reproduces_the_tree(policy: SampledPolicy) -> None:
    """And another seed or position does not; the numbers of one step are used once each."""
    first, again, other = (grow(policy, 5, seed)[0].tree for seed in (1, 1, 2))
    assert (first.token, first.parent, first.draws) == (again.token, again.parent, again.draws)
    asked: list[tuple[int, int]] = []

    def uniform(depth: int, index: int) -> float:
        asked.append((depth, index))
        return DraftNoise(1, 0)(depth, index)

    growth = policy.begin(0, vocab_size=6, uniform=uniform)
    while (ask := growth.ask("medium")) is not None:
        growth.attach("medium", answer(growth, ask, 5, 6))
    # A row may have fewer tokens than a node has numbers to draw distinct ones with.
    assert len(asked) == len(set(asked)) >= sum(len(drawn) for drawn in growth.tree.draws.values())
    assert growth.tree.draws == first.draws
    trees = [grow(policy, 5, seed)[0].tree.draws for seed in range(6)]
    assert any(tree != trees[0] for tree in trees) and other.kind is first.kind


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_drafter_without_rows_ends_the_growth(policy: SampledPolicy) -> None:
    """A lookup drafter has no distribution; the step is then plain decoding, or goes on where rows exist."""
    growth = policy.begin(0, vocab_size=6, uniform=DraftNoise(0, 0))
    assert growth.ask("ngram") is not None
    growth.attach("ngram", Answer({}, {}))
    assert growth.ask("ngram") is None and growth.verify_nodes() == [0]
    growth.tree.check()


def test_no_numbers_no_tree() -> None:
    """A silent default would make every request draw the same."""
    for policy in POLICIES:
        with pytest.raises(ValueError, match="random numbers"):
            policy.begin(0, vocab_size=6)


def test_grafts_are_counted() -> None:
    """Layers may come from different drafters; each row is its own drafter's, so verification stays exact."""
    growth = Iid(2, 2).begin(0, vocab_size=6, uniform=DraftNoise(3, 0))
    for drafter in ("small", "medium"):
        ask = growth.ask(drafter)
        assert ask is not None
        growth.attach(drafter, answer(growth, ask, 1, 6))
    second = [node for node in range(len(growth.tree)) if growth.tree.depth[node] == 2]
    assert growth.num_grafts == len(second) > 0
    assert {growth.tree.creator[node] for node in second} == {"medium"}


@pytest.mark.parametrize(
    "build",
    [
        lambda: Delayed(0, 1, 1),
        lambda: Delayed(1, -1, 1),
        lambda: Iid(1, -1),
        lambda: WithoutReplacement((2, 0)),
        lambda: OneSampled(width=0),
        lambda: OneSampled(budget=0),
    ],
)
def test_parameters_are_checked(build: Callable[[], object]) -> None:
    """A shape of nothing would draw nothing, and look like a drafter that never finds anything."""
    with pytest.raises(ValueError, match="must be at least"):
        build()


# -------------------------------------------------------------------------------------------------------------- one sampled


def test_the_sampled_childs_score_does_not_tell_its_token() -> None:
    """Whatever is drawn, the same nodes survive and the same are expanded; else unlikely draws would be pruned away."""
    scores, cuts = set(), set()
    for seed in range(40):
        growth, _ = grow(OneSampled(width=2, frontier=2, depth=1, budget=2), 4, seed)
        tree = growth.tree
        ((sampled,),) = tree.draws.values()
        scores.add(tree.lp[tree.children[0][sampled]])
        cuts.add(tuple(growth.verify_nodes()))
    assert len(scores) == len(cuts) == 1
    q = row_after(4, (), 6)
    best = q.max().item()
    assert scores.pop() == pytest.approx(math.log(min(best, 1 - best)))


def test_chosen_siblings_leave_the_row_that_is_drawn_from() -> None:
    """The row that is kept is r, without the chosen ones; with q itself verification would be wrong."""
    growth, _ = grow(OneSampled(width=3, frontier=2, depth=2, budget=20), 9, 1, vocab=8)
    tree = growth.tree
    assert len(tree.draws) == 3, "the root and two more were expanded"
    for node, (sampled,) in tree.draws.items():
        q = row_after(9, tuple(tree.path_tokens(node)), 8)
        chosen = best_tokens(q, 2)
        assert list(tree.children[node]) == [*chosen, sampled]
        assert torch.equal(tree.proposals[node], without(q, chosen))


def test_a_row_that_is_used_up_by_chosen_siblings_has_no_draw() -> None:
    """With two possible tokens and three children there is nothing left to draw."""
    growth = OneSampled(width=3, depth=1).begin(0, vocab_size=4, uniform=DraftNoise(0, 0))
    growth.attach("small", Answer({}, {}, {0: torch.tensor([0.4, 0.0, 0.6, 0.0])}))
    assert growth.tree.token == [0, 2, 0] and growth.tree.draws == {}
    growth.tree.check()


# -------------------------------------------------------------------------------------------------------------------- trees


def test_draws_and_children_are_checked_together() -> None:
    """Negative controls of check(): each of these would be verified wrongly."""
    q = torch.tensor([0.2, 0.5, 0.3])

    def drawn(kind: TreeKind, tokens: list[int]) -> TokenTree:
        tree = TokenTree(0, kind)
        record_draws(tree, 0, tokens, q, "small")
        tree.check()
        return tree

    reordered = drawn(TreeKind.IID, [1, 2])
    reordered.draws[0] = [2, 1]
    undrawn = drawn(TreeKind.DELAYED, [1, 1])
    undrawn.add(1, 2, -1.0, "small")
    excluded = drawn(TreeKind.IID, [1])
    excluded.proposals[0] = torch.tensor([0.5, 0.0, 0.5])
    repeated = drawn(TreeKind.WITHOUT_REPLACEMENT, [1, 2])
    repeated.draws[0] = [1, 2, 1]
    unrelated = drawn(TreeKind.IID, [1])
    del unrelated.proposals[0]
    sibling = drawn(TreeKind.ONE_SAMPLED, [1])
    sibling.add(0, 2, -1.0, "small")
    claimed = drawn(TreeKind.IID, [1])
    claimed.kind = TreeKind.DETERMINISTIC
    for broken in (reordered, undrawn, excluded, repeated, unrelated, sibling, claimed):
        with pytest.raises(AssertionError):
            broken.check()


def test_draws_are_recorded_once_and_on_sampled_trees_only() -> None:
    """A second list at one node would hide the first from the rule."""
    q = torch.tensor([0.5, 0.5])
    tree = TokenTree(0, TreeKind.IID)
    assert record_draws(tree, 0, [1, 0, 1], q, "small") == [1, 2, 1]
    assert tree.lp[1] == pytest.approx(math.log(0.5)) and tree.creator == ["target", "small", "small"]
    with pytest.raises(ValueError, match="no draws can be put"):
        record_draws(tree, 0, [1], q, "small")
    with pytest.raises(ValueError, match="deterministic"):
        record_draws(TokenTree(0), 0, [1], q, "small")
