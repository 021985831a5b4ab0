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

from models.kv_cache import RowPool

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


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Queries `[start, end)` of the flattened batch, the rows they attend to, and the mask between the two."""

    start: int
    end: int
    rows: torch.Tensor  # int64 [num_rows]
    mask: torch.Tensor | None  # [1, 1, end - start, num_rows]; in a plan added to the scores, before that bool


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Everything the layers of one forward share: where to write, what to read."""

    pool: RowPool
    slots: dict[int, int]  # the model's layer index -> layer of the pool
    write_rows: torch.Tensor  # int64 [total]
    spans: tuple[Span, ...]


def make_plan(segments: Sequence[Segment], pool: RowPool, slots: dict[int, int], *, union: bool) -> Plan:
    """Lay out a forward over `segments`.

    With `union` one masked attention covers all segments: more arithmetic, one kernel per layer, which is what an
    accelerator wants. Without, each segment attends on its own, which is what a CPU wants. The union's price: a masked NaN
    is still a NaN (0 * NaN), so one sequence's broken numbers reach the whole batch, though never a later one's rows.
    """
    device = pool.keys.device
    spans, start = [], 0
    for segment in segments:
        end = start + len(segment.tokens)
        mask = segment.mask()
        rows = torch.from_numpy(segment.visible_rows())
        spans.append(Span(start, end, rows, None if mask is None else mask[None, None]))
        start = end
    if union and len(spans) > 1:
        spans = [_union(spans)]
    write = torch.tensor([row for segment in segments for row in segment.rows], dtype=torch.int64)
    dtype = pool.keys.dtype
    on_device = tuple(
        Span(s.start, s.end, s.rows.to(device), None if s.mask is None else additive(s.mask, dtype).to(device)) for s in spans
    )
    return Plan(pool, slots, write.to(device), on_device)


def additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where a bool `mask` is True, -inf elsewhere. Attention would make the same of it, but once in every layer."""
    return torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, -torch.inf)


def _union(spans: Sequence[Span]) -> Span:
    """One span over all queries and all rows, block-diagonal: no sequence sees another's rows."""
    rows = torch.cat([span.rows for span in spans])
    mask = torch.zeros(1, 1, spans[-1].end, len(rows), dtype=torch.bool)
    offset = 0
    for span in spans:
        block = mask[:, :, span.start : span.end, offset : offset + len(span.rows)]
        block.copy_(torch.ones_like(block) if span.mask is None else span.mask)
        offset += len(span.rows)
    return Span(0, spans[-1].end, rows, mask)


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
    shared_heads = query.shape[1] != key.shape[1]
    outputs = []
    for span in plan.spans:
        outputs.append(
            scaled_dot_product_attention(
                query[:, :, span.start : span.end],
                keys.index_select(0, span.rows).transpose(0, 1)[None],
                values.index_select(0, span.rows).transpose(0, 1)[None],
                attn_mask=span.mask,
                scale=scaling,
                enable_gqa=shared_heads,
            )
        )
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


AttentionInterface.register(NAME, ragged_attention)
