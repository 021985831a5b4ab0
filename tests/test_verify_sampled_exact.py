"""Lossless on sampled trees, exactly: the drawing of the tree and every decision of the rule are enumerated."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch

from models.sampling import SamplingParams, probabilities
from tests.verify_world import (
    CONTEXTS,
    DEPTH,
    OTHER_RULES,
    RULES,
    SHAPES,
    TEXTS,
    VOCAB,
    Drawn,
    Rule,
    World,
    by_node,
    context_of,
    distinct_children,
    drawn,
    emitted_law,
    error,
    normal,
    one_sampled,
    own_proposals,
    paths,
    program_chances,
    solving,
    world,
    worlds,
)
from tree.draws import TreeKind
from tree.growth import Answer
from tree.policies.one_sampled import OneSampled
from tree.policies.sampled import Delayed, Iid, SampledPolicy, WithoutReplacement
from tree.tree import TokenTree
from verify import EVERY_VERIFIER, RATIO_VERIFIERS, check_pair
from verify.base import Verdict
from verify.reference import Chooser, Chosen, Decisions, outcomes, spectr, traversal_reference, walk_reference
from verify.reference.bottom_up import block_reference
from verify.reference.top_down import Row, chosen_law, excess

ORDINARY = worlds()["ordinary"]


def walk_rule(tree: TokenTree, rows: Mapping[int, Row], proposals: Mapping[int, Row], decisions: Decisions) -> Verdict:
    """The target-sampling walk in the clothes of a ratio rule."""
    return walk_reference(tree, sorted(rows), [rows[node] for node in sorted(rows)], decisions.pick)


ALL_RULES = {**RULES, **OTHER_RULES, "walk": walk_rule}


KINDS = {shape: build(ORDINARY[1], lambda depth, weights: 0).kind for shape, build in SHAPES.items()}


def accepted_pairs() -> list[tuple[str, str]]:
    """(rule, shape) for all shapes whose kind the rule accepts."""
    pairs = []
    for name, shape in itertools.product(ALL_RULES, SHAPES):
        verifier = EVERY_VERIFIER[name.split(",")[0]]
        if KINDS[shape] in verifier.accepts and not (verifier.needs_chain and "chain" not in shape):
            pairs.append((name, shape))
    return pairs


def expanded(tree: TokenTree) -> TokenTree:
    """A copy in which all children count as drawn, in the order of their creation."""
    tree = copy.deepcopy(tree)
    tree.draws = {node: list(children) for node, children in enumerate(tree.children) if children}
    return tree


def reordered(trees: Drawn, key: Callable[[tuple[int, ...], int], float]) -> Drawn:
    """Trees whose draws are sorted by a key of (context, token)."""
    changed = []
    for weight, tree in trees:
        tree = copy.deepcopy(tree)
        for node, tokens in tree.draws.items():
            context = context_of(tree, node)
            tokens.sort(key=lambda token, context=context: key(context, token))  # type: ignore[misc]
        changed.append((weight, tree))
    return changed


def law_over(rule: Rule, trees: list[tuple[float, tuple[TokenTree, list[int]]]], p: World) -> dict[tuple[int, ...], float]:
    """The law of the emitted text over trees of which only some nodes are verified."""
    law: dict[tuple[int, ...], float] = {}
    for weight, (tree, nodes) in trees:
        given = (tree, {node: p[context_of(tree, node)] for node in nodes}, own_proposals(tree))
        for chance, verdict in outcomes(lambda choose, given=given: rule(*given, Chosen(choose))):
            text = tuple(tree.token[node] for node in verdict.path) + (verdict.extra,)
            law[text] = law.get(text, 0.0) + weight * chance
    return law


def rows_of(q: World) -> Callable[[TokenTree], dict[int, Row]]:
    """Proposals that ignore what the tree keeps."""
    return lambda tree: by_node(tree, q)


# -------------------------------------------------------------------------------------------------------------- exactness


@pytest.mark.parametrize("name", worlds())
def test_every_rule_is_exact_on_every_tree_it_accepts(name: str) -> None:
    """If this failed, answers under that rule would not be the target's, for ordinary rows or for rows at the edges."""
    p, q = worlds()[name]
    trees = {shape: drawn(build, q) for shape, build in SHAPES.items()}
    for rule, shape in accepted_pairs():
        if name != "ordinary" and (rule in OTHER_RULES or "(3" in shape):
            continue
        found = error(emitted_law(ALL_RULES[rule], trees[shape], p), p)
        assert found < 1e-12, f"{rule} on {shape}: {found}"


