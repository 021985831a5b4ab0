"""Attention over a ragged batch of tree segments, registered with transformers so that no model code is copied.

All sequences' new tokens are flattened into one `[1, total]` forward. Per layer this function writes the new keys and values
into their rows of the pool and lets every segment attend to the rows it may see: its verified prefix, and of the draft tree
only a token's own ancestors and itself. Positions were applied to the keys by the model before they came here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from models.attention_plan import Batch, Plan

NAME = "graftserve_ragged"
# Arguments by which models ask for attention that differs from plain softmax attention; we do not serve those.
_UNSERVED = ("softcap", "s_aux", "position_bias", "sliding_window")


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """One sequence's share of a ragged forward: `n` new tokens.

    `rows` are where the new keys and values are written. Every new token sees all of `prefix`. What it sees beyond that is
    `visible`, `[n, len(tree_rows) + n]`: rows of tree nodes forwarded earlier, then the new tokens themselves; `None` means
    causal order among the new tokens (then `tree_rows` must be empty). `wanted` are the indices of the new tokens whose
    logits are needed.
    """

    tokens: Sequence[int]
    positions: Sequence[int]
    prefix: np.ndarray  # int64 [prefix_len]
    rows: Sequence[int]
    wanted: Sequence[int]
    tree_rows: Sequence[int] = ()
    visible: torch.Tensor | None = None

    def mask(self) -> torch.Tensor | None:
        """Bool `[n, prefix_len + len(tree_rows) + n]` on the CPU; `None` where every token sees everything."""
        count, extra = len(self.tokens), len(self.tree_rows) + len(self.tokens)
        if self.visible is None:
            assert not self.tree_rows, "tree rows need a mask"
            if count == 1:
                return None
            own = torch.ones(count, count, dtype=torch.bool).tril_()
        else:
            assert self.visible.shape == (count, extra), f"mask {tuple(self.visible.shape)}, expected {(count, extra)}"
            own = self.visible
        mask = torch.ones(count, len(self.prefix) + extra, dtype=torch.bool)
        mask[:, len(self.prefix) :] = own
        return mask

    def visible_rows(self) -> np.ndarray:
        """Row numbers of everything some token of this segment may see, int64, new tokens last."""
        return np.concatenate((self.prefix, np.asarray((*self.tree_rows, *self.rows), dtype=np.int64)))


def chain_then_tree(num_chain: int, tree: torch.Tensor) -> torch.Tensor:
    """`visible` for verified tokens in causal order followed by nodes of a tree that hangs below the last of them.

    `tree` is bool `[nodes, nodes]`, who sees whom among the nodes. Returns `[num_chain + nodes] * 2`: every node sees the
    whole chain, no chain token sees a node.
    """
    total = num_chain + len(tree)
    visible = torch.zeros(total, total, dtype=torch.bool)
    visible[:, :num_chain] = True
    visible[:num_chain, :num_chain].tril_()
    visible[num_chain:, num_chain:] = tree
    return visible


def ragged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    ragged_plan: Plan,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Write `key`, `value` `[1, kv_heads, total, head_dim]` to the pool; attend from `query` `[1, heads, total, head_dim]`.

    Returns `[1, total, heads, head_dim]`, the shape transformers expects. Raises ValueError for attention variants that
    are not plain softmax attention.
    """
    for name in _UNSERVED:
        if kwargs.get(name) is not None:
            raise ValueError(f"{type(module).__name__} asks for `{name}`, which tree attention does not serve")
    slot = ragged_plan.slots[module.layer_idx]  # type: ignore[index]
    return attend(ragged_plan, slot, query, key, value, scaling).transpose(1, 2), None


def attend(
    plan: Plan, slot: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None = None
) -> torch.Tensor:
    """Write keys and values to layer `slot` of the pool, and attend; shapes as above, but heads before tokens in the result."""
    keys, values = plan.pool.keys[slot], plan.pool.values[slot]
    keys.index_copy_(0, plan.write_rows, key[0].transpose(0, 1))
    values.index_copy_(0, plan.write_rows, value[0].transpose(0, 1))
    if len(plan.batches) == 1 and plan.batches[0].queries is None:
        return _attended(plan.batches[0], query, keys, values, scaling)
    result = torch.empty_like(query)
    for batch in plan.batches:
        assert batch.queries is not None, "a batch of all queries is the only one"
        result.index_copy_(2, batch.queries, _attended(batch, query.index_select(2, batch.queries), keys, values, scaling))
    return result


def _attended(
    batch: Batch, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """What the batch's queries, `[1, heads, sequences * n, head_dim]`, get from their rows of a layer; of the same shape."""
    sequences, (_, heads, total, head_dim) = batch.sequences, query.shape
    kv_heads, count = keys.shape[1], total // sequences
    if sequences > 1 or batch.fold > 1:
        split = query.view(heads // batch.fold, batch.fold, sequences, count, head_dim)
        query = split.permute(2, 0, 1, 3, 4).reshape(sequences, heads // batch.fold, batch.fold * count, head_dim)
    attended = scaled_dot_product_attention(
        query,
        keys.index_select(0, batch.rows).view(sequences, -1, kv_heads, head_dim).transpose(1, 2),
        values.index_select(0, batch.rows).view(sequences, -1, kv_heads, head_dim).transpose(1, 2),
        attn_mask=batch.mask,
        scale=scaling,
        enable_gqa=query.shape[1] != kv_heads,
    )
    if sequences == 1:
        return attended.reshape(1, heads, total, head_dim)
    split = attended.reshape(sequences, heads // batch.fold, batch.fold, count, head_dim)
    return split.permute(1, 2, 0, 3, 4).reshape(1, heads, total, head_dim)


AttentionInterface.register(NAME, ragged_attention)
