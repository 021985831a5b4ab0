"""The oracle of the model tests: an unmodified transformers model, forwarded without a cache over one path at a time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from models import toy
from models.attention import Segment, chain_then_tree
from models.causal_lm import CausalLM
from models.kv_cache import RowList
from tree.flatten import ancestor_mask, subset_parents, visible
from tree.tree import TokenTree

VOCAB = 67
NOTHING = np.empty(0, dtype=np.int64)


@torch.inference_mode()
def plain_logits(model: nn.Module, tokens: Sequence[int]) -> torch.Tensor:
    """`[len(tokens), vocab]`: eager attention, no cache, causal."""
    model.config._attn_implementation = "eager"
    return model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0].float()


def pair(
    family: toy.Family = "llama", seed: int = 0, *, num_rows: int = 512, **options: object
) -> tuple[nn.Module, CausalLM]:
    """The same tiny model twice: plain, and behind `CausalLM`."""
    vocab = int(options.pop("vocab_size", VOCAB))  # type: ignore[call-overload]
    wrap = {name: options.pop(name) for name in ("num_tokens", "capture") if name in options}
    plain = toy.tiny_causal_lm(family, vocab, seed, **options)  # type: ignore[arg-type]
    return plain, CausalLM(toy.tiny_causal_lm(family, vocab, seed, **options), num_rows=num_rows, **wrap)  # type: ignore[arg-type]


def random_tree(
    rng: random.Random, root: int, size: int, *, vocab: int = VOCAB, drafters: Sequence[str] = ("small",)
) -> TokenTree:
    """`size` nodes in all, hanging anywhere."""
    tree = TokenTree(root)
    grow_tree(rng, tree, size, vocab=vocab, drafters=drafters)
    return tree


def grow_tree(
    rng: random.Random, tree: TokenTree, size: int, *, vocab: int = VOCAB, drafters: Sequence[str] = ("small",)
) -> None:
    """Add nodes at random places until the tree has `size`."""
    while len(tree) < size:
        parent = rng.randrange(len(tree))
        token = rng.randrange(vocab)
        if token not in tree.children[parent]:
            tree.add(parent, token, -rng.random(), rng.choice(drafters))


@dataclass(eq=False)
class Text:
    """A sequence as the engine holds it: verified tokens, the last of which has no row yet."""

    tokens: list[int]
    rows: RowList = field(default_factory=RowList)

    def prefill(self, lm: CausalLM, chunks: Sequence[int]) -> None:
        """Feed all tokens but the last, in pieces of the given sizes and a rest."""
        end = len(self.tokens) - 1
        for size in (*chunks, end):
            start = len(self.rows)
            count = min(size, end - start)
            if count > 0:
                rows = lm.pool.allocate(count)
                tokens = self.tokens[start : start + count]
                lm.forward([Segment(tokens, range(start, start + count), self.rows.view(), rows, ())])
                self.rows.extend(rows)

    def segment(self, lm: CausalLM, tree: TokenTree) -> Segment:
        """Pending text, then every node below the root, in one go."""
        pending, nodes = self.tokens[len(self.rows) :], list(range(len(tree)))
        mask = ancestor_mask(subset_parents(tree, nodes))[1:, 1:]
        root = len(self.tokens) - 1
        return Segment(
            tokens=[*pending, *tree.token[1:]],
            positions=[*range(len(self.rows), root + 1), *(root + tree.depth[node] for node in nodes[1:])],
            prefix=self.rows.view(),
            rows=lm.pool.allocate(len(pending) + len(nodes) - 1),
            wanted=range(len(pending) - 1, len(pending) + len(nodes) - 1),
            visible=chain_then_tree(len(pending), mask),
        )

    def layer(self, lm: CausalLM, tree: TokenTree, new: Sequence[int], earlier: dict[int, int]) -> Segment:
        """Nodes `new` (the root included, if it is among them), given the rows of those fed `earlier`, which it extends."""
        root = len(self.tokens) - 1
        tree_rows = list(earlier.values())
        mask = visible(tree, new, [*earlier, *new])
        rows = lm.pool.allocate(len(new))
        earlier.update(zip(new, rows, strict=True))
        return Segment(
            tokens=[tree.token[node] for node in new],
            positions=[root + tree.depth[node] for node in new],
            prefix=self.rows.view(),
            rows=rows,
            wanted=range(len(new)),
            tree_rows=tree_rows,
            visible=mask,
        )


def node_logits(model: nn.Module, tokens: Sequence[int], tree: TokenTree) -> torch.Tensor:
    """`[nodes, vocab]`: for each node the plain model's last row over the text and the node's path."""
    return torch.stack([plain_logits(model, [*tokens, *tree.path_tokens(node)])[-1] for node in range(len(tree))])


def random_text(rng: random.Random, length: int, vocab: int = VOCAB) -> Text:
    """`length` random tokens, none fed yet."""
    return Text([rng.randrange(vocab) for _ in range(length)])


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest absolute difference; NaN counts as infinite."""
    difference = float((a - b).abs().max())
    return difference if difference == difference else float("inf")
