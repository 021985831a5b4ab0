"""What every shape of a delayed tree is worth at roots along a text: labels for the selector (2602.16994).

At a root the drafter draws one trunk and, from each of its nodes, independent paths; the target scores all of them in one pass.
Every shape (K, L1, L2) is then a part of what was drawn: the first L1 tokens of the trunk and the first L2 of K paths at its
end. Its expected tokens are computed (:mod:`verify.efficiency`), not sampled; only the drawing is, `trees` times per root.

Trap: shapes share their draws, so their labels err together. That does no harm to a choice between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from app.drafter_quality import Text
from app.teacher_forcing import Memory, Trail
from drafters.base import Drafter, DraftRequest, Halt
from engine.noise import DraftNoise
from models.attention import Segment, chain_then_tree
from models.causal_lm import CausalLM
from models.sampling import SamplingParams, probabilities
from scheduler.selector import LONGEST, MOST_PATHS, SHAPES, scalars
from scheduler.selector_samples import UNPRICED, Label
from tree.draws import TreeKind, draw, record_draws, usable_row
from tree.flatten import ancestor_mask, positions
from tree.growth import Ask
from tree.policies.sampled import Delayed
from tree.tree import TokenTree
from verify.efficiency import Law, tokens_by_depth

_DRAFT = "draft"


class NoDistribution(Exception):
    """A drafter that cannot be drawn from, or gave up."""


@dataclass(frozen=True, slots=True)
class LabelPlan:
    """What is labeled."""

    target: CausalLM
    drafter: Drafter
    law: Law
    sampling: SamplingParams
    stop_tokens: frozenset[int]
    trees: int = 4  # per root
    stride: int = 16


def label_text(
    text: Text, prompt: int, plan: LabelPlan, memory_of: Callable[[Text, tuple[int, ...]], Memory]
) -> Iterator[Label]:
    """The labels of one text, in order. Raises NoDistribution where the drafter has none to draw from."""
    with ExitStack() as stack:
        memory = memory_of(text, plan.drafter.layers)
        stack.callback(memory.close)
        trail = Trail(plan.drafter, text.tokens, text.num_prompt - 1, memory if plan.drafter.layers else None)
        stack.callback(trail.close)
        for _ in range(trail.num_reads):
            plan.drafter.propose([trail.ask_along_truth(0, 1)])
        place = 0
        while trail.num_left >= 2:
            if place % plan.stride:
                trail.advance()
            else:
                yield _label(trail, memory, prompt, plan, place)  # advances
            place += 1


def _label(trail: Trail, memory: Memory, prompt: int, plan: LabelPlan, place: int) -> Label:
    """The label of the root that follows the trail's."""
    before = TokenTree(trail.tokens[trail.root])
    q_before = _rows(trail, before, [0], plan)[0]
    # As the server has it: of a greedy request, what the target would draw from at temperature 1.
    p_before = _target_rows(before, trail, memory, replace(plan, sampling=plan.sampling.warm))[0]
    trail.advance()
    total = torch.zeros(len(SHAPES), dtype=torch.float64)
    drawn = TokenTree(trail.tokens[trail.root])
    rows: dict[int, torch.Tensor] = {}
    forests = [_draw(trail, drawn, rows, plan, seed) for seed in range(place * plan.trees, (place + 1) * plan.trees)]
    p = _target_rows(drawn, trail, memory, plan)
    for forest in forests:
        total += torch.tensor(_worth(drawn, forest, rows, p, plan.law), dtype=torch.float64)
    sampling, context = plan.sampling, trail.root + 1
    size = min(len(p_before), len(q_before))
    features = scalars(
        p_before[:size],
        q_before[:size],
        rows[0][:size],
        context=context,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        draft_ms=1.0,
        target_ms=1.0,
    )
    return Label(prompt, context, features[: len(UNPRICED)], tuple((total / plan.trees).tolist()))


@dataclass(frozen=True, slots=True)
class _Forest:
    """One drawing: nodes of the tree that holds all of them."""

    trunk: list[int]  # the root first
    paths: list[list[list[int]]]  # per node of the trunk, per path, its nodes


