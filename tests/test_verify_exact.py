"""Lossless, exactly: the law of the emitted text is the target's law, by enumeration and not by sampling.

The world: 3 tokens, a target and drafters with a random row for each of the 13 contexts of length <= 2. A verified tree
of depth <= 2 emits 1 to 3 tokens; shorter texts are continued by the target to 3, and the joint law of 27 cells is
compared.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch

from tree.graft import TreeGraft
from tree.growth import Answer, Candidates
from tree.tree import TokenTree
from verify.base import Noise, Verdict
from verify.reference import Chooser, outcomes, walk_reference
from verify.walk import race, walk_at_once, walk_lazily

Path = tuple[int, ...]
World = dict[Path, list[float]]
Law = dict[Path, float]
Rows = list[list[float]]
Rule = Callable[[TokenTree, Sequence[int], Rows, Chooser], Verdict]
Walk = Callable[[TokenTree, Sequence[int], torch.Tensor, Noise], Verdict]
Point = tuple[float, ...]  # barycentric, VOCAB numbers that sum to 1
Polygon = list[Point]  # convex, its corners in order

VOCAB, DEPTH = 3, 2
CONTEXTS = [path for length in range(DEPTH + 1) for path in itertools.product(range(VOCAB), repeat=length)]
TEXTS = list(itertools.product(range(VOCAB), repeat=DEPTH + 1))


def world(seed: str, zeros: bool = False) -> World:
    """A random row per context; with `zeros`, some tokens are impossible, as after top-p."""
    rng = random.Random(seed)
    rows: World = {}
    for context in CONTEXTS:
        weights = [rng.expovariate(1.0) + 1e-3 for _ in range(VOCAB)]
        if zeros:
            possible = rng.randrange(VOCAB)
            weights = [w if token == possible or rng.random() < 0.5 else 0.0 for token, w in enumerate(weights)]
        rows[context] = [w / sum(weights) for w in weights]
    return rows


def special_worlds() -> dict[str, World]:
    """Rows at the edges of what a processed target row can be."""
    rng = random.Random(4)
    picks = {context: rng.randrange(VOCAB) for context in CONTEXTS}
    return {
        "one-hot": {context: [float(t == pick) for t in range(VOCAB)] for context, pick in picks.items()},
        "uniform": {context: [1 / 3, 1 / 3, 1 / 3] for context in CONTEXTS},
        "tiny": {context: [1e-12, 1 - 2e-12, 1e-12] for context in CONTEXTS},
        "truncated": world("truncated", zeros=True),
    }


def target_law(p: World) -> Law:
    """The joint law of 3 tokens written by the target alone."""
    return {text: math.prod(p[text[:i]][text[i]] for i in range(DEPTH + 1)) for text in TEXTS}


def rows_of(tree: TokenTree, nodes: Sequence[int], p: World) -> Rows:
    """The target's rows as the engine would hand them over."""
    return [p[tuple(tree.path_tokens(node))] for node in nodes]


def error(emitted: Law, p: World) -> float:
    """Largest error of a cell, after the target has continued every emitted text to full length."""
    law = dict.fromkeys(TEXTS, 0.0)
    for text, probability in emitted.items():
        for rest in itertools.product(range(VOCAB), repeat=DEPTH + 1 - len(text)):
            full = text + rest
            law[full] += probability * math.prod(p[full[:i]][full[i]] for i in range(len(text), DEPTH + 1))
    target = target_law(p)
    return max(abs(law[text] - target[text]) for text in TEXTS)


def law_of(rule: Rule, tree: TokenTree, nodes: Sequence[int], p: World) -> Law:
    """The law of the text that `rule` emits, over all of its random decisions."""
    rows = rows_of(tree, nodes, p)
    law: Law = {}
    for probability, verdict in outcomes(lambda choose: rule(tree, nodes, rows, choose)):
        text = tuple(tree.token[node] for node in verdict.path) + (verdict.extra,)
        law[text] = law.get(text, 0.0) + probability
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
    return law


