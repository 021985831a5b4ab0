"""A toy world in which laws are sums: 3 tokens, a row per context of length <= 2, and every tree that can be drawn.

A tree of depth <= 2 emits 1 to 3 tokens; shorter texts are continued by the target to 3, and the joint law of 27 cells is
compared with the target's. The drawing of the tree is enumerated like the decisions of the rule, and both are weighted with
their probabilities.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch

from tree.draws import TreeKind, best_tokens, record_draws, without
from tree.tree import TokenTree
from verify.base import Verdict
from verify.khisti import tournament
from verify.reference import (
    Chooser,
    Chosen,
    Decisions,
    Solver,
    block_reference,
    distinct,
    khisti,
    naive,
    outcomes,
    recursive,
    recursive_shuffled,
    smallest_rho,
    spectr,
    top_down_reference,
    traversal_reference,
)
from verify.reference.top_down import PairChance, Row

Path = tuple[int, ...]
World = dict[Path, list[float]]
Law = dict[Path, float]
Rule = Callable[[TokenTree, Mapping[int, Row], Mapping[int, Row], Decisions], Verdict]
Drawn = list[tuple[float, TokenTree]]  # every tree with its probability
Build = Callable[[World, Chooser], TokenTree]

VOCAB, DEPTH = 3, 2
CONTEXTS = [path for length in range(DEPTH + 1) for path in itertools.product(range(VOCAB), repeat=length)]
TEXTS = list(itertools.product(range(VOCAB), repeat=DEPTH + 1))


def world(seed: str) -> World:
    """A random row per context."""
    rng = random.Random(seed)
    return {context: normal([rng.expovariate(1.0) + 1e-3 for _ in range(VOCAB)]) for context in CONTEXTS}


def normal(weights: Sequence[float]) -> list[float]:
    return [weight / math.fsum(weights) for weight in weights]


def worlds() -> dict[str, tuple[World, World]]:
    """(p, q): two ordinary pairs, and pairs at the edges of what rows can be."""
    p, q = world("target"), world("drafter")
    one_hot = {context: [float(t == len(context)) for t in range(VOCAB)] for context in CONTEXTS}
    head = dict.fromkeys(CONTEXTS, [0.6, 0.4, 0.0])
    return {
        "ordinary": (p, q),
        "other": (world("target 2"), world("drafter 2")),
        "equal": (p, p),
        "disjoint": (head, dict.fromkeys(CONTEXTS, [0.0, 0.0, 1.0])),
        "q misses a token": (p, head),
        "p one-hot": (one_hot, q),
        "q one-hot": (p, one_hot),
        "equal ratios": (dict.fromkeys(CONTEXTS, [0.5, 0.25, 0.25]), dict.fromkeys(CONTEXTS, [0.25, 0.375, 0.375])),
        "tiny": (dict.fromkeys(CONTEXTS, normal([1e-12, 1.0, 1e-12])), dict.fromkeys(CONTEXTS, normal([1e-12, 1e-12, 1.0]))),
        "p truncated": (head, q),
    }


# ------------------------------------------------------------------------------------------------- trees, as they are drawn


def context_of(tree: TokenTree, node: int) -> Path:
    return tuple(tree.path_tokens(node))


def paths(num_paths: int, trunk: int, branch: int, kind: TreeKind) -> Build:
    """`num_paths` independent paths of `branch` tokens below a trunk."""

    def build(q: World, choose: Chooser) -> TokenTree:
        tree = TokenTree(0, kind)
        heads = {0: 1}
        for depth in range(trunk + branch):
            copies = num_paths if depth == trunk else 1
            after: dict[int, int] = {}
            for head, count in heads.items():
                row = q[context_of(tree, head)]
                tokens = [choose(depth, row) for _ in range(count * copies)]
                for child in record_draws(tree, head, tokens, torch.tensor(row, dtype=torch.float64), "medium"):
                    after[child] = after.get(child, 0) + 1
            heads = after
        return tree

    return build


def distinct_children(*widths: int) -> Build:
    """``widths[d]`` children without replacement at every node of depth d."""

    def build(q: World, choose: Chooser) -> TokenTree:
        tree = TokenTree(0, TreeKind.WITHOUT_REPLACEMENT)
        node = 0
        while node < len(tree):
            if tree.depth[node] < len(widths):
                row = q[context_of(tree, node)]
                tokens: list[int] = []
                for _ in range(min(widths[tree.depth[node]], sum(weight > 0 for weight in row))):
                    left = [0.0 if t in tokens else weight for t, weight in enumerate(row)]
                    tokens.append(choose(tree.depth[node], left))
                record_draws(tree, node, tokens, torch.tensor(row, dtype=torch.float64), "medium")
            node += 1
        return tree

    return build


def one_sampled(width: int) -> Build:
    """The ``width - 1`` best children of every inner node, and one drawn from the rest."""

    def build(q: World, choose: Chooser) -> TokenTree:
        tree = TokenTree(0, TreeKind.ONE_SAMPLED)
        node = 0
        while node < len(tree):
            if tree.depth[node] < DEPTH:
                row = torch.tensor(q[context_of(tree, node)], dtype=torch.float64)
                chosen = best_tokens(row, width - 1)
                for token in chosen:
                    tree.add(node, token, -1.0, "medium")
                rest = without(row, chosen)
                if rest.sum().item() > 0:
                    record_draws(tree, node, [choose(tree.depth[node], rest.tolist())], rest, "medium")
            node += 1
        return tree

    return build


SHAPES: dict[str, Build] = {
    "chain": paths(1, 0, 2, TreeKind.IID),
    "2 paths": paths(2, 0, 2, TreeKind.IID),
    "delayed (2,1,1)": paths(2, 1, 1, TreeKind.DELAYED),
    "delayed (3,1,1)": paths(3, 1, 1, TreeKind.DELAYED),
    "delayed chain": paths(1, 1, 1, TreeKind.DELAYED),
    "distinct 2 x 2": distinct_children(2, 2),
    "distinct 3": distinct_children(3),
    "distinct chain": distinct_children(1, 1),
    "one sampled of 2": one_sampled(2),
    "one sampled of 1": one_sampled(1),
}


def drawn(build: Build, q: World) -> Drawn:
    """Every tree that can be drawn, with its probability."""
    trees = list(outcomes(lambda choose: build(q, choose)))
    for _, tree in trees:
        tree.check()
    return trees


# ---------------------------------------------------------------------------------------------------------------------- rules


def solving(solve: Solver) -> Rule:
    """The walk from the root with one solver."""
    return lambda tree, rows, proposals, decisions: top_down_reference(tree, rows, proposals, decisions, solve)


@cache
def _chances(p: Path, q: Path, k: int, size: int) -> list[PairChance]:
    rows = [torch.tensor(row, dtype=torch.float64) for row in (p, q)]
    return [duel.chance for duel in tournament(*rows, k, size)]


@cache
def _rho(p: Path, q: Path, k: int) -> float:
    return smallest_rho(p, q, k)


def program_chances(p: Row, q: Row, k: int, size: int = VOCAB) -> list[PairChance]:
    """The duels of the linear program."""
    return _chances(tuple(p), tuple(q), k, size)  # type: ignore[arg-type]


RULES: dict[str, Rule] = {
    "naive": solving(naive),
    "specinfer": solving(recursive),
    "specinfer-distinct": solving(distinct),
    "spectr": solving(spectr(lambda p, q, k: _rho(tuple(p), tuple(q), k))),  # type: ignore[arg-type]
    "khisti": solving(khisti(program_chances)),
    "block": block_reference,
    "traversal": traversal_reference,
}
"""The references, by the name of the production rule."""

OTHER_RULES: dict[str, Rule] = {
    "specinfer, shuffled": solving(recursive_shuffled),
    "khisti, two ranks": solving(khisti(lambda p, q, k: program_chances(p, q, k, 2))),
    "khisti, always tossed": solving(khisti(lambda p, q, k: [lambda a, b: 0.5] * (k - 1))),
}


# ----------------------------------------------------------------------------------------------------------------------- laws


def by_node(tree: TokenTree, world: World) -> dict[int, Row]:
    """The world's row at every node."""
    return {node: world[context_of(tree, node)] for node in range(len(tree))}


