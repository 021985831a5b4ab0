"""A draft head that looks at the target's own keys and values, at work: one pass over many sequences' drafted tokens.

Such a head is made of the target's last layers, trained further, on a guessed input. Of the verified text it needs no entries
of its own: the target's cache holds the very keys and values that these layers would compute. Only the root of a tree, which
the target has not been fed yet, and the drafted nodes have rows here, and they are given back after every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from models.attention_plan import additive
from models.draft_head import DraftHead
from models.kv_cache import RowPool
from models.placed_head import PlacedHead

_LEAST_CAPACITY = 1024  # tokens
_ROOM = 512  # drafted tokens of one text: as many as a working tree has nodes


class Beside:
    """The target's keys and values of one text in the last layers, in one piece, with room behind them for drafted tokens.

    Gathering them anew for every pass costs more than the pass itself once a text has a few hundred tokens.
    """

    def __init__(self) -> None:
        self.length = 0  # verified tokens that are here
        self.keys = self.values = torch.empty(0, 0, 0, 0)  # [layers, kv_heads, capacity, head_dim]

    def catch_up(self, pool: RowPool, first: int, rows: np.ndarray, room: int) -> None:
        """Copy what is new of a text with the cache rows `rows`, from layer `first` on; see that `room` tokens more fit."""
        total = len(rows) + room
        if self.keys.shape[2] < total:
            layers, kv_heads, head_dim = pool.keys.shape[0] - first, *pool.keys.shape[2:]
            capacity = max(total, 2 * self.keys.shape[2], _LEAST_CAPACITY)
            grown = [pool.keys.new_empty(layers, kv_heads, capacity, head_dim) for _ in range(2)]
            if self.length:
                grown[0][:, :, : self.length] = self.keys[:, :, : self.length]
                grown[1][:, :, : self.length] = self.values[:, :, : self.length]
            self.keys, self.values = grown
        new = torch.from_numpy(rows[self.length :])
        for layer in range(self.keys.shape[0]):
            self.keys[layer, :, self.length : len(rows)] = pool.keys[first + layer].index_select(0, new).transpose(0, 1)
            self.values[layer, :, self.length : len(rows)] = pool.values[first + layer].index_select(0, new).transpose(0, 1)
        self.length = len(rows)


@dataclass(frozen=True, slots=True, eq=False)
class Sprout:
    """One sequence's drafted tokens: `n` new ones.

    `prefix` are the target's cache rows of the verified text, int64. `earlier` are this model's rows of nodes entered before,
    `rows` those for the new ones; `visible` is bool `[n, len(earlier) + n]`, who sees whom among the nodes. `fused` is
    `[n, hidden]`: fused features of the target, or what an earlier pass returned as `hidden`.
    """

    tokens: Sequence[int]
    positions: Sequence[int]
    prefix: np.ndarray
    earlier: Sequence[int]
    rows: Sequence[int]
    visible: torch.Tensor
    fused: torch.Tensor
    beside: Beside | None = None  # of this text, brought up to date; None: the target's rows are gathered


@dataclass(frozen=True, slots=True, eq=False)
class Growths:
    """Result of one pass: `logits` `[total, draft_vocab]` float32, `hidden` `[total, hidden]`, and each sprout's first row."""

    logits: torch.Tensor
    hidden: torch.Tensor
    starts: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Span:
    """Queries `[start, end)`, the target's and our rows they attend to, and the mask, `[1, 1, end - start, rows]` or None."""

    start: int
    end: int
    theirs: torch.Tensor
    ours: torch.Tensor
    mask: torch.Tensor | None
    beside: Beside | None = None