def test_every_accepted_kind_is_proved() -> None:
    """A verifier that claims a kind without a proof above would be trusted for nothing."""
    proved = {(rule.split(",")[0], KINDS[shape]) for rule, shape in accepted_pairs()}
    for name, verifier in RATIO_VERIFIERS.items():
        assert verifier.lossless and {(name, kind) for kind in verifier.accepts} <= proved


def test_three_paths_are_exact() -> None:
    """Three draws at a node and longer lists: multiplicity two under a repeated child, two refusals in a row."""
    p, q = worlds()["other"]
    trees = drawn(paths(3, 0, 2, TreeKind.IID), q)
    assert len(trees) == 729
    for name in ("naive", "specinfer", "spectr", "traversal"):
        assert error(emitted_law(ALL_RULES[name], trees, p), p) < 1e-12, name


@pytest.mark.parametrize("temperature", [0.2, 1.0, 1.2])
def test_processed_rows_are_what_is_exact(temperature: float) -> None:
    """Temperature, top-k and top-p belong to the law that clients ask for, and to the row that drafts are drawn from."""
    generator = torch.Generator().manual_seed(5)
    logits = [torch.randn(len(CONTEXTS), VOCAB, generator=generator) / 2 for _ in range(2)]
    unnoticed = []
    for top_k, top_p in ((0, 1.0), (2, 1.0), (0, 0.9)):
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
        p, q = (dict(zip(CONTEXTS, map(normal, probabilities(rows, params).double().tolist()), strict=True)) for rows in logits)
        for name, shape in (("naive", "chain"), ("spectr", "2 paths"), ("specinfer-distinct", "distinct 2 x 2")):
            assert error(emitted_law(RULES[name], drawn(SHAPES[shape], q), p), p) < 1e-12
        unprocessed = dict(zip(CONTEXTS, logits[1].double().softmax(-1).tolist(), strict=True))
        unnoticed.append(error(emitted_law(RULES["naive"], drawn(SHAPES["chain"], q), p, rows_of(unprocessed)), p) < 1e-3)
    assert not all(unnoticed), "an unprocessed proposal passes"


def test_a_penalty_needs_every_nodes_own_path() -> None:
    """A repetition penalty changes the target's row at each node by that node's path, not by the verified text alone."""
    plain, q = ORDINARY
    penalized = {
        context: normal([weight * 0.3 ** context.count(token) for token, weight in enumerate(row)])
        for context, row in plain.items()
    }
    trees = drawn(SHAPES["2 paths"], q)
    assert error(emitted_law(RULES["traversal"], trees, penalized), penalized) < 1e-12
    assert error(emitted_law(RULES["traversal"], trees, plain), penalized) > 1e-3, "no test of anything"


# ---------------------------------------------------------------------------------------------------- policies, end to end


ROUND: dict[str, World] = {
    name: {context: rows[sum(context) % 3] for context in CONTEXTS}
    for name, rows in {
        "quarters": [[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.25, 0.25, 0.5]],
        "halves": [[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.5, 0.0, 0.5]],
    }.items()
}
"""Drafters for which equally likely cells of the random numbers are enough to enumerate."""


