"""Scoring: the target's one forward over prefill chunks, chains and trees of all running sequences."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from engine.question import Draft
from engine.sequence import Sequence
from models.attention import Segment, chain_then_tree
from models.causal_lm import CausalLM
from tree.flatten import ancestor_mask, positions, subset_parents
from tree.growth import Growth


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """What the target said about one sequence's verified nodes."""

    draft: Draft
    nodes: list[int]  # verified, root first
    rows: list[int]  # cache rows of the pending text, then of `nodes` but the root; emptied by whoever takes them over
    logits: torch.Tensor  # [len(nodes), vocab]
    hidden: dict[int, torch.Tensor]  # captured layer -> [len(rows), hidden]
    prompt_logits: torch.Tensor | None  # [pending text before the root, vocab], if wanted
    is_sound: bool  # False: NaN or infinite logits, off which nothing can be read


@dataclass(frozen=True, slots=True, eq=False)
class Prefilled:
    """Prompt tokens of one sequence that the target has been fed."""

    sequence: Sequence
    start: int  # the first of them
    hidden: dict[int, torch.Tensor]  # captured layer -> [n, hidden]
    prompt_logits: torch.Tensor | None = None  # [n, vocab], if wanted


def score(
    target: CausalLM, prefills: list[tuple[Sequence, int]], drafts: list[Draft], chosen: list[list[int]]
) -> tuple[list[Prefilled], list[Scored], float]:
    """Feed `count` prompt tokens of each prefilling sequence, and the root and the `chosen` nodes of each drafted one.

    Prefill rows join their sequence at once, since prompt tokens need no verification. Rows of trees are in the result,
    for the commit to keep or free. If the forward raises, every row taken here has been given back. The last part of the
    result are the seconds of the forward itself; flattening a tree counts as its draft's.
    """
    counts = [count for _, count in prefills]
    counts += [draft.sequence.num_pending + len(nodes) - 1 for draft, nodes in zip(drafts, chosen, strict=True)]
    with target.pool.taking(counts) as taken:
        segments: list[Segment] = []
        for (sequence, count), rows in zip(prefills, taken, strict=False):
            start = len(sequence.rows)
            tokens = sequence.tokens[start : start + count]
            wanted = range(count) if sequence.is_rated else ()
            segments.append(Segment(tokens, range(start, start + count), sequence.rows.view(), rows, wanted))
        for draft, nodes, rows in zip(drafts, chosen, taken[len(prefills) :], strict=True):
            start_s = time.perf_counter()
            segments.append(_segment(draft.sequence, draft.growth, nodes, rows))
            draft.tree_s += time.perf_counter() - start_s
        start_s = time.perf_counter()
        scores = target.forward(segments)
        sound = torch.isfinite(scores.logits.amax(dim=-1)).tolist()  # waits for the device
        seconds = time.perf_counter() - start_s
    fed = []
    for index, ((sequence, _), rows) in enumerate(zip(prefills, taken, strict=False)):
        rated = scores.of(index) if sequence.is_rated else None
        fed.append(Prefilled(sequence, len(sequence.rows), scores.hidden_of(index, len(rows)), rated))
        sequence.rows.extend(rows)
    results = []
    for index, (draft, nodes) in enumerate(zip(drafts, chosen, strict=True), start=len(prefills)):
        is_sound = all(sound[scores.offsets[index] : scores.offsets[index + 1]])
        hidden = scores.hidden_of(index, len(taken[index]))
        logits, before = scores.of(index), len(scores.of(index)) - len(nodes)
        rated = logits[:before] if before else None
        results.append(Scored(draft, nodes, taken[index], logits[before:], hidden, rated, is_sound))
    return fed, results, seconds


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
        positions=[*range(start, root + 1), *positions(tree, below, root)],
        prefix=sequence.rows.view(),
        rows=rows,
        wanted=range(0 if sequence.is_rated else len(pending) - 1, len(pending) + len(below)),
        visible=mask,
    )
