"""Static trees: the same number of nodes per layer, or the same rank paths, in every step."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.policy_world import Drafter, Path, check_cut, grow, paths, probability, random_drafter
from tree.growth import Answer, Candidates, Policy
from tree.policies.eagle import Eagle
from tree.policies.fixed import DEFAULT_TEMPLATE, Fixed, Template
from tree.policies.layers import LayerGrowth


def ranked(q: Drafter, path: Path) -> list[int]:
    """Tokens after a path, most probable first."""
    row = q(path)
    return sorted(range(len(row)), key=lambda token: (-row[token], token))


def layers_by_definition(q: Drafter, width: int, depth: int) -> list[list[Path]]:
    """K parents, each with its K best tokens, the K best of all: the definition on paths."""
    layers: list[list[Path]] = [[()]]
    for _ in range(depth):
        pool = [(*path, token) for path in layers[-1] for token in ranked(q, path)[:width]]
        layers.append(sorted(pool, key=lambda path: -probability(q, path))[:width])
    return layers


@given(seed=st.integers(0, 10**9), width=st.integers(1, 5), depth=st.integers(0, 4))
def test_every_layer_holds_its_k_best(seed: int, width: int, depth: int) -> None:
    """The baseline of every comparison must be what it is called, or all gains over it are wrong."""
    q = random_drafter(seed, 6)
    policy = Fixed(width, depth)
    growth, asked = grow(policy, q, 6)
    layers = layers_by_definition(q, width, depth)
    assert paths(growth) == {path for layer in layers[1:] for path in layer}
    assert len(growth.verify_nodes()) == len(growth.tree) == policy.budget == 1 + width * depth
    assert len(asked) == depth, "one forward per layer"


@given(seed=st.integers(0, 10**9), width=st.integers(1, 4), depth=st.integers(1, 4))
def test_a_fixed_tree_is_eagle_without_its_rerank(seed: int, width: int, depth: int) -> None:
    """Both must expand the very same nodes, so that comparing them measures the rerank and nothing else."""
    q = random_drafter(seed, 5)
    fixed, asked = grow(Fixed(width, depth), q, 5)
    eagle, expanded = grow(Eagle(width, depth, budget=1000), q, 5)
    assert [paths(fixed, ask.nodes) for ask in asked] == [paths(eagle, ask.nodes) for ask in expanded]


@given(seed=st.integers(0, 10**9), width=st.integers(1, 5), depth=st.integers(1, 4), budget=st.integers(1, 24))
def test_a_smaller_budget_verifies_the_best_of_the_same_tree(seed: int, width: int, depth: int, budget: int) -> None:
    """Drafting less for a smaller budget is only right if nothing is lost that the budget could have held."""
    q = random_drafter(seed, 6)
    growth, asked = grow(Fixed(width, depth).with_budget(budget), q, 6)
    full = {path for layer in layers_by_definition(q, width, depth)[1:] for path in layer}
    best = sorted(full, key=lambda path: -probability(q, path))[: budget - 1]
    assert paths(growth, check_cut(growth, budget)) == set(best)
    assert all(len(ask.nodes) <= budget - 1 and ask.width <= budget - 1 for ask in asked)


def test_budgets_only_cut() -> None:
    """More than the tree has is no reason to draft another tree."""
    assert Fixed(3, 4).budget == 13 and Fixed(3, 4).with_budget(99).budget == 13 and Fixed(3, 4).with_budget(5).budget == 5
    assert Fixed(3, 0).budget == 1 and grow(Fixed(3, 0), random_drafter(0, 4), 4)[1] == []
    assert Template().budget == 1 + len(DEFAULT_TEMPLATE) == Template().with_budget(99).budget
    assert Template().with_budget(4).paths == DEFAULT_TEMPLATE[:3]
    assert Template(()).budget == 1 and grow(Template(()), random_drafter(0, 4), 4)[1] == []


SOME: tuple[Path, ...] = ((0,), (2,), (0, 0), (2, 0), (2, 3), (2, 0, 1), (2, 0, 1, 0))


@pytest.mark.parametrize("template", [DEFAULT_TEMPLATE, SOME, ((1,), (1, 1))], ids=["default", "gaps", "no best child"])
@pytest.mark.parametrize("seed", range(5))
def test_a_template_becomes_its_rank_paths(template: tuple[Path, ...], seed: int) -> None:
    """Off by one rank and every measured acceptance by rank would be laid on the wrong nodes."""
    q = random_drafter(seed, 7)
    growth, asked = grow(Template(template), q, 7)

    def tokens(ranks: Path) -> Path:
        path: Path = ()
        for rank in ranks:
            path = (*path, ranked(q, path)[rank])
        return path

    assert paths(growth) == {tokens(ranks) for ranks in template}
    assert growth.verify_nodes() == list(range(1 + len(template)))
    assert isinstance(growth, LayerGrowth)
    assert {growth.rank_path(node) for node in range(1, len(growth.tree))} == set(template)
    assert len(asked) == max(map(len, template)), "one forward per layer"
    parents = {ranks[:-1] for ranks in template}
    assert {growth.rank_path(node) for ask in asked for node in ask.nodes} == parents, "only parents cost rows"
    for depth, ask in enumerate(asked):
        assert ask.width == 1 + max(ranks[-1] for ranks in template if len(ranks) == depth + 1)


def test_a_drafter_with_few_candidates_leaves_the_rest_of_a_template_out() -> None:
    """A missing rank must not be filled by another one, and what hangs below it is gone with it."""
    q: Drafter = lambda path: (0.9, 0.1)  # noqa: E731
    growth, _ = grow(Template(SOME), q, 5)
    assert paths(growth) == {(0,), (0, 0)}


def test_ranks_count_what_can_be_a_node() -> None:
    """A padded drafter's foreign token takes no rank away, and impossible tokens have none."""
    growth = Template(((0,), (1,))).begin(0, vocab_size=4)
    assert growth.ask("medium") is not None
    growth.attach("medium", Answer({0: Candidates((7, 3, 2, 1), (-0.1, -0.5, -1.0, -math.inf))}, {}))
    assert growth.tree.token[1:] == [3, 2] and growth.ranks[1:] == [0, 1]


def test_a_fixed_tree_stops_where_branches_must() -> None:
    """Tokens after an end token or past the context end would be drafted and verified in vain."""
    q = random_drafter(3, 4)
    stopped, _ = grow(Fixed(3, 4), q, 4, stop=frozenset({1, 2}))
    assert not any({1, 2} & set(path[:-1]) for path in paths(stopped))
    assert max(grow(Template(), q, 4, max_depth=2)[0].tree.depth) == 2


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda: Fixed(width=0), "width"),
        (lambda: Fixed(depth=-1), "depth"),
        (lambda: Fixed(limit=0), "limit"),
        (lambda: Fixed().with_budget(0), "budget"),
        (lambda: Template().with_budget(0), "budget"),
        (lambda: Template(((0,), (0,))), "paths"),
        (lambda: Template(((0, 0), (0,))), "paths"),
        (lambda: Template(((0,), (-1,))), "paths"),
        (lambda: Template(((),)), "paths"),
    ],
)
def test_nonsense_parameters_are_refused(build: object, name: str) -> None:
    """A bad configuration must fail at start, with the name of the key."""
    with pytest.raises(ValueError, match=name):
        build()  # type: ignore[operator]


def test_they_are_policies() -> None:
    """What the engine will hold must satisfy its protocol."""
    policies: list[Policy] = [Fixed(), Template()]
    assert all(policy.begin(0, vocab_size=9).verify_nodes() == [0] for policy in policies)