def random_tree(rng: random.Random, size: int) -> TokenTree:
    """A deterministic tree of depth <= 2: its shape knows nothing of the target."""
    tree = TokenTree(0)
    for _ in range(200):
        parent, token = rng.randrange(len(tree)), rng.randrange(VOCAB)
        if len(tree) < size and tree.depth[parent] < DEPTH and token not in tree.children[parent]:
            tree.add(parent, token, -rng.random(), "small")
    return tree


def top_tree(q: World, width: int) -> TokenTree:
    """The drafter's top tokens at every node, two layers."""
    tree = TokenTree(0)
    for node in itertools.count():
        if node >= len(tree) or tree.depth[node] == DEPTH:
            return tree
        row = q[tuple(tree.path_tokens(node))]
        for token in sorted(range(VOCAB), key=lambda t: -row[t])[:width]:
            tree.add(node, token, math.log(row[token]), "medium")
    raise AssertionError


def grafted(seed: int) -> tuple[TokenTree, list[int]]:
    """A tree grown by two random drafters under a random word, cut to a random budget."""
    rng = random.Random(f"graft {seed}")
    q = {"small": world(f"small {seed}"), "medium": world(f"medium {seed}")}
    policy = TreeGraft(
        steps=3,
        frontier=rng.randint(1, 3),
        width=rng.randint(1, 3),
        budget=rng.randint(2, 9),
        pool=rng.choice(["paper", "lookback"]),
    )
    growth = policy.begin(0, vocab_size=VOCAB, max_depth=DEPTH)
    for _ in range(3):
        drafter = rng.choice(["small", "medium"])
        if (ask := growth.ask(drafter)) is None:
            continue
        tree, candidates = growth.tree, {}
        for node in ask.nodes:
            row = q[drafter][tuple(tree.path_tokens(node))]
            best = sorted(range(VOCAB), key=lambda t: (-row[t], t))[: ask.width]
            candidates[node] = Candidates(tuple(best), tuple(math.log(row[t]) for t in best))
        rescored = {
            u: math.log(q[drafter][tuple(tree.path_tokens(tree.parent[u]))][tree.token[u]])
            for u in range(1, len(tree))
            if ask.rescore
        }
        growth.attach(drafter, Answer(candidates, rescored))
    return growth.tree, growth.verify_nodes()


def clip(polygon: Polygon, inside: Callable[[Point], float]) -> Polygon:
    """The part of a convex polygon where the linear function `inside` is not negative."""
    kept: Polygon = []
    for a, b in zip(polygon, polygon[1:] + polygon[:1], strict=True):
        at_a, at_b = inside(a), inside(b)
        if at_a >= 0:
            kept.append(a)
        if (at_a > 0 > at_b) or (at_a < 0 < at_b):
            share = at_a / (at_a - at_b)
            kept.append(tuple((1 - share) * x + share * y for x, y in zip(a, b, strict=True)))
    return kept


def area(polygon: Polygon) -> float:
    """As a share of the whole triangle: determinants of barycentric coordinates."""
    total = 0.0
    (x0, x1, x2) = polygon[0] if polygon else (0.0, 0.0, 0.0)
    for (y0, y1, y2), (z0, z1, z2) in itertools.pairwise(polygon[1:]):
        total += abs(x0 * (y1 * z2 - y2 * z1) - x1 * (y0 * z2 - y2 * z0) + x2 * (y0 * z1 - y1 * z0))
    return total


def race_cells(rows: Rows) -> list[tuple[float, torch.Tensor]]:
    """(probability, one vector of exponentials) of every set of vectors in which each row's race has one winner.

    Three independent exponentials, divided by their sum, are uniform in a triangle. Token t wins the race of row p
    where ``E_t p_s <= E_s p_t`` for all s, which straight lines bound, so the probabilities are areas.
    """
    polygons: list[Polygon] = [[(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)]]
    for p in {tuple(row) for row in rows}:
        parts: list[Polygon] = []
        for polygon, t in itertools.product(polygons, range(VOCAB)):
            for s in range(VOCAB):
                if s != t:
                    polygon = clip(polygon, lambda e, p=p, s=s, t=t: e[s] * p[t] - e[t] * p[s])  # type: ignore[misc]
            if area(polygon) > 1e-14:  # not mere rounding
                parts.append(polygon)
        polygons = parts
    middles = [[sum(corner[t] for corner in polygon) / len(polygon) for t in range(VOCAB)] for polygon in polygons]
    return [
        (area(polygon), torch.tensor(middle, dtype=torch.float64))
        for polygon, middle in zip(polygons, middles, strict=True)
    ]


