"""A draft head at work: one pass over many sequences' new entries, over its own pool of rows.

What `models.causal_lm.CausalLM` is for a decoder. The head borrows the target's embedding and, unless it brings its own, its
output rows; on a CPU its linear layers are packed like the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from models.attention import Segment, attend
from models.attention_plan import make_plan
from models.draft_head import DraftHead
from models.placed_head import PlacedHead


@dataclass(frozen=True, slots=True, eq=False)
class Extension:
    """Result of one pass.

    `logits` is `[num_wanted, draft_vocab]` float32, segment `i`'s at `offsets[i]` and up; `hidden` is `[total, hidden]`,
    segment `i`'s first row at `starts[i]`: what a token drafted from that entry is fed with.
    """

    logits: torch.Tensor
    offsets: tuple[int, ...]
    hidden: torch.Tensor
    starts: tuple[int, ...]


class HeadLM(PlacedHead):
    """A head that has entries of its own for the whole text."""

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment], fused: Sequence[torch.Tensor]) -> Extension:
        """Run all segments in one pass.

        `fused[i]` is `[n, hidden]`: the fused features of segment i's tokens, or what an earlier pass returned as `hidden`.
        """
        assert segments and len(segments) == len(fused), "one feature block per segment"
        tokens: list[int] = []
        places: list[int] = []
        wanted: list[int] = []
        offsets, starts = [0], []
        for segment, block in zip(segments, fused, strict=True):
            assert len(segment.tokens) == len(segment.positions) == len(segment.rows) == len(block), "ragged segment"
            start = len(tokens)
            starts.append(start)
            tokens.extend(segment.tokens)
            places.extend(segment.positions)
            wanted.extend(start + index for index in segment.wanted)
            offsets.append(len(wanted))
        group = self.config.num_heads // self.config.num_kv_heads
        plan = make_plan(segments, self.pool, {}, union=self.device.type != "cpu", group=group)
        scaling = self.config.head_dim**-0.5

        def attention(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return attend(plan, layer, q, k, v, scaling).transpose(1, 2).flatten(2)

        hidden = self._extend(fused, tokens, places, attention)
        logits = self.head.read_out(hidden[wanted]).float()
        return Extension(logits, tuple(offsets), self.head.feed_back(hidden), tuple(starts))


def borrow_output(head: DraftHead, output_rows: torch.Tensor) -> None:
    """Give a head without output rows of its own the target's `[vocab, target_hidden]`, those that its id map names."""
    config = head.config
    if output_rows.shape[1] != config.hidden_size:
        raise ValueError(
            f"the draft head's hidden size is {config.hidden_size}, the target's output rows have {output_rows.shape[1]}"
        )
    rows = output_rows[head.id_map.to(output_rows.device)]
    head.output.weight = nn.Parameter(rows.to(head.norm.dtype).clone(), requires_grad=False)