def grown(policy: SampledPolicy, q: World, cells: int) -> list[tuple[float, tuple[TokenTree, list[int]]]]:
    """All trees of a policy whose draws all fall into one of `cells` equally likely cells."""

    def grow(choose: Chooser) -> tuple[TokenTree, list[int]]:
        growth = policy.begin(
            0, vocab_size=VOCAB, max_depth=DEPTH, uniform=lambda depth, index: (choose(depth, [1.0] * cells) + 0.5) / cells
        )
        while (ask := growth.ask("medium")) is not None:
            rows = {node: torch.tensor(q[context_of(growth.tree, node)], dtype=torch.float64) for node in ask.nodes}
            growth.attach("medium", Answer({}, {}, rows))
        growth.tree.check()
        return growth.tree, growth.verify_nodes()

    return list(outcomes(grow))


@pytest.mark.parametrize(
    ("policy", "q", "cells", "rules"),
    [
        (Iid(2, 2), "quarters", 4, ["naive", "specinfer", "spectr", "traversal"]),
        (Delayed(2, 1, 1), "quarters", 4, ["naive", "specinfer", "spectr", "khisti", "traversal"]),
        (Delayed(1, 1, 1), "quarters", 4, ["naive", "block", "traversal"]),
        (WithoutReplacement((2,)), "quarters", 12, ["naive", "specinfer-distinct", "traversal"]),
        (WithoutReplacement((2, 2)), "halves", 2, ["naive", "specinfer-distinct", "traversal"]),
        (OneSampled(width=2, frontier=3, depth=2, budget=9), "quarters", 2, ["naive"]),
        (OneSampled(width=2, frontier=2, depth=2, budget=4), "quarters", 2, ["naive"]),
        (OneSampled(width=2, frontier=1, depth=2, budget=3), "quarters", 2, ["naive"]),
        (OneSampled(width=1, frontier=1, depth=2, budget=3), "quarters", 4, ["naive"]),
    ],
    ids=str,
)
def test_what_a_policy_really_draws_is_verified_exactly(policy: SampledPolicy, q: str, cells: int, rules: list[str]) -> None:
    """The real code that draws trees, and cuts them, under the real order of its random numbers."""
    p = ORDINARY[0]
    trees = grown(policy, ROUND[q], cells)
    assert {tree.kind for _, (tree, _) in trees} == {policy.kind}
    for name in rules:
        assert error(law_over(RULES[name], trees, p), p) < 1e-12, name


# ------------------------------------------------------------------------------------- pairs and faults that must be noticed


def top_tokens(width: int) -> Callable[[World, Chooser], TokenTree]:
    """A deterministic tree: the drafter's best tokens at every inner node."""

    def build(q: World, choose: Chooser) -> TokenTree:
        tree = TokenTree(0)
        node = 0
        while node < len(tree):
            row = q[context_of(tree, node)]
            if tree.depth[node] < DEPTH:
                for token in sorted(range(VOCAB), key=lambda t: -row[t])[:width]:
                    tree.add(node, token, math.log(row[token]), "medium")
            node += 1
        return tree

    return build


WRONG_SHAPES = {
    TreeKind.DETERMINISTIC: top_tokens(2),
    TreeKind.IID: paths(2, 0, 2, TreeKind.IID),
    TreeKind.DELAYED: paths(2, 1, 1, TreeKind.DELAYED),
    TreeKind.WITHOUT_REPLACEMENT: distinct_children(2, 2),
    TreeKind.ONE_SAMPLED: one_sampled(2),
}


@pytest.mark.parametrize("kind", TreeKind)
@pytest.mark.parametrize("name", RATIO_VERIFIERS)
def test_every_refused_pair_is_really_wrong(name: str, kind: TreeKind) -> None:
    """A rule refused where it is right would be lost for nothing; and enumeration must see that the others are wrong."""
    if kind in RATIO_VERIFIERS[name].accepts:
        check_pair(RATIO_VERIFIERS[name], kind)
        return
    with pytest.raises(ValueError, match=f"the {name} rule cannot verify {kind.value} trees: "):
        check_pair(RATIO_VERIFIERS[name], kind)
    p, q = ORDINARY
    build = top_tokens(1) if name == "block" and kind is TreeKind.DETERMINISTIC else WRONG_SHAPES[kind]
    trees = drawn(build, q)
    if kind in (TreeKind.DETERMINISTIC, TreeKind.ONE_SAMPLED):
        trees = [(weight, expanded(tree)) for weight, tree in trees]
    try:
        assert error(emitted_law(RULES[name], trees, p, rows_of(q)), p) > 1e-3
    except ZeroDivisionError:  # a repeat is drawn although q excludes it by then: not even defined
        assert name == "specinfer-distinct" and kind in (TreeKind.IID, TreeKind.DELAYED)
    except ValueError:  # a branch where the rule knows only chains
        assert name == "block" and kind is TreeKind.ONE_SAMPLED