@dataclass(frozen=True)
class Given:
    """Noise that was chosen beforehand."""

    vectors: Sequence[torch.Tensor]  # by depth

    def uniform(self, depth: int) -> float:
        raise AssertionError("the walk races; it uses no uniforms")

    def exponentials(self, depth: int, size: int) -> torch.Tensor:
        assert size == VOCAB
        return self.vectors[depth]


def production(walk: Walk, tree: TokenTree, nodes: Sequence[int], p: World, one_vector: bool = False) -> Law:
    """The law of a production walk, over every cell of its noise; `one_vector`: if all depths shared theirs."""
    rows = rows_of(tree, nodes, p)
    at = [[row for node, row in zip(nodes, rows, strict=True) if tree.depth[node] == d] for d in range(DEPTH + 1)]
    if one_vector:
        combinations = [(cell,) * (DEPTH + 1) for cell in race_cells(rows)]
        weights = [combination[0][0] for combination in combinations]
    else:
        combinations = list(itertools.product(*map(race_cells, at)))
        weights = [math.prod(probability for probability, _ in combination) for combination in combinations]
    tensor = torch.tensor(rows, dtype=torch.float64)
    law: Law = {}
    for combination, weight in zip(combinations, weights, strict=True):
        verdict = walk(tree, nodes, tensor, Given([vector for _, vector in combination]))
        text = tuple(tree.token[node] for node in verdict.path) + (verdict.extra,)
        law[text] = law.get(text, 0.0) + weight
    return law


def cases() -> list[tuple[TokenTree, list[int], World]]:
    """Random deterministic trees, trees of top tokens, grafted trees; ordinary and special targets."""
    found = []
    for seed in range(40):
        p = world(f"target {seed}", zeros=seed % 4 == 0)
        tree = random_tree(random.Random(seed), 1 + seed % 12)
        found.append((tree, list(range(len(tree))), p))
        tree, nodes = grafted(seed)
        found.append((tree, nodes, p))
    for p in special_worlds().values():
        for width in (1, 2, 3):
            tree = top_tree(world(f"drafter {width}"), width)
            found.append((tree, list(range(len(tree))), p))
    return found


# -------------------------------------------------------------------------------------------------------- exactness


def test_the_walk_is_exact_on_every_deterministic_tree() -> None:
    """If this failed, the service would change what the model says, which is the one thing it promises not to do."""
    worst = max(error(law_of(walk_reference, tree, nodes, p), p) for tree, nodes, p in cases())
    assert worst < 1e-12


def small_cases() -> list[tuple[TokenTree, list[int], World]]:
    """Those with few cells of noise."""
    return [case for case in cases() if len(case[1]) <= 7]


@pytest.mark.parametrize("walk", [walk_lazily, walk_at_once])
def test_the_production_walk_is_exact(walk: Walk) -> None:
    """The tensor version, integrated over its exponentials instead of sampled: three tokens leave areas of polygons."""
    compared = small_cases()[::4]
    assert len(compared) >= 12
    assert max(error(production(walk, tree, nodes, p), p) for tree, nodes, p in compared) < 1e-12


def test_one_race_has_exactly_the_probabilities() -> None:
    """Every row alone: each token's cells add up to its probability, and impossible tokens have none."""
    for p in [*(world(f"race {seed}", zeros=seed % 2 == 0) for seed in range(10)), *special_worlds().values()]:
        for row in p.values():
            shares = [0.0] * VOCAB
            for probability, vector in race_cells([row]):
                shares[int(race(torch.tensor(row, dtype=torch.float64), vector))] += probability
            assert shares == pytest.approx(row, abs=1e-13)
            assert all(share == 0 for share, weight in zip(shares, row, strict=True) if weight == 0)


