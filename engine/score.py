"""Scoring: the target's one forward over prefill chunks, chains and trees of all running sequences."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.sequence import Sequence
from models.attention import Segment, chain_then_tree
from models.causal_lm import CausalLM
from tree.flatten import ancestor_mask, subset_parents
from tree.growth import Growth


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """What the target said about one sequence's verified nodes."""

    sequence: Sequence
    growth: Growth
    nodes: list[int]  # verified, root first
    rows: list[int]  # cache rows of the pending text, then of `nodes` but the root
    logits: torch.Tensor  # [len(nodes), vocab]


class BrokenTarget(RuntimeError):
    """The target's logits are not numbers; nothing can be read off them."""


def score(target: CausalLM, prefills: list[tuple[Sequence, int]], drafts: list[tuple[Sequence, Growth]]) -> list[Scored]:
    """Feed `count` prompt tokens of each prefilling sequence, and the root and verify set of each drafted one.

    Prefill rows join their sequence at once, since prompt tokens need no verification. Rows of trees are in the result,
    for the commit to keep or free. If the forward raises, every row taken here has been given back.
    """
    segments: list[Segment] = []
    taken: list[list[int]] = []
    try:
        for sequence, count in prefills:
            start = len(sequence.rows)
            taken.append(target.pool.allocate(count))
            tokens = sequence.tokens[start : start + count]
            segments.append(Segment(tokens, range(start, start + count), sequence.rows.view(), taken[-1], ()))
        chosen = [growth.verify_nodes() for _, growth in drafts]
        for (sequence, growth), nodes in zip(drafts, chosen, strict=True):
            taken.append(target.pool.allocate(len(sequence.pending) + len(nodes) - 1))
            segments.append(_segment(sequence, growth, nodes, taken[-1]))
        scores = target.forward(segments)
        if not bool(torch.isfinite(scores.logits.amax(dim=-1)).all()):
            raise BrokenTarget("the target's logits are NaN or infinite")
    except BaseException:
        for rows in taken:
            target.pool.release(rows)
        raise
    for (sequence, _), rows in zip(prefills, taken, strict=False):
        sequence.rows.extend(rows)
    return [
        Scored(sequence, growth, nodes, rows, scores.of(len(prefills) + index))
        for index, ((sequence, growth), nodes, rows) in enumerate(
            zip(drafts, chosen, taken[len(prefills) :], strict=True)
        )
    ]


def _segment(sequence: Sequence, growth: Growth, nodes: list[int], rows: list[int]) -> Segment:
    """Pending text in causal order (its last token is the root), then the tree below it."""
    pending, start, tree = sequence.pending, len(sequence.rows), growth.tree
    root = len(sequence.tokens) - 1
    below = nodes[1:]
    mask = None
    if below:
        # Row 0 of the ancestor mask is the root, which is the chain's last token here.
        mask = chain_then_tree(len(pending), ancestor_mask(subset_parents(tree, nodes))[1:, 1:])
    return Segment(
        tokens=[*pending, *(tree.token[node] for node in below)],
        positions=[*range(start, root + 1), *(root + tree.depth[node] for node in below)],
        prefix=sequence.rows.view(),
        rows=rows,
        wanted=range(len(pending) - 1, len(pending) + len(below)),
        visible=mask,
    )
