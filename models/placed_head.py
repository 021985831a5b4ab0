"""What every draft head at work has, whosever keys and values it looks at: embedding, vocabulary, rows, and the pass itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from models.draft_head import Attend, DraftHead
from models.draft_vocab import DraftVocab
from models.kv_cache import RowPool


class PlacedHead:
    """A loaded draft head with `num_rows` cache rows of its own.

    `embedding` is the target's `[vocab, target_hidden]`, or the head's own over the same vocabulary. ValueError if its width is
    not what the head takes.
    """

    def __init__(self, head: DraftHead, embedding: torch.Tensor, *, num_rows: int) -> None:
        config = head.config
        width = config.target_hidden_size if config.combine == "add" else config.hidden_size
        if embedding.shape[1] != width:
            raise ValueError(f"the draft head takes embeddings of size {width}, these have size {embedding.shape[1]}")
        self.head, self.config = head, config
        self.device = embedding.device
        self.layers = config.target_layers
        self.max_positions = config.max_positions
        self.vocab_size = len(embedding)
        self._embedding = embedding
        self.vocab = DraftVocab(head.id_map.tolist(), self.device)
        self.pool = RowPool(
            config.num_layers,
            num_rows,
            config.num_kv_heads,
            config.head_dim,
            dtype=embedding.dtype,
            device=self.device,
        )
        self.num_forwards = 0
        self.num_rows_forwarded = 0

    @torch.inference_mode()
    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """The target's hidden states `[n, layers, target_hidden]` as `[n, hidden]`."""
        return self.head.fuse(features)

    def _extend(
        self, fused: Sequence[torch.Tensor], tokens: Sequence[int], positions: Sequence[int], attend: Attend
    ) -> torch.Tensor:
        """Hidden states `[total, hidden]` of entries of several sequences, one block of `fused` each; counts the pass."""
        x = fused[0] if len(fused) == 1 else torch.cat(list(fused))
        embeddings = self._embedding[torch.tensor(tokens, dtype=torch.int64, device=self.device)]
        places = torch.tensor([positions], dtype=torch.int64, device=self.device)
        hidden = self.head.extend(x[None], embeddings[None], places, attend)[0]
        self.num_forwards += 1
        self.num_rows_forwarded += len(tokens)
        return hidden