@pytest.mark.parametrize("fault", ["flattened", "one vector for all depths", "the parent's row"])
def test_a_wrong_production_walk_is_caught(fault: str) -> None:
    """Negative controls of the integration: it must see wrong rows, wrong races, depths that share a vector."""

    def flattened(tree: TokenTree, nodes: Sequence[int], rows: torch.Tensor, noise: Noise) -> Verdict:
        return walk_lazily(tree, nodes, rows.sqrt(), noise)

    def stale(tree: TokenTree, nodes: Sequence[int], rows: torch.Tensor, noise: Noise) -> Verdict:
        of_parent = [nodes.index(max(tree.parent[node], 0)) for node in nodes]
        return walk_lazily(tree, nodes, rows[of_parent], noise)

    walk = {"flattened": flattened, "the parent's row": stale}.get(fault, walk_lazily)
    errors = []
    for seed in range(5):
        p, tree = world(f"target {seed}"), top_tree(world(f"drafter {seed}"), 2)
        nodes = list(range(len(tree)))
        assert error(production(walk_lazily, tree, nodes, p), p) < 1e-12
        errors.append(error(production(walk, tree, nodes, p, one_vector=fault.startswith("one")), p))
    assert min(errors) > 1e-3, f"{fault}: {errors}"


def test_grafted_trees_really_mix_drafters() -> None:
    """The exactness tests above would say nothing about grafting if their trees came from one drafter."""
    mixed = [tree for tree, nodes in map(grafted, range(40)) if {"small", "medium"} <= set(tree.creator)]
    assert len(mixed) >= 10
    assert any(len(nodes) < len(tree) for tree, nodes in map(grafted, range(40))), "no tree was cut"


def test_expected_acceptance_is_the_targets_mass_on_the_tree() -> None:
    """The identity that makes score-ranked trees the right ones; a wrong walk or a wrong row breaks it."""
    for tree, nodes, p in cases():
        rows = rows_of(tree, nodes, p)
        expected = sum(
            probability * len(verdict.path)
            for probability, verdict in outcomes(lambda choose, a=(tree, nodes, rows): walk_reference(*a, choose))
        )
        mass = 0.0
        for node in nodes[1:]:
            path = tuple(tree.path_tokens(node))
            mass += math.prod(p[path[:i]][path[i]] for i in range(len(path)))
        assert abs(expected - mass) < 1e-12


def test_children_may_be_tried_one_by_one() -> None:
    """The sequential form (accept child x with p(x), else zero it and renormalize) has the same law as one draw."""

    def one_by_one(tree: TokenTree, nodes: Sequence[int], rows: Rows, choose: Chooser) -> Verdict:
        path: list[int] = []
        node = 0
        while True:
            p = list(rows[list(nodes).index(node)])
            for token, child in sorted(tree.children[node].items(), reverse=True):
                if child in nodes and choose(0, [sum(p) - p[token], p[token]]) == 1:
                    path.append(child)
                    node = child
                    break
                p[token] = 0.0 if child in nodes else p[token]
            else:
                return Verdict(tuple(path), choose(0, p))

    compared = 0
    for tree, nodes, p in cases()[:80]:
        # With every token a child, or with impossible ones, the last remainder would be rounding only.
        is_full = any(sum(child in nodes for child in tree.children[node].values()) == VOCAB for node in nodes)
        if not is_full and all(min(row) > 0 for row in p.values()):
            assert error(law_of(one_by_one, tree, nodes, p), p) < 1e-12
            compared += 1
    assert compared >= 20


@pytest.mark.parametrize(("k", "accepted"), [(1, 0.31), (2, 0.507), (3, 0.6379)])
def test_golden_acceptance_rates(k: int, accepted: float) -> None:
    """Hand-checked: p = (.5, .3, .2), k children drawn i.i.d. from q = (.2, .5, .3)."""
    p, q = [0.5, 0.3, 0.2], [0.2, 0.5, 0.3]
    rate = 0.0
    for drawn in itertools.product(range(3), repeat=k):
        tree = TokenTree(0)
        for token in dict.fromkeys(drawn):
            tree.add(0, token, math.log(q[token]), "small")
        nodes, rows = list(range(len(tree))), [p] * len(tree)
        for probability, verdict in outcomes(lambda choose, a=(tree, nodes, rows): walk_reference(*a, choose)):
            rate += math.prod(q[token] for token in drawn) * probability * len(verdict.path)
    assert rate == pytest.approx(accepted, abs=1e-12)


