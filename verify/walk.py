"""Target-sampling walk: draw the next token from the target, and go on in the tree as long as it is there.

Source: the NSS rule of 2602.16994; EAGLE-2 (2406.16858) does the same when it takes its draft as one-hot. At every
reached node the emitted token is drawn from p given the path, whatever the children are, so the law of the text is the
target's for *any* tree, however it was built. (Ratio tests of p against q are wrong on trees whose nodes were not
sampled from q.) The expected number of accepted tokens is the sum over non-root nodes of the target's path probability.

A race draws the token: with standard exponentials E_t, one per token, ``argmin E_t / p_t`` has the law p (adding
Gumbel noise to log p and taking the maximum is the same thing). The vector belongs to the output position, so a seed
reproduces the text whatever trees were drafted. If p is off by rounding, as it is between batch shapes, the race has
another winner with a probability of about the error's total variation only. Inverting the cumulative sum at one uniform
instead lets an error at one token push the draw across all the narrow intervals behind it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from tree.draws import TreeKind
from tree.tree import TokenTree
from verify.base import Noise, Rows, Verdict


def descend(tree: TokenTree, nodes: Sequence[int], choose: Callable[[int], int]) -> Verdict:
    """Walk from the root along the target's choices; shared by all rules that pick one token per node.

    Args:
        nodes: the verified subset, root first; children outside it count as absent.
        choose: i -> the token chosen at ``nodes[i]``, or -1 if there is none. Only nodes on the way are asked for, each
            once and top down.
    """
    assert nodes[0] == 0, "root first"
    row = {node: i for i, node in enumerate(nodes)}
    path: list[int] = []
    node = 0
    while True:
        token = choose(row[node])
        assert token >= 0, f"the target's row at node {node} has no probability mass"
        child = tree.children[node].get(token)
        if child is None or child not in row:
            return Verdict(path=tuple(path), extra=token)
        path.append(child)
        node = child


def race(p: torch.Tensor, exponentials: torch.Tensor) -> torch.Tensor:
    """Token per row with the smallest ``exponentials / p``, the lowest id on ties; -1: the row has no mass, or a NaN.

    Args:
        p: ``[..., vocab]`` probabilities; rows need not sum to 1, only ratios count.
        exponentials: ``[..., vocab]`` positive and finite, on the device of `p`; float32 is the precision of the race
            unless one of the two is float64.

    A token with p = 0 is never returned.
    """
    # The inverse, so that an impossible token is at 0 and not at infinity, and a NaN stays visible. Division is rounded
    # correctly on every device, so all devices agree on the winner.
    speed = p / exponentials
    token = speed.argmax(dim=-1)  # the first of equal maxima, and a NaN before any number
    return torch.where(speed.gather(-1, token.unsqueeze(-1)).squeeze(-1) > 0, token, -1)


def walk_lazily(tree: TokenTree, nodes: Sequence[int], rows: Rows, noise: Noise) -> Verdict:
    """Race only at the nodes that are reached, one more than are accepted. For rows that cost nothing to look at."""

    def choose(i: int) -> int:
        return int(race(rows[i], exponentials_at(noise, tree.depth[nodes[i]], rows)))

    return descend(tree, nodes, choose)


def walk_at_once(tree: TokenTree, nodes: Sequence[int], rows: torch.Tensor, noise: Noise) -> Verdict:
    """Race at all nodes, so that the device is waited for once, not once per depth. The verdict is the same."""
    depths = sorted({tree.depth[node] for node in nodes})
    by_depth = torch.stack([exponentials_at(noise, depth, rows) for depth in depths]).to(rows.device)
    index = torch.tensor([depths.index(tree.depth[node]) for node in nodes], device=rows.device)
    tokens: list[int] = race(rows, by_depth[index]).tolist()
    return descend(tree, nodes, tokens.__getitem__)


def exponentials_at(noise: Noise, depth: int, rows: Rows) -> torch.Tensor:
    """``[vocab]`` on the CPU: the numbers of an output position for `rows` ``[..., vocab]``, checked."""
    exponentials = noise.exponentials(depth, rows.shape[-1])
    assert exponentials.shape == rows.shape[-1:], f"rows {tuple(rows.shape)}, exponentials {tuple(exponentials.shape)}"
    least, most = exponentials.aminmax()
    assert 0 < least.item() and most.item() < math.inf, f"exponentials must be positive and finite: {least}, {most}"
    return exponentials


@dataclass(frozen=True, slots=True)
class TargetWalk:
    """Sample from the target at every reached node."""

    name: ClassVar[str] = "walk"
    lossless: ClassVar[bool] = True
    accepts: ClassVar[frozenset[TreeKind]] = frozenset(TreeKind)
    needs_chain: ClassVar[bool] = False
    reads_logits: ClassVar[bool] = False

    def __call__(self, tree: TokenTree, nodes: Sequence[int], rows: Rows, noise: Noise) -> Verdict:
        """Decide from probabilities ``[len(nodes), vocab]`` and one vector of exponentials per depth."""
        assert rows.ndim == 2 and rows.shape[0] == len(nodes), f"{len(nodes)} nodes, rows {tuple(rows.shape)}"
        if isinstance(rows, torch.Tensor) and rows.device.type != "cpu":
            return walk_at_once(tree, nodes, rows, noise)
        return walk_lazily(tree, nodes, rows, noise)
