"""Sampled trees: how children came to be, drawing them from a drafter's row, and what a tree keeps of the drawing.

A ratio rule (:mod:`verify`) divides the target's probability of a child by the probability with which the child was
*drawn*. It is exact only if it gets the very row q that the draws came from and all draws, in their order, with repeats.
So a sampled tree keeps both: ``tree.draws[v]`` are the tokens drawn at node v, ``tree.proposals[v]`` is the row.

Traps:
    Never drop a drawn token because of what it is (its score, its id): what is left is no sample of q any more. Tokens
    that must not be drawn are taken out of q *before* drawing (:func:`usable_row`), and a tree is made smaller by drawing
    less.
    Paths that coincide share nodes but not draws: a token drawn twice is one child and two entries.
    Drafting and verification need independent random numbers. Here numbers come in as arguments.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tree.tree import TokenTree


_BLOCK = 256  # tokens


class TreeKind(Enum):
    """How the children in a tree came to be, which decides what verification is exact."""

    DETERMINISTIC = "deterministic"  # chosen by rank, score or lookup; nothing was sampled
    IID = "iid"  # at every node independent draws from q, repeats merged
    WITHOUT_REPLACEMENT = "without replacement"  # each draw from q without the siblings drawn before it
    DELAYED = "delayed"  # one draw per node along a trunk, then IID
    ONE_SAMPLED = "one sampled"  # chosen siblings, and one child drawn from what they leave of q


def usable_row(q: torch.Tensor | None, vocab_size: int) -> torch.Tensor | None:
    """The row to draw from: `q` without tokens that may not enter the tree, or None if there is nothing to draw.

    Args:
        q: ``[any]`` weights >= 0 of a drafter whose vocabulary may be padded or shorter; need not sum to 1.
        vocab_size: number of tokens that may become nodes.

    Returns:
        ``[at most vocab_size]`` float64. None for a missing row and for one with NaN, infinity or no mass:
        then no child is drawn, which depends on the context only.
    """
    if q is None:
        return None
    assert q.ndim == 1, f"q must be [vocab], not {list(q.shape)}"
    row = q[:vocab_size].double()  # once, and not again for every draw
    return row if 0.0 < row.sum().item() < float("inf") else None


def draw(q: torch.Tensor, uniforms: Sequence[float]) -> list[int]:
    """Independent draws from q, one per number in [0, 1), by inversion; never a token with q = 0.

    `q` is ``[vocab]`` weights with some mass on any device.
    """
    # First a block of tokens, then a token in it: a sum over the vocabulary is much faster than a cumulative one.
    rest = -len(q) % _BLOCK
    blocks = (torch.nn.functional.pad(q.double(), (0, rest)) if rest else q.double()).view(-1, _BLOCK)
    ends: list[float] = blocks.sum(1).cumsum(0).tolist()
    inside: dict[int, list[float]] = {}  # block -> its cumulative sums
    found: list[int] = []
    for number in uniforms:
        target = number * ends[-1]
        block = bisect_right(ends, target)
        # Rounding cannot push a target to the total, whatever the total; a block behind the last one would be our fault.
        assert 0.0 <= number and block < len(ends), f"no mass to draw from, or numbers outside [0, 1): {uniforms}"
        if block not in inside:
            inside[block] = blocks[block].cumsum(0).tolist()
        sums = inside[block]
        place = bisect_right(sums, target - (ends[block - 1] if block else 0.0))
        # The block's end was rounded otherwise than the sums inside; nothing comes behind its last possible token.
        found.append(block * _BLOCK + min(place, bisect_left(sums, sums[-1])))
    return found


def draw_distinct(q: torch.Tensor, uniforms: Sequence[float]) -> list[int]:
    """Draws without replacement, in their order; as many as there are numbers, or as tokens with q > 0.

    `q` is ``[vocab]`` weights with some mass on any device.
    """
    left = q.double().clone()
    drawn: list[int] = []
    for number in uniforms:
        if not left.sum().item() > 0:
            break
        drawn += draw(left, [number])
        left[drawn[-1]] = 0.0
    return drawn


def best_tokens(q: torch.Tensor, count: int) -> list[int]:
    """The `count` tokens with the highest q > 0, by (q descending, id ascending); fewer if q has fewer."""
    if count < 1:
        return []
    # Which of several equal values topk gives is unspecified, so it only says which value is the last.
    last = q.topk(min(count, len(q))).values[-1]
    tokens: list[int] = (q >= last).nonzero()[:, 0].tolist() if last > 0 else q.nonzero()[:, 0].tolist()
    values: list[float] = q[tokens].tolist()
    return [token for _, token in sorted((-value, token) for value, token in zip(values, tokens, strict=True))][:count]


def without(q: torch.Tensor, tokens: Iterable[int]) -> torch.Tensor:
    """A copy of q ``[vocab]`` in which `tokens` are impossible."""
    rest = q.clone()
    rest[list(tokens)] = 0.0
    return rest


def record_draws(tree: TokenTree, node: int, tokens: Sequence[int], q: torch.Tensor, drafter: str) -> list[int]:
    """Put the draws at `node` into the tree and return one child per draw; equal tokens give the same child.

    A new child's log-probability is that of its token in q. Raise ValueError if `node` has draws already, or the tree is
    a deterministic one.
    """
    if tree.kind is TreeKind.DETERMINISTIC or node in tree.draws:
        raise ValueError(f"no draws can be put on node {node} of this {tree.kind.value} tree")
    distinct = list(dict.fromkeys(tokens))
    lps: list[float] = (q[distinct].double() / q.double().sum()).log().tolist()
    for token, lp in zip(distinct, lps, strict=True):
        if token not in tree.children[node]:
            tree.add(node, token, lp, drafter)
    tree.draws[node] = list(tokens)
    tree.proposals[node] = q
    return [tree.children[node][token] for token in tokens]


def check_draws(tree: TokenTree) -> None:
    """Assert that draws, rows and children of a tree belong together as its kind says; for tests."""
    assert tree.draws.keys() == tree.proposals.keys(), "draws and rows belong to different nodes"
    if tree.kind is TreeKind.DETERMINISTIC:
        assert not tree.draws, "a deterministic tree has draws"
        return
    for node, drawn in tree.draws.items():
        assert 0 <= node < len(tree), f"draws at node {node} of {len(tree)}"
        assert drawn, f"node {node} has a row and no draws"
        q = tree.proposals[node]
        assert all(q[token] > 0 for token in drawn), f"a token that q excludes was drawn at node {node}: {drawn}"
        children = list(tree.children[node])  # in the order of creation
        if tree.kind is TreeKind.ONE_SAMPLED:
            assert len(drawn) == 1 and drawn[0] in children, f"node {node} has draws {drawn}, children {children}"
            assert all(q[t] == 0 for t in children if t != drawn[0] and t < len(q)), f"q of node {node} has siblings"
        else:
            assert children == list(dict.fromkeys(drawn)), f"node {node} has draws {drawn}, children {children}"
        if tree.kind is TreeKind.WITHOUT_REPLACEMENT:
            assert len(drawn) == len(children), f"node {node} has repeats: {drawn}"
    if tree.kind is not TreeKind.ONE_SAMPLED:
        undrawn = [node for node in range(len(tree)) if tree.children[node] and node not in tree.draws]
        assert not undrawn, f"nodes {undrawn} have children that nobody drew"