@pytest.mark.parametrize("order", ["by id", "by p/q"])
@pytest.mark.parametrize(
    ("rule", "shape"), [("traversal", "2 paths"), ("traversal", "distinct 2 x 2"), ("specinfer-distinct", "distinct 2 x 2")]
)
def test_sorted_siblings_are_caught(rule: str, shape: str, order: str) -> None:
    """Sorting siblings, as any tidy container would, breaks the law where the drawing order is part of it."""
    p, q = ORDINARY
    key = {"by id": lambda context, token: token, "by p/q": lambda context, token: p[context][token] / q[context][token]}
    trees = drawn(SHAPES[shape], q)
    assert error(emitted_law(RULES[rule], trees, p), p) < 1e-12
    assert error(emitted_law(RULES[rule], reordered(trees, key[order]), p), p) > 1e-3


@pytest.mark.parametrize("rule", ["naive", "specinfer", "spectr", "khisti", "traversal"])
def test_pruning_drawn_tokens_by_score_is_caught(rule: str) -> None:
    """Keeping the likelier of two draws looks harmless and makes likely tokens too likely."""
    p, q = ORDINARY

    def likelier(q: World, choose: Chooser) -> TokenTree:
        tree = paths(2, 0, 1, TreeKind.IID)(q, choose)
        tree.draws[0] = [max(tree.draws[0], key=lambda token: q[()][token])]
        return tree

    trees = list(outcomes(lambda choose: likelier(q, choose)))
    assert error(emitted_law(RULES[rule], trees, p), p) > 1e-3


@pytest.mark.parametrize("ranked", ["by its own q", "by a proxy"])
def test_a_sampled_child_ranked_by_its_own_probability_is_caught(ranked: str) -> None:
    """Dropping the sampled child when it is unlikely is the same mistake; dropping it whatever it is, is none."""
    p, q = ORDINARY

    def cut(q: World, choose: Chooser) -> TokenTree:
        tree = one_sampled(2)(q, choose)
        for node, (token,) in list(tree.draws.items()):
            row = q[context_of(tree, node)]
            if (row[token] if ranked == "by its own q" else sorted(row)[0]) < 0.25:
                del tree.draws[node], tree.children[node][token]  # what was below it cannot be reached any more
        return tree

    trees = list(outcomes(lambda choose: cut(q, choose)))
    assert any(len(tree.draws) < 3 for _, tree in trees), "nothing was dropped"
    found = error(emitted_law(RULES["naive"], trees, p), p)
    assert found > 1e-3 if ranked == "by its own q" else found < 1e-12


def test_a_forgotten_child_is_harmless_while_its_draw_is_remembered() -> None:
    """The rule tests the draw whether or not its node got a row of the target; then it may be cut for what it is."""
    p, q = ORDINARY
    trees = []
    for weight, tree in drawn(one_sampled(2), q):
        likely = [0]
        for node in range(1, len(tree)):
            if tree.parent[node] in likely and q[context_of(tree, tree.parent[node])][tree.token[node]] > 0.25:
                likely.append(node)
        trees.append((weight, (tree, likely)))
    assert any(len(nodes) < len(tree) for _, (tree, nodes) in trees)
    assert error(law_over(RULES["naive"], trees, p), p) < 1e-12