def own_proposals(tree: TokenTree) -> dict[int, Row]:
    """The rows that a tree's draws came from."""
    return {node: row.tolist() for node, row in tree.proposals.items()}


def emitted_law(rule: Rule, trees: Drawn, p: World, proposals: Callable[[TokenTree], Mapping[int, Row]] = own_proposals) -> Law:
    """The law of the emitted text, over the drawing of the tree and all decisions of the rule."""
    law: Law = {}
    for weight, tree in trees:
        rows, qs = by_node(tree, p), proposals(tree)
        for probability, verdict in outcomes(lambda choose, a=(tree, rows, qs): rule(*a, Chosen(choose))):
            text = tuple(tree.token[node] for node in verdict.path) + (verdict.extra,)
            law[text] = law.get(text, 0.0) + weight * probability
    assert math.isclose(math.fsum(law.values()), 1.0, abs_tol=1e-12)
    return law


def error(emitted: Law, p: World) -> float:
    """Largest error of a cell, after the target has continued every emitted text to full length."""
    law = dict.fromkeys(TEXTS, 0.0)
    for text, probability in emitted.items():
        for rest in itertools.product(range(VOCAB), repeat=DEPTH + 1 - len(text)):
            full = text + rest
            law[full] += probability * math.prod(p[full[:i]][full[i]] for i in range(len(text), DEPTH + 1))
    return max(abs(law[text] - math.prod(p[text[:i]][text[i]] for i in range(DEPTH + 1))) for text in TEXTS)


def mean_accepted(emitted: Law) -> float:
    """Expected number of accepted tokens."""
    return math.fsum(probability * (len(text) - 1) for text, probability in emitted.items())
