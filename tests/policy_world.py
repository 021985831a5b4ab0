"""What tests of growth policies share: a drafter that is a table, and the loop that drives any policy with it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from tree.flatten import subset_parents
from tree.growth import Answer, Ask, Candidates, Growth, Policy
from tree.tree import TokenTree

Path = tuple[int, ...]
Row = Sequence[float]
Drafter = Callable[[Path], Row]
"""The row of probabilities after a path."""


def random_drafter(seed: int, vocab: int, sharpness: float = 1.0) -> Drafter:
    """A drafter whose row after a path depends on nothing but the seed and the path."""

    def q(path: Path) -> list[float]:
        rng = random.Random(f"{seed} {path}")
        weights = [math.exp(sharpness * rng.gauss(0, 1)) for _ in range(vocab)]
        return [w / sum(weights) for w in weights]

    return q


def holey_drafter(seed: int, vocab: int) -> Drafter:
    """A drafter with everything that can go wrong in a row: nothing, zeros, certainty, exact ties, foreign tokens."""

    def q(path: Path) -> list[float]:
        rng = random.Random(f"{seed} {path}")
        kind = rng.randrange(5)
        if kind == 0:
            return []
        if kind == 1:
            sure = rng.randrange(vocab)
            return [float(token == sure) for token in range(vocab)]
        if kind == 2:
            return [1.0 / vocab] * vocab
        weights = [rng.choice([0.0, 1.0, 2.0]) for _ in range(vocab + 2 * (kind == 3))]
        return [w / max(sum(weights), 1.0) for w in weights]

    return q


def candidates(row: Row, width: int) -> Candidates:
    """The best `width` tokens of a row, as a drafter would give them."""
    best = sorted(range(len(row)), key=lambda token: (-row[token], token))[:width]
    return Candidates(tuple(best), tuple(math.log(row[t]) if row[t] > 0 else -math.inf for t in best))


def answer(tree: TokenTree, ask: Ask, q: Drafter) -> Answer:
    """What the drafter says to a question. Nodes with an empty row are left out, as a drafter may do."""
    rows = {node: q(tuple(tree.path_tokens(node))) for node in ask.nodes}
    rescored = {}
    if ask.rescore:
        for node in range(1, len(tree)):
            row = q(tuple(tree.path_tokens(tree.parent[node])))
            if tree.token[node] < len(row):
                p = row[tree.token[node]]
                rescored[node] = math.log(p) if p > 0 else -math.inf
    return Answer({node: candidates(row, ask.width) for node, row in rows.items() if len(row)}, rescored)


def grow(
    policy: Policy,
    q: Drafter,
    vocab: int,
    *,
    stop: frozenset[int] = frozenset(),
    max_depth: int | None = None,
    drafter: str = "medium",
) -> tuple[Growth, list[Ask]]:
    """Grow until done; returns the growth and every question asked. The tree is checked after every answer."""
    growth = policy.begin(0, stop_tokens=stop, max_depth=max_depth, vocab_size=vocab)
    asked: list[Ask] = []
    while (ask := growth.ask(drafter)) is not None:
        asked.append(ask)
        check_question(growth.tree, ask, vocab)
        growth.attach(drafter, answer(growth.tree, ask, q))
        growth.tree.check()
        assert len(asked) <= 200, "does not end"
    return growth, asked


def check_question(tree: TokenTree, ask: Ask, vocab: int) -> None:
    """What every drafter may rely on."""
    assert ask.nodes and len(set(ask.nodes)) == len(ask.nodes), "nodes must be distinct, at least one"
    assert all(0 <= node < len(tree) for node in ask.nodes) and 1 <= ask.width <= vocab


def check_cut(growth: Growth, budget: int) -> list[int]:
    """Assert what the target relies on in the final cut, and return it."""
    nodes = growth.verify_nodes()
    subset_parents(growth.tree, nodes)  # ascending, root first, ancestor-closed
    assert len(nodes) <= budget, f"{len(nodes)} nodes for a budget of {budget}"
    return nodes


def paths(growth: Growth, nodes: Sequence[int] | None = None) -> set[Path]:
    """Nodes, by default the whole tree, as a set of token paths, root excluded."""
    among = range(len(growth.tree)) if nodes is None else nodes
    return {tuple(growth.tree.path_tokens(node)) for node in among if node}


def probability(q: Drafter, path: Path) -> float:
    """Path probability."""
    return math.prod(q(path[:i])[token] for i, token in enumerate(path))
