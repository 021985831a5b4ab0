"""Students: what is trained, how it begins, and what it is asked at every position of a batch.

Two families. A *head* goes on from the target's hidden states (`models.draft_head`); it is asked several steps ahead, on its
own hidden states, because that is what drafting does. An *lm* student is a plain decoder of a few of the target's layers that
reads tokens only. Both share the target's embedding and output rows, which stay frozen and are not stored with them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from distill.batches import Batch
from distill.chains import ChainAttention
from distill.loss import Teaching
from models.draft_head import DraftHead


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """What a student says at `n` positions of one depth (0: on true text only)."""

    depth: int
    hidden: torch.Tensor  # [n, hidden], behind the last norm
    logits: torch.Tensor  # [n, draft_vocab]
    teaching: Teaching


class HeadStudent(nn.Module):
    """A draft head in training. `to_draft` maps target ids to draft ids, -1 for those outside."""

    def __init__(self, head: DraftHead, embedding: torch.Tensor, *, depths: int, share: float = 0.5) -> None:
        super().__init__()
        self.head, self.depths, self.share = head, depths, share
        self.register_buffer("embedding", embedding, persistent=False)
        to_draft = torch.full((len(embedding),), -1, dtype=torch.int64)
        to_draft[head.id_map] = torch.arange(len(head.id_map))
        self.register_buffer("to_draft", to_draft, persistent=False)

    def predict(self, batch: Batch, generator: torch.Generator) -> list[Prediction]:
        """One prediction per depth. Deeper ones are asked at a random `share` of the places, which is cheaper."""
        head, attention = self.head, ChainAttention(len(self.head.layers))
        texts, length = batch.tokens.shape
        count = length - 1
        embeddings = self.embedding[batch.tokens]  # type: ignore[index]
        attention.begin_step(None)
        at = torch.arange(count, device=batch.tokens.device)[None]
        hidden = head.extend(head.fuse(batch.features[:, :count].float()).float(), embeddings[:, 1:], at, attention)
        starts = at.expand(texts, count)
        predictions = [self._read(batch, hidden, starts, 0)]
        if self.depths > 1:
            starts = self._starts(batch, generator)
            hidden = _pick(hidden, starts)
            for depth in range(1, self.depths):
                attention.begin_step(starts)
                fed_back = head.feed_back(hidden).float()
                hidden = head.extend(fed_back, _pick(embeddings, starts + 1 + depth), starts + depth, attention)
                predictions.append(self._read(batch, hidden, starts, depth))
        return predictions

    def _starts(self, batch: Batch, generator: torch.Generator) -> torch.Tensor:
        """Where chains begin, `[texts, n]`: where all of their tokens exist, answers before the rest, at random."""
        texts, length = batch.tokens.shape
        last = length - 1 - self.depths
        wanted = batch.is_answer[:, 2 : 2 + last].float()
        priority = torch.rand(texts, last, generator=generator).to(wanted.device) + wanted
        number = max(int(last * self.share), 1)
        return priority.topk(number, dim=1).indices.sort(dim=1).values

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