class TailLM(PlacedHead):
    """A head beside its target; its own rows are for drafted tokens only.

    `target_pool` is the target's cache, whose last layers the head attends to.
    """

    def __init__(self, head: DraftHead, embedding: torch.Tensor, target_pool: RowPool, *, num_rows: int) -> None:
        config = head.config
        self._target_pool = target_pool
        self._first = target_pool.keys.shape[0] - config.num_layers
        if self._first < 0 or target_pool.keys.shape[2:] != (config.num_kv_heads, config.head_dim):
            raise ValueError("the draft head's layers are not shaped like the target's")
        super().__init__(head, embedding, num_rows=num_rows)

    @torch.inference_mode()
    def forward(self, sprouts: Sequence[Sprout]) -> Growths:
        """Run all sprouts in one pass. Their keys and values land in their rows."""
        assert sprouts, "an empty batch"
        tokens = [token for sprout in sprouts for token in sprout.tokens]
        places = [position for sprout in sprouts for position in sprout.positions]
        rows = torch.tensor([row for sprout in sprouts for row in sprout.rows], device=self.device)
        spans, starts = self._spans(sprouts)
        scaling = self.config.head_dim**-0.5

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            keys, values = self.pool.keys[layer], self.pool.values[layer]
            keys.index_copy_(0, rows, k[0].transpose(0, 1))
            values.index_copy_(0, rows, v[0].transpose(0, 1))
            their_keys = self._target_pool.keys[self._first + layer]
            their_values = self._target_pool.values[self._first + layer]
            shared = q.shape[1] != k.shape[1]
            outputs = [
                scaled_dot_product_attention(
                    q[:, :, span.start : span.end],
                    _seen(span, layer, "keys", their_keys, keys),
                    _seen(span, layer, "values", their_values, values),
                    attn_mask=span.mask,
                    scale=scaling,
                    enable_gqa=shared,
                )
                for span in spans
            ]
            return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)).transpose(1, 2).flatten(2)

        hidden = self._extend([sprout.fused for sprout in sprouts], tokens, places, attend)
        return Growths(self.head.read_out(hidden).float(), self.head.feed_back(hidden), tuple(starts))

    def _spans(self, sprouts: Sequence[Sprout]) -> tuple[list[_Span], list[int]]:
        """One span per sprout; on an accelerator one for all, block-diagonal (see `models.attention.make_plan`)."""
        spans, starts, start = [], [], 0
        for sprout in sprouts:
            end = start + len(sprout.tokens)
            assert sprout.beside is None or sprout.beside.length == len(sprout.prefix), "the copy is not up to date"
            mask = torch.ones(len(sprout.tokens), len(sprout.prefix) + sprout.visible.shape[1], dtype=torch.bool)
            mask[:, len(sprout.prefix) :] = sprout.visible
            ours = torch.tensor([*sprout.earlier, *sprout.rows])
            spans.append(_Span(start, end, torch.from_numpy(sprout.prefix), ours, mask, sprout.beside))
            starts.append(start)
            start = end
        if self.device.type != "cpu" and len(spans) > 1:
            spans = [_union(spans)]
        return [self._placed(span) for span in spans], starts

    def _placed(self, span: _Span) -> _Span:
        assert span.mask is not None, "made just now"
        mask = None if bool(span.mask.all()) else additive(span.mask[None, None], self.pool.keys.dtype).to(self.device)
        return _Span(span.start, span.end, span.theirs.to(self.device), span.ours.to(self.device), mask, span.beside)

    def catch_up(self, beside: Beside, rows: np.ndarray) -> None:
        """Bring a text's `beside` up to date; `rows` are the target's cache rows of it."""
        beside.catch_up(self._target_pool, self._first, rows, min(self.pool.num_rows, _ROOM))


def _union(spans: Sequence[_Span]) -> _Span:
    """One span over all queries; columns are all of the target's rows, then all of ours."""
    theirs, ours = torch.cat([span.theirs for span in spans]), torch.cat([span.ours for span in spans])
    mask = torch.zeros(spans[-1].end, len(theirs) + len(ours), dtype=torch.bool)
    left, right = 0, len(theirs)
    for span in spans:
        assert span.mask is not None, "made just now"
        count = len(span.theirs)
        mask[span.start : span.end, left : left + count] = span.mask[:, :count]
        mask[span.start : span.end, right : right + len(span.ours)] = span.mask[:, count:]
        left, right = left + count, right + len(span.ours)
    return _Span(0, spans[-1].end, theirs, ours, mask)


def _seen(span: _Span, layer: int, which: str, theirs: torch.Tensor, ours: torch.Tensor) -> torch.Tensor:
    """Keys or values `[1, kv_heads, rows, head_dim]` that a span attends to: the text's, then the drafted tokens'."""
    if span.beside is None:
        return _gather(theirs, span.theirs, ours, span.ours)
    everything: torch.Tensor = getattr(span.beside, which)[layer]
    start, end = span.beside.length, span.beside.length + len(span.ours)
    everything[:, start:end] = ours.index_select(0, span.ours).transpose(0, 1)
    return everything[None, :, :end]


def _gather(theirs: torch.Tensor, their_rows: torch.Tensor, ours: torch.Tensor, our_rows: torch.Tensor) -> torch.Tensor:
    """Keys or values `[1, kv_heads, rows, head_dim]` out of two pools."""
    both = torch.cat((theirs.index_select(0, their_rows), ours.index_select(0, our_rows)))
    return both.transpose(0, 1)[None]
