"""Target-sampling walk: draw the next token from the target, and go on in the tree as long as it is there.

Source: the NSS rule of 2602.16994; EAGLE-2 (2406.16858) does the same when it takes its draft as one-hot. At every
reached node the emitted token is drawn from p given the path, whatever the children are, so the law of the text is the
target's for *any* tree, however it was built. (Ratio tests of p against q are wrong on trees whose nodes were not
sampled from q.) The expected number of accepted tokens is the sum over non-root nodes of the target's path probability.

One uniform per depth decides: the token of an output position is a function of its own uniform and of p, so a seed
reproduces the text whatever trees were drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from tree.tree import TokenTree
from verify.base import Verdict


def descend(tree: TokenTree, nodes: Sequence[int], choices: Sequence[int]) -> Verdict:
    """Walk from the root along the target's choices; shared by all rules that pick one token per node.

    Args:
        nodes: the verified subset, root first; children outside it count as absent.
        choices: the token chosen at each of `nodes`; only those on the way are used, and they must be >= 0.
    """
    assert len(nodes) == len(choices) and nodes[0] == 0, "one choice per node, root first"
    row = {node: i for i, node in enumerate(nodes)}
    path: list[int] = []
    node = 0
    while True:
        token = choices[row[node]]
        assert token >= 0, f"the target's row at node {node} has no probability mass"
        child = tree.children[node].get(token)
        if child is None or child not in row:
            return Verdict(path=tuple(path), extra=token)
        path.append(child)
        node = child


def inverse_cdf(p: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Token per row: the first whose cumulative probability exceeds ``uniforms * row sum``; -1 for a row without mass.

    Args:
        p: ``[rows, vocab]`` probabilities; rows need not sum to 1 exactly, they are taken relative to their own sum.
        uniforms: float64 ``[rows]`` in [0, 1), on the device of `p`.

    A token with p = 0 is never returned: not at uniform 0, and not when the product rounds up to the whole sum.
    """
    total = p.double().cumsum(dim=-1)
    is_possible = p > 0
    # Rounding in a parallel scan may lift the sum at an impossible token, so possibility is required, not implied.
    is_beyond = (total > (uniforms * total[:, -1]).unsqueeze(-1)) & is_possible
    first = is_beyond.byte().argmax(dim=-1)
    last_possible = p.shape[-1] - 1 - is_possible.flip(-1).byte().argmax(dim=-1)
    token = torch.where(is_beyond.any(dim=-1), first, last_possible)
    return torch.where(is_possible.any(dim=-1), token, torch.full_like(token, -1))


@dataclass(frozen=True, slots=True)
class TargetWalk:
    """Sample from the target at every reached node."""

    name: ClassVar[str] = "walk"
    lossless: ClassVar[bool] = True

    def __call__(
        self, tree: TokenTree, nodes: Sequence[int], rows: torch.Tensor, uniform: Callable[[int], float]
    ) -> Verdict:
        """Decide from probabilities ``[len(nodes), vocab]`` and one uniform per depth.

        All rows are decided at once, so that the device is waited for once, not once per depth.
        """
        assert rows.ndim == 2 and rows.shape[0] == len(nodes), f"{len(nodes)} nodes, rows {tuple(rows.shape)}"
        by_depth = {depth: uniform(depth) for depth in sorted({tree.depth[node] for node in nodes})}
        assert all(0.0 <= u < 1.0 for u in by_depth.values()), f"uniforms must be in [0, 1): {by_depth}"
        uniforms = torch.tensor([by_depth[tree.depth[node]] for node in nodes], dtype=torch.float64)
        return descend(tree, nodes, inverse_cdf(rows, uniforms.to(rows.device)).tolist())
