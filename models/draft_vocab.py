"""The vocabulary of a drafter that knows a part of its target's tokens only, in an order of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class DraftVocab:
    """Ids there and back. `ids` leads from the drafter's output columns to the target's ids; it is copied."""

    def __init__(self, ids: Sequence[int], device: torch.device) -> None:
        self.ids = list(ids)
        self.columns = {target: column for column, target in enumerate(self.ids)}
        # Made once: a tensor of 16,000 numbers takes a millisecond, as long as a layer of a draft head.
        self._index = torch.tensor(self.ids, dtype=torch.int64, device=device)

    def known(self, rows: torch.Tensor) -> torch.Tensor:
        """`[n, vocab]` over the target's ids as `[n, columns]`."""
        return rows.index_select(1, self._index)

    def spread(self, rows: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """`[n, columns]` probabilities as `[n, vocab_size]` over the target's ids, zero for tokens that are not known here."""
        every = rows.new_zeros(len(rows), vocab_size)
        every[:, self._index] = rows
        return every