@pytest.mark.parametrize("rule", RULES)
def test_a_proposal_at_another_temperature_is_caught(rule: str) -> None:
    """The row must be the one that was drawn from, not the one at temperature 1."""
    p, q = ORDINARY
    sharp = {context: normal([weight**2 for weight in row]) for context, row in q.items()}
    shape = {"specinfer-distinct": "distinct 2 x 2", "block": "chain"}.get(rule, "2 paths")
    trees = drawn(SHAPES[shape], sharp)
    assert error(emitted_law(RULES[rule], trees, p), p) < 1e-12
    assert error(emitted_law(RULES[rule], trees, p, rows_of(q)), p) > 1e-3


def rank_rule_with_the_wrong_law(p: Row, q: Row, draws: Sequence[int], decisions: Decisions, depth: int) -> int | list[float]:
    """Khisti that prefers the better-ranked of the draws but tests it as if it were drawn from q."""
    token = max(draws, key=lambda t: p[t] - q[t] * q[t])
    return token if decisions.accept(depth, p[token] / q[token]) else excess(p, q)


FAULTS: dict[str, tuple[Rule, str]] = {
    "block without the weight": (
        lambda *given: block_reference(*given, is_weighted=False),
        "chain",
    ),
    "traversal from a stale row": (
        lambda *given: traversal_reference(*given, is_stale=True),
        "2 paths",
    ),
    "spectr with rho 1": (solving(spectr(lambda p, q, k: 1.0)), "2 paths"),
    "khisti with the law of another rule": (solving(rank_rule_with_the_wrong_law), "2 paths"),
    "without replacement as with": (RULES["specinfer"], "distinct 2 x 2"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught(fault: str) -> None:
    """Negative controls: enumeration that passes these could not tell an exact rule from a wrong one."""
    rule, shape = FAULTS[fault]
    errors = []
    for p, q in (ORDINARY, worlds()["other"], (world("target 4"), world("drafter 4"))):
        errors.append(error(emitted_law(rule, drawn(SHAPES[shape], q), p), p))
    assert max(errors) > 1e-3, errors


def test_numbers_shared_with_drafting_are_caught() -> None:
    """If a test used the number that drew the token, unlikely draws would always be accepted; integrated over a grid."""
    p, q = ORDINARY[0][()], ORDINARY[1][()]
    size = 3000

    def worst(shared: bool) -> float:
        law = [0.0] * VOCAB
        for i in range(size):
            number = (i + 0.5) / size
            token = next(t for t in range(VOCAB) if number < sum(q[: t + 1]))
            accepted = float(number < p[token] / q[token]) if shared else min(1.0, p[token] / q[token])
            law[token] += accepted / size
            for other, weight in enumerate(normal(excess(p, q))):
                law[other] += (1 - accepted) * weight / size
        return max(abs(a - b) for a, b in zip(law, p, strict=True))

    assert worst(shared=False) < 1e-3 < worst(shared=True)


def test_any_duel_has_the_law_it_says() -> None:
    """Optimality is one thing, exactness another: whatever the program returns, its law must be the chosen token's."""
    p, q = ORDINARY[0][()], ORDINARY[1][()]
    law = q
    for chance in program_chances(p, q, 4):
        counted = [0.0] * VOCAB
        for a, b in itertools.product(range(VOCAB), repeat=2):
            kept = 1.0 if a == b else chance(a, b)
            assert a == b or kept + chance(b, a) == pytest.approx(1.0, abs=1e-15)
            counted[a] += law[a] * q[b] * kept
            counted[b] += law[a] * q[b] * (1 - kept)
        law = chosen_law(law, q, chance)
        assert law == pytest.approx(counted, abs=1e-15)


def test_texts_are_complete() -> None:
    """The error measure itself: the target's own law has none, and a law moved by 0.01 has about that."""
    p = ORDINARY[0]
    law = {text: math.prod(p[text[:i]][text[i]] for i in range(DEPTH + 1)) for text in TEXTS}
    assert error(law, p) < 1e-15
    law[TEXTS[0]] += 0.01
    assert error(law, p) == pytest.approx(0.01)
