"""What the engine relies on, whatever policy grows the tree and whatever a drafter answers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from scheduler.schedule import Action, Schedule, Word
from tests.engine_world import World
from tests.policy_world import Drafter, answer, check_cut, check_question, grow, holey_drafter, paths, random_drafter
from tree.graft import TreeGraft
from tree.growth import Answer, Candidates, Growth, Policy
from tree.policies import POLICIES
from tree.policies.adaptive_shape import AdaptiveShape, ShapeHistory
from tree.policies.chain import Chain
from tree.policies.eagle import Eagle
from tree.policies.fixed import Fixed, Template
from tree.policies.layers import LayerGrowth, LayerPolicy
from tree.policies.opt_tree import OptTree
from tree.policies.sequoia import Sequoia
from tree.policies.talon import Talon
from tree.retrieval import PruneGraft
from tree.tree import TokenTree

VOCAB = 6

ALL: dict[str, Policy] = {
    **POLICIES,
    "small chain": Chain(2),
    "small fixed": Fixed(3, 3),
    "small template": Template(((1,), (0,), (1, 2), (1, 2, 0))),
    "small eagle": Eagle(3, 4, 14),
    "small talon": Talon(15, 4, 0.1, depth_cap=None),
    "gate from the start": Talon(15, 4, 0.3, robust_layers=0),
    "patient opt_tree": OptTree(12, -1.0, 6),
    "deep sequoia": Sequoia((0.8, 0.1), 12, 11),
    "tripped shape": AdaptiveShape(history=ShapeHistory(0.2, 5)),
    "doubtful shape": AdaptiveShape(history=ShapeHistory(0.4, 1)),
    "graft": TreeGraft(steps=4, frontier=3, width=3, budget=16),
    "prune": PruneGraft(Eagle(3, 4, 14), min_probability=0.1, retriever="small"),
}
DRAFTERS = ("medium", "small")

every_policy = pytest.mark.parametrize("policy", [pytest.param(policy, id=name) for name, policy in ALL.items()])
limits = given(
    seed=st.integers(0, 10**9),
    budget=st.none() | st.integers(1, 20),
    stop=st.sets(st.integers(0, VOCAB - 1), max_size=3),
    max_depth=st.none() | st.integers(0, 6),
    drafters=st.sampled_from([("medium",), ("small",), ("medium", "small"), ("small", "medium", "medium")]),
    is_holey=st.booleans(),
)


def grow_in_turns(growth: Growth, q: dict[str, Drafter], drafters: tuple[str, ...]) -> int:
    """Let drafters take turns until each of them was turned away in a row; returns the number of answers."""
    answers, refusals = 0, 0
    for drafter in cycle(drafters):
        ask = growth.ask(drafter)
        if ask is None:
            refusals += 1
            if refusals == len(drafters):
                return answers
            continue
        refusals = 0
        check_question(growth.tree, ask, VOCAB)
        before = list(growth.tree.token)
        growth.attach(drafter, answer(growth.tree, ask, q[drafter]))
        growth.tree.check()
        assert growth.tree.token[: len(before)] == before, "an existing node changed"
        check_cut(growth, 10**6)
        answers += 1
        assert answers < 100, "does not end"
    return answers


@every_policy
@settings(max_examples=25)
@limits
def test_every_tree_is_one_that_the_target_can_verify(
    policy: Policy,
    seed: int,
    budget: int | None,
    stop: set[int],
    max_depth: int | None,
    drafters: tuple[str, ...],
    is_holey: bool,
) -> None:
    """One broken promise here is an exception, an endless loop or a wrong text in some request, some day."""
    if budget is not None:
        policy = policy.with_budget(budget)
        assert 1 <= policy.budget <= budget
    make = holey_drafter if is_holey else random_drafter
    q = {name: make(seed + i, VOCAB) for i, name in enumerate(DRAFTERS)}
    growth = policy.begin(0, stop_tokens=frozenset(stop), max_depth=max_depth, vocab_size=VOCAB)
    grow_in_turns(growth, q, drafters)
    tree = growth.tree
    nodes = check_cut(growth, policy.budget)
    assert growth.verify_nodes() == nodes, "asking again must not change the cut"
    grafts = 0
    for node in range(1, len(tree)):
        parent = tree.parent[node]
        assert 0 <= tree.token[node] < VOCAB, "a token that the target does not have"
        assert parent == 0 or tree.token[parent] not in stop, "an end token was expanded"
        assert max_depth is None or tree.depth[node] <= max_depth
        grafts += parent != 0 and tree.creator[parent] != tree.creator[node]
    assert growth.num_grafts == grafts
    if not isinstance(growth, LayerGrowth):
        return
    assert all(tree.score[node] > -math.inf for node in range(len(tree))), "a token that nothing can accept"
    assert growth.num_layers >= max(tree.depth)
    if len(drafters) == 1 and not is_holey and budget is None and max_depth is None and not stop:
        assert len(nodes) > 1, "a willing drafter and no limits, yet nothing was drafted"


@every_policy
def test_the_root_is_expanded_even_if_it_is_an_end_token(policy: Policy) -> None:
    """With end tokens ignored, generation goes on after one; speculation must too."""
    growth = policy.begin(1, stop_tokens=frozenset({1}), vocab_size=VOCAB)
    assert growth.ask("medium") is not None


@every_policy
def test_a_budget_or_depth_without_room_asks_nothing(policy: Policy) -> None:
    """A drafter forward whose answer cannot be verified is paid for nothing."""
    for growth in (policy.with_budget(1).begin(0, vocab_size=VOCAB), policy.begin(0, max_depth=0, vocab_size=VOCAB)):
        assert growth.ask("medium") is None and growth.ask("small") is None
        assert growth.verify_nodes() == [0]


@every_policy
def test_a_drafter_without_an_answer_ends_the_growth(policy: Policy) -> None:
    """No candidates at all, at the root or later, must not be asked about again for ever."""
    growth = policy.begin(0, vocab_size=VOCAB)
    assert growth.ask("medium") is not None
    growth.attach("medium", Answer({}, {}))
    assert growth.verify_nodes() == [0]
    assert growth.ask("medium") is None
    later = policy.begin(0, vocab_size=VOCAB)
    for q in (random_drafter(0, VOCAB), lambda path: ()):
        ask = later.ask("medium")
        if ask is not None:
            later.attach("medium", answer(later.tree, ask, q))
    later.tree.check()
    check_cut(later, policy.budget)


@every_policy
def test_the_same_drafter_gives_the_same_tree(policy: Policy) -> None:
    """Runs must be reproducible, ties included; policies are shared, so one growth must leave no trace in another."""
    for q in (random_drafter(5, VOCAB), lambda path: [1 / VOCAB] * VOCAB, holey_drafter(5, VOCAB)):
        first, _ = grow(policy, q, VOCAB)
        second, _ = grow(policy, q, VOCAB)
        assert first.tree.token == second.tree.token and first.tree.parent == second.tree.parent
        assert first.verify_nodes() == second.verify_nodes()


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_a_perfect_drafter_is_accepted(name: str, seed: int) -> None:
    """With the target as drafter, greedy decoding must find its next token in every tree, and a chain is accepted whole."""
    q = random_drafter(seed, VOCAB, sharpness=3.0)
    growth, _ = grow(POLICIES[name], q, VOCAB)
    kept = paths(growth, growth.verify_nodes())
    accepted: tuple[int, ...] = ()
    while True:
        row = q(accepted)
        following = (*accepted, max(range(VOCAB), key=lambda token: row[token]))
        if following not in kept:
            break
        accepted = following
    assert len(accepted) == 4 if name == "chain" else accepted


@pytest.mark.parametrize("p", [0.6, 0.55, 0.52, 0.7])
def test_sums_of_the_same_edges_are_ties_in_any_order(p: float) -> None:
    """Added in another order they differ in the last bit, and which node is kept would depend on the machine."""
    growth, _ = grow(Eagle(width=4, depth=4, budget=200), lambda path: (p, 0.9 - p, 0.1), 3)
    tree = growth.tree
    for depth in range(1, 5):
        groups: dict[tuple[int, ...], list[int]] = {}
        for node in range(1, len(tree)):
            if tree.depth[node] == depth:
                groups.setdefault(tuple(sorted(tree.path_tokens(node))), []).append(tree.parent[node])
        assert all(parents == sorted(parents) for parents in groups.values()), "ties go by the order of the parents"


def test_a_rounding_above_certainty_gains_nothing() -> None:
    """A float32 softmax may give a log-probability just above 0; it must not overtake a certain token."""
    growth = Fixed(width=2, depth=2).begin(0, vocab_size=4)
    for rows in ({0: (0.5, 0.5)}, {1: (1.0,), 2: (1.00005,)}):
        assert growth.ask("medium") is not None
        answers = {node: Candidates(tuple(range(len(row))), tuple(map(math.log, row))) for node, row in rows.items()}
        growth.attach("medium", Answer(answers, {}))
    assert growth.tree.parent == [-1, 0, 0, 1, 2]


def test_a_frozen_policy_can_be_a_key() -> None:
    """Schedules compare and cache policies by value."""
    for policy in ALL.values():
        assert policy == replace(policy) and hash(policy) == hash(replace(policy))  # type: ignore[type-var]


def test_a_policy_that_admits_a_double_is_seen() -> None:
    """Negative control: a policy that breaks the tree does not pass the checks above."""

    class Twice(LayerPolicy):
        budget = 5

        def wanted(self, growth: LayerGrowth) -> int:
            return 1

        def admitted(self, growth: LayerGrowth, pool):  # type: ignore[no-untyped-def]
            proposal = next(pool)
            return [proposal, proposal]

    with pytest.raises(ValueError, match="already"):
        grow(Twice(), random_drafter(0, VOCAB), VOCAB)


def test_a_cut_without_a_parent_is_seen() -> None:
    """Negative control of the check of final cuts."""

    class Cut:
        tree = TokenTree(0)
        num_grafts = 0

        def verify_nodes(self) -> list[int]:
            return [0, 2]

    Cut.tree.add(Cut.tree.add(0, 1, -0.1, "m"), 2, -0.1, "m")
    with pytest.raises(AssertionError, match="without its parent"):
        check_cut(Cut(), 5)  # type: ignore[arg-type]


ENGINE_POLICIES = {**POLICIES, "prune": PruneGraft(Eagle(4, 4, 20), min_probability=0.02)}


@pytest.mark.parametrize("medium", ["hostile", "self"])
def test_the_engine_writes_the_targets_text_with_every_policy(tiny_model: Callable[..., PreTrainedModel], medium: str) -> None:
    """The promise of speculation, through real caches: greedy with a perfect drafter, seeded sampling with a useless one."""
    target = tiny_model("llama", 40, 1)
    schedules = [
        Schedule(name, "", policy.with_budget(9), Word("MMMS"), {Action.MEDIUM: "medium", Action.SMALL: "ngram"})
        for name, policy in ENGINE_POLICIES.items()
    ]
    prompt, num_tokens = [3, 1, 4, 1, 5, 9, 2, 6], 10 if medium == "self" else 4
    other = target if medium == "self" else tiny_model("llama", 40, 9)
    options = {} if medium == "self" else {"temperature": 1.0, "seed": 7}
    with World(target, medium=other, schedules=schedules) as world:
        plain = world.run(prompt, "ar", max_tokens=num_tokens, **options)
        for schedule in schedules:
            reply = world.run(prompt, schedule.name, max_tokens=num_tokens, **options)
            assert reply.tokens == plain.tokens, schedule.name
            assert reply.stats.num_drafted > 0 and not reply.stats.halts
            if medium == "self":
                accepted = reply.stats.num_accepted
                assert accepted >= 0.4 * num_tokens, f"{schedule.name} accepted {accepted} of {num_tokens}"  # one per step
