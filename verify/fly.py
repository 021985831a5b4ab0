"""LOSSY. FLy: forgive a mismatch where the target was undecided, if it agrees with everything that follows for a while.

Source: FLy (2511.22972), for chains and temperature 0. A mismatch is kept if the entropy of the target's three best tokens
there is at least `min_entropy` and the next `window` drafted tokens all match; else the chain is cut in front of it. Each
mismatch is judged alone, on the matches as they came. One that is closer to the end of the chain than the window is refused.

Trap: published windows of 6 count the mismatch itself or do not. `window` counts the tokens after it, so it is 5 for the
former.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from tree.draws import TreeKind
from tree.tree import TokenTree
from verify.base import Noise, Rows, Verdict
from verify.pairs import check_pair

_BEST = 3  # tokens whose entropy is taken; their probabilities are not normalized to sum to 1


@dataclass(frozen=True, slots=True)
class Fly:
    """Greedy matching of a chain that forgives isolated mismatches."""

    name: ClassVar[str] = "fly"
    lossless: ClassVar[bool] = False
    accepts: ClassVar[frozenset[TreeKind]] = frozenset(TreeKind)
    needs_chain: ClassVar[bool] = True
    reads_logits: ClassVar[bool] = True

    min_entropy: float = 0.3  # nats; infinity: greedy matching
    window: int = 5  # matches that must follow

    def __post_init__(self) -> None:
        if self.window < 0:
            raise ValueError(f"window must be at least 0, got {self.window}")

    def __call__(self, tree: TokenTree, nodes: Sequence[int], rows: Rows, noise: Noise) -> Verdict:
        """Decide from logits ``[len(nodes), vocab]`` at temperature 1. Raise ValueError for a tree that branches."""
        assert isinstance(rows, torch.Tensor), "logits are looked at all together"
        assert rows.ndim == 2 and rows.shape[0] == len(nodes), f"{len(nodes)} nodes, rows {tuple(rows.shape)}"
        parents = [tree.parent[node] for node in nodes[1:]]
        check_pair(self, tree.kind, is_chain=parents == list(nodes[:-1]))
        best: list[int] = rows.argmax(dim=-1).tolist()
        matches = [tree.token[node] == token for node, token in zip(nodes[1:], best, strict=False)]
        entropies = best_entropy(rows)
        possible: list[bool] = [
            value > -torch.inf for value in rows[torch.arange(len(matches)), [tree.token[node] for node in nodes[1:]]].tolist()
        ]
        kept, promoted = 0, []
        for i, is_match in enumerate(matches):
            following = matches[i + 1 : i + 1 + self.window]
            is_forgiven = possible[i] and entropies[i] >= self.min_entropy and len(following) == self.window
            if not is_match and not (is_forgiven and all(following)):
                break
            kept += 1
            if not is_match:
                promoted.append(nodes[kept])
        return Verdict(tuple(nodes[1 : kept + 1]), best[kept], tuple(promoted))


def best_entropy(logits: torch.Tensor) -> list[float]:
    """Sum of -p log p over each row's three most likely tokens, in nats; `logits` is ``[rows, vocab]``."""
    lp = torch.log_softmax(logits.double(), dim=-1).topk(min(_BEST, logits.shape[1]), dim=-1).values
    p = lp.exp()
    found: list[float] = torch.where(p > 0, -p * lp, 0.0).sum(dim=-1).tolist()
    return found
