"""Students: what is trained, how it begins, and what it is asked at every position of a batch.

Two families. A *head* goes on from the target's hidden states (`models.draft_head`); it is asked several steps ahead, on its
own hidden states, because that is what drafting does. An *lm* student is a plain decoder of a few of the target's layers that
reads tokens only. Both share the target's embedding and output rows, which stay frozen and are not stored with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from distill.batches import Batch
from distill.chains import ChainAttention
from distill.loss import Teaching
from models.draft_head import DraftHead, HeadLayer


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """What a student says at `n` positions of one depth (0: on true text only)."""

    depth: int
    hidden: torch.Tensor  # [n, hidden], behind the last norm
    logits: torch.Tensor  # [n, draft_vocab]
    teaching: Teaching


class HeadStudent(nn.Module):
    """A draft head in training.

    `tail` are the target's own last layers, for a head that attends to the target's keys and values; they are no part of the
    student and stay as they are. `share` is the part of each text's places at which the head is asked at depth 0 (answers
    first), and `deeper` the part of those at which it is asked further: where a head needs no entries of its own of the
    verified text, places that nobody asks about cost nothing.
    """

    def __init__(
        self,
        head: DraftHead,
        embedding: torch.Tensor,
        *,
        depths: int,
        tail: Sequence[HeadLayer] = (),
        share: float = 0.6,
        deeper: float = 0.4,
    ) -> None:
        super().__init__()
        assert (head.config.context == "target") == bool(tail), "a tail for a head that looks at the target, and only then"
        self.head, self.depths, self.share, self.deeper = head, depths, share, deeper
        self._tail = tuple(tail)  # in a tuple, so that it is not a part of this module
        self.register_buffer("embedding", embedding, persistent=False)
        to_draft = torch.full((len(embedding),), -1, dtype=torch.int64)
        to_draft[head.id_map] = torch.arange(len(head.id_map))
        self.register_buffer("to_draft", to_draft, persistent=False)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> HeadStudent:
        """The target's layers are no part of the student, but they go to the device that it goes to."""
        for layer in self._tail:
            layer._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def predict(self, batch: Batch, generator: torch.Generator) -> list[Prediction]:
        """One prediction per depth."""
        first = self._on_target if self._tail else self._on_own_entries
        hidden, attention, starts = first(batch, generator)
        shift = 1 if self._tail else 0  # the target's entries stand at their own token, a head's at the one before
        predictions = [self._read(batch, hidden, starts, 0)]
        if self.depths > 1:
            chosen = self._choose(starts.shape, generator).to(starts.device)
            starts, hidden = attention.keep(chosen), _pick(hidden, chosen)
            for depth in range(1, self.depths):
                fed_back = self.head.feed_back(hidden).float()
                embeddings = self.embedding[batch.tokens.gather(1, starts + 1 + depth)]  # type: ignore[index]
                hidden = self.head.extend(fed_back, embeddings, starts + depth + shift, attention)
                predictions.append(self._read(batch, hidden, starts, depth))
        return predictions

    def _on_own_entries(
        self, batch: Batch, generator: torch.Generator
    ) -> tuple[torch.Tensor, ChainAttention, torch.Tensor]:
        """Step 0 of a head with entries of its own: all of the text, since later places look back on it."""
        attention = ChainAttention(len(self.head.layers))
        attention.begin_step(None)
        last = batch.tokens.shape[1] - 1
        at = torch.arange(last, device=batch.tokens.device)[None]
        fused = self.head.fuse(batch.features[:, :last].float()).float()
        hidden = self.head.extend(fused, self.embedding[batch.tokens[:, 1:]], at, attention)  # type: ignore[index]
        starts = self._places(batch, generator)
        attention.begin_step(starts)
        return _pick(hidden, starts), attention, starts

    def _on_target(self, batch: Batch, generator: torch.Generator) -> tuple[torch.Tensor, ChainAttention, torch.Tensor]:
        """Step 0 of a head that looks at the target: its first drafted entry, after the target's keys and values."""
        attention = target_attention(self.head, self._tail, batch.features)
        starts = self._places(batch, generator)
        attention.begin_step(starts)
        row = torch.arange(len(starts), device=starts.device)[:, None]
        fused = self.head.fuse(batch.features[row, starts].float()).float()
        embeddings = self.embedding[batch.tokens.gather(1, starts + 1)]  # type: ignore[index]
        return self.head.extend(fused, embeddings, starts + 1, attention), attention, starts

    def _places(self, batch: Batch, generator: torch.Generator) -> torch.Tensor:
        """Where the head is asked, `[texts, n]` ascending: where all that follows exists, answers first, else at random."""
        texts, length = batch.tokens.shape
        last = length - 1 - self.depths
        wanted = batch.is_answer[:, 2 : 2 + last].float()
        priority = torch.rand(texts, last, generator=generator).to(wanted.device) + wanted
        return priority.topk(max(int(last * self.share), 1), dim=1).indices.sort(dim=1).values

    def _choose(self, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
        """Which of `[texts, n]` places go on, `[texts, k]` ascending."""
        order = torch.rand(shape, generator=generator).argsort(dim=1)
        return order[:, : max(int(shape[1] * self.deeper), 1)].sort(dim=1).values

    def _read(self, batch: Batch, hidden: torch.Tensor, starts: torch.Tensor, depth: int) -> Prediction:
        """Read out where the token to be predicted is the target's answer."""
        length = batch.tokens.shape[1]
        known = starts + 1 + depth  # the last token that the student was given
        asked = (known + 1 < length) & batch.is_answer.gather(1, (known + 1).clamp(max=length - 1))
        row, column = asked.nonzero(as_tuple=True)
        place = known[row, column]
        teaching = Teaching(
            self.to_draft[batch.top_ids[row, place]], batch.top_lps[row, place], batch.final[row, place]  # type: ignore[index]
        )
        normed = self.head.last_norm(hidden[row, column])
        return Prediction(depth, normed, self.head.output(normed), teaching)


@torch.no_grad()
def target_attention(head: DraftHead, tail: Sequence[HeadLayer], features: torch.Tensor) -> ChainAttention:
    """Attention over the target's own keys and values, computed by its last layers `tail` from the state below them.

    `features` is `[texts, length, layers, hidden]`; the last of its layers is the one that `tail` follows.
    """
    attention = ChainAttention(len(tail))
    attention.begin_step(None)
    x = features[:, :, -1].float()
    cos, sin = head.rotary(x, torch.arange(x.shape[1], device=x.device)[None])
    rotation = (cos[:, None], sin[:, None])
    for layer in tail[:-1]:
        x = layer(x, x, rotation, attention)
    attention.look_at(len(tail) - 1, *tail[-1].keys_values(x, rotation))
    return attention


def _pick(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """`x` `[texts, length, size]` at `places` `[texts, n]`: `[texts, n, size]`."""
    return x.gather(1, places[..., None].expand(-1, -1, x.shape[-1]))


class LMStudent(nn.Module):
    """A plain decoder in training (`models.shared_lm`); it reads true tokens only, so it has one depth."""

    depths = 1

    def __init__(self, model: nn.Module, ids: torch.Tensor) -> None:
        super().__init__()
        self.model = model
        size = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
        to_draft = torch.full((size,), -1, dtype=torch.int64)
        to_draft[ids] = torch.arange(len(ids))
        self.register_buffer("ids", ids)
        self.register_buffer("to_draft", to_draft, persistent=False)

    def predict(self, batch: Batch, generator: torch.Generator) -> list[Prediction]:
        """What follows every token, where the target answered."""
        decoder, head = self.model.get_decoder(), self.model.get_output_embeddings()  # type: ignore[operator]
        hidden = decoder(input_ids=batch.tokens, use_cache=False).last_hidden_state
        row, column = batch.is_answer[:, 1:].nonzero(as_tuple=True)
        teaching = Teaching(
            self.to_draft[batch.top_ids[row, column]], batch.top_lps[row, column], batch.final[row, column]  # type: ignore[index]
        )
        seen = hidden[row, column]
        return [Prediction(0, seen, head(seen), teaching)]
