"""Leading a drafter along a text that is known already, as the engine would if every draft were rejected.

A root is the last verified token; below it hangs a chain of the true next tokens instead of drafted ones. So a question at
depth d shows how well the drafter continues where everything drafted so far was right, the only case in which depth d matters.
Only the drafter's protocol is used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from drafters.base import Drafter, DraftRequest
from models.attention import Segment
from models.causal_lm import CausalLM
from models.kv_cache import RowList, RowPool
from tree.growth import Ask
from tree.tree import TokenTree

TRUTH = "target"  # creator of the true tokens' nodes
_LEAST_READ = 256  # tokens; every drafter reads at least as many of a long text with each question


@dataclass(slots=True, eq=False)
class Trail:
    """One drafter on its way along one text. Always :meth:`close` it."""

    drafter: Drafter
    tokens: Sequence[int]
    root: int  # index of the last verified token
    memory: Memory | None  # the target's of all tokens, closed with the trail; None for a drafter that needs none
    state: Any = None
    _num_shown: int = 0  # verified tokens whose hidden states the drafter has observed
    _tree: TokenTree = field(default_factory=lambda: TokenTree(0))  # of the last question

    def __post_init__(self) -> None:
        self.state = self.drafter.open()
        self._show()

    @property
    def num_left(self) -> int:
        """True tokens behind the root."""
        return len(self.tokens) - 1 - self.root

    @property
    def num_reads(self) -> int:
        """Questions after which a drafter has certainly read all of the text that it may have to catch up on."""
        return math.ceil((self.root + 1) / _LEAST_READ)

    def ask(self, tree: TokenTree, nodes: Sequence[int], width: int, *, rescore: bool = False) -> DraftRequest:
        """A question about nodes of a tree at this root."""
        self._tree = tree
        question = Ask(tuple(nodes), width, rescore=rescore)
        if self.memory is None:
            return DraftRequest(self.state, self.tokens[: self.root + 1], tree, question)
        rows = self.memory.rows.view()[: self.root]
        return DraftRequest(self.state, self.tokens[: self.root + 1], tree, question, target_rows=rows)

    def ask_along_truth(self, depth: int, width: int) -> DraftRequest:
        """One question about the root and the `depth` - 1 true tokens below it; node d is the true token of depth d.

        All depths at once: the nodes of a chain depend on their ancestors alone, and one pass is cheaper than `depth` of them.
        The drafter is asked to rescore the chain, which gives its probability of every true token, however far down its list
        that is. With `depth` 0 the root alone is asked about: that makes the drafter read the text.
        """
        tree = TokenTree(self.tokens[self.root])
        for node in range(depth):
            tree.add(node, self.tokens[self.root + 1 + node], 0.0, TRUTH)
        return self.ask(tree, range(max(depth, 1)), width, rescore=depth > 0)

    def advance(self) -> None:
        """Nothing drafted was accepted; the true next token is the new root."""
        self.drafter.commit(self.state, self.tokens[: self.root + 1], self._tree, ())
        self.root += 1
        self._show()

    def close(self) -> None:
        """Give back what the drafter and the target hold."""
        self.drafter.close(self.state)
        if self.memory is not None:
            self.memory.close()

    def _show(self) -> None:
        """Hand over the hidden states of all verified tokens but the root, which the target has not been fed."""
        if self.memory is not None and self.root > self._num_shown:
            self.drafter.observe(self.state, self._num_shown, self.memory.hidden[self._num_shown : self.root])
            self._num_shown = self.root


@dataclass(slots=True, eq=False)
class Memory:
    """What the target keeps of a text that it has read: hidden states, and rows of its cache until they are given back."""

    hidden: torch.Tensor  # [tokens, layers, hidden_size]
    rows: RowList
    pool: RowPool

    def close(self) -> None:
        """Give the rows back. Safe to call twice."""
        self.pool.release(self.rows.truncate(0))


@torch.inference_mode()
def read_text(target: CausalLM, tokens: Sequence[int], layers: Sequence[int], *, chunk: int = 256) -> Memory:
    """Let the target read a text in chunks; it must capture `layers`. Raises OutOfRows, and then holds none."""
    rows = RowList()
    blocks = []
    try:
        for start in range(0, len(tokens), chunk):
            piece = tokens[start : start + chunk]
            prefix, taken = rows.view().copy(), target.pool.allocate(len(piece))
            rows.extend(taken)
            scores = target.forward([Segment(piece, range(start, start + len(piece)), prefix, taken, ())])
            captured = scores.hidden_of(0, len(piece))
            assert set(layers) <= captured.keys(), f"the target captures layers {sorted(captured)}, wanted are {tuple(layers)}"
            chosen = [captured[layer] for layer in layers]
            blocks.append(torch.stack(chosen, dim=1) if chosen else torch.empty(len(piece), 0, 0))
    except BaseException:
        target.pool.release(rows.truncate(0))
        raise
    return Memory(torch.cat(blocks), rows, target.pool)