# ----------------------------------------------------------------------------------- rules that must be caught as wrong


def ratio_rule(q: World, recursive: bool) -> Rule:
    """The accept test min(1, p/q) of sampled drafts, on children in the drafter's order; residual (p - q)+."""

    def rule(tree: TokenTree, nodes: Sequence[int], rows: Rows, choose: Chooser) -> Verdict:
        path: list[int] = []
        node = 0
        while tree.children[node]:
            p = list(rows[list(nodes).index(node)])
            proposal = q[tuple(tree.path_tokens(node))]
            children = list(tree.children[node])
            token = -1
            for candidate in children if recursive else children[:1]:
                accept = min(1.0, p[candidate] / proposal[candidate])
                if choose(0, [1 - accept, accept]) == 1:
                    token = candidate
                    break
                p = [max(a - b, 0.0) for a, b in zip(p, proposal, strict=True)]
                p = [a / sum(p) for a in p]
            if token < 0:
                token = choose(0, p)
            if token not in tree.children[node]:
                return Verdict(tuple(path), token)
            node = tree.children[node][token]
            path.append(node)
        return Verdict(tuple(path), choose(0, rows[list(nodes).index(node)]))

    return rule


def any_child_rule(tree: TokenTree, nodes: Sequence[int], rows: Rows, choose: Chooser) -> Verdict:
    """Accepts a child because it is there, not because the target drew it."""
    path: list[int] = []
    node = 0
    while True:
        p = rows[list(nodes).index(node)]
        children = tree.children[node]
        if not children:
            return Verdict(tuple(path), choose(0, p))
        token = choose(0, [p[t] if t in children else 0.0 for t in range(VOCAB)])
        node = children[token]
        path.append(node)


def stale_row_rule(tree: TokenTree, nodes: Sequence[int], rows: Rows, choose: Chooser) -> Verdict:
    """Walks rightly, but draws the token after a fully accepted path from the row of the last node's parent."""
    verdict = walk_reference(tree, nodes, rows, choose)
    if verdict.path and not tree.children[verdict.path[-1]]:
        parent = tree.parent[verdict.path[-1]]
        return Verdict(verdict.path, choose(0, rows[list(nodes).index(parent)]))
    return verdict


@pytest.mark.parametrize("name", ["naive", "recursive", "any child", "stale row"])
def test_wrong_rules_are_caught(name: str) -> None:
    """Negative controls: if enumeration passed these, it could not tell a lossless rule from a lossy one."""
    errors = []
    for seed in range(10):
        p, q = world(f"target {seed}"), world(f"drafter {seed}")
        rules: dict[str, Rule] = {
            "naive": ratio_rule(q, recursive=False),
            "recursive": ratio_rule(q, recursive=True),
            "any child": any_child_rule,
            "stale row": stale_row_rule,
        }
        tree = top_tree(q, 2)
        nodes = list(range(len(tree)))
        assert error(law_of(walk_reference, tree, nodes, p), p) < 1e-12
        errors.append(error(law_of(rules[name], tree, nodes, p), p))
    assert min(errors) > 1e-3, f"{name}: {errors}"


def test_the_ratio_rule_itself_is_right_on_sampled_drafts() -> None:
    """The control above fails because the tree was not sampled, not because the rule was written down wrongly."""
    for seed in range(5):
        p, q = world(f"target {seed}"), world(f"drafter {seed}")
        law: Law = {}
        for draft in itertools.product(range(VOCAB), repeat=DEPTH):
            tree = TokenTree(0)
            for node, token in enumerate(draft):
                tree.add(node, token, -1.0, "small")
            drawn = q[()][draft[0]] * q[draft[:1]][draft[1]]
            for text, probability in law_of(ratio_rule(q, recursive=False), tree, [0, 1, 2], p).items():
                law[text] = law.get(text, 0.0) + drawn * probability
        assert error(law, p) < 1e-12