def _draw(trail: Trail, tree: TokenTree, rows: dict[int, torch.Tensor], plan: LabelPlan, seed: int) -> _Forest:
    noise = DraftNoise(seed, trail.root)
    used: dict[int, int] = {}  # numbers, by depth

    def next_of(nodes: list[int]) -> list[int]:
        """A child of each of `nodes`, drawn independently."""
        missing = [node for node in dict.fromkeys(nodes) if node not in rows]
        if missing:
            rows.update(zip(missing, _rows(trail, tree, missing, plan), strict=True))
        children = []
        for node in nodes:
            depth = tree.depth[node]
            used[depth] = used.get(depth, -1) + 1
            (token,) = draw(rows[node], [noise(depth, used[depth])])
            known = tree.children[node].get(token)
            children.append(tree.add(node, token, 0.0, _DRAFT) if known is None else known)
        return children

    def is_open(node: int) -> bool:
        return node == 0 or tree.token[node] not in plan.stop_tokens

    trunk = [0]
    while len(trunk) <= LONGEST and is_open(trunk[-1]):
        trunk += next_of(trunk[-1:])
    paths: list[list[list[int]]] = [[[] for _ in range(MOST_PATHS)] for _ in trunk]
    for _ in range(LONGEST):
        heads = [(path, path[-1] if path else start) for start, many in zip(trunk, paths, strict=True) for path in many]
        alive = [(path, head) for path, head in heads if is_open(head)]
        for (path, _), child in zip(alive, next_of([head for _, head in alive]), strict=True):
            path.append(child)
    return _Forest(trunk, paths)


def _worth(
    drawn: TokenTree, forest: _Forest, rows: dict[int, torch.Tensor], p: torch.Tensor, law: Law
) -> list[float]:
    """Expected tokens of every shape."""
    curves: dict[tuple[int, int], list[float]] = {}
    found = []
    for shape in SHAPES:
        # A chain of any length is the longest trunk with one path behind it.
        key = (1, LONGEST) if shape.num_paths == 1 else (shape.num_paths, shape.trunk)
        if key not in curves:
            curves[key] = _curve(drawn, forest, rows, p, law, *key)
        found.append(curves[key][shape.trunk + shape.branch])
    return found


def _curve(
    drawn: TokenTree, forest: _Forest, rows: dict[int, torch.Tensor], p: torch.Tensor, law: Law, num_paths: int, trunk: int
) -> list[float]:
    """Expected tokens by depth of the tree with that trunk and so many paths at its end."""
    shape = Delayed(num_paths, trunk, LONGEST)
    tree, twin = TokenTree(drawn.token[0], TreeKind.DELAYED), {0: 0}  # node of `drawn` -> node of `tree`

    def record(node: int, children: list[int]) -> None:
        made = record_draws(tree, twin[node], [drawn.token[child] for child in children], rows[node], _DRAFT)
        twin.update(zip(children, made, strict=True))

    stem = forest.trunk[: trunk + 1]
    for node, child in zip(stem, stem[1:], strict=False):
        record(node, [child])
    if len(stem) == trunk + 1:  # else the trunk ended before
        paths = forest.paths[trunk][:num_paths]
        for layer in range(LONGEST):
            nexts: dict[int, list[int]] = {}
            for path in paths:
                if len(path) > layer:
                    nexts.setdefault(path[layer - 1] if layer else stem[-1], []).append(path[layer])
            for node, children in nexts.items():
                record(node, children)
    order = {own: node for node, own in twin.items()}
    return tokens_by_depth(tree, p[[order[own] for own in range(len(tree))]], law, shape.trunk + shape.branch)


@torch.inference_mode()
def _rows(trail: Trail, tree: TokenTree, nodes: list[int], plan: LabelPlan) -> list[torch.Tensor]:
    """The drafter's distributions after `nodes`, as it draws from them."""
    plain = trail.ask(tree, nodes, 1)
    ask = Ask(plain.ask.nodes, 1, wants_rows=True)
    request = DraftRequest(plain.state, plain.context, tree, ask, plan.sampling, plain.target_rows)
    (answer,) = plan.drafter.propose([request])
    if isinstance(answer, Halt):
        raise NoDistribution(f"{plan.drafter.name} gave up ({answer.reason})")
    found = [usable_row(answer.rows.get(node), plan.target.num_tokens) for node in nodes]
    rows = [row for row in found if row is not None]
    if len(rows) < len(nodes):
        raise NoDistribution(f"{plan.drafter.name} has no distribution to draw from")
    return rows


@torch.inference_mode()
def _target_rows(tree: TokenTree, trail: Trail, memory: Memory, plan: LabelPlan) -> torch.Tensor:
    """`[nodes, vocab]`: the target's distributions after every node of a tree at the trail's root."""
    target, root = plan.target, trail.root
    taken = target.pool.allocate(len(tree))
    try:
        below = list(range(1, len(tree)))
        mask = chain_then_tree(1, ancestor_mask(tree.parent)[1:, 1:]) if below else None
        segment = Segment(
            tokens=tree.token,
            positions=[root, *positions(tree, below, root)],
            prefix=memory.rows.view()[:root],
            rows=taken,
            wanted=range(len(tree)),
            visible=mask,
        )
        logits = target.forward([segment]).of(0)
    finally:
        target.pool.release(taken)
    return probabilities(logits, plan.sampling)[:, : target.num_tokens]
