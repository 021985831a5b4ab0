"""Batches of training texts out of shards, in an order that a resumed run finds again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from distill.dialogue import Kind
from distill.shards import Shard, read, shard_paths


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Texts side by side; see `distill.shards.Shard` for the fields. int64 ids."""

    tokens: torch.Tensor  # [texts, length]
    is_answer: torch.Tensor  # bool [texts, length]: written by the target as its answer
    top_ids: torch.Tensor
    top_lps: torch.Tensor
    features: torch.Tensor
    final: torch.Tensor

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        return Batch(*(getattr(self, name).to(device) for name in Batch.__slots__))

    @property
    def num_tokens(self) -> int:
        """Tokens in the batch."""
        return self.tokens.numel()


class Texts:
    """All texts of a data folder: the last ones are held out, the others come in a new order in every epoch."""

    def __init__(self, folder: Path, *, held_out: int, seed: int) -> None:
        self.shards: list[Shard] = [read(path) for path in shard_paths(folder)]
        if not self.shards:
            raise ValueError(f"{folder} holds no training data")
        every = _distinct(self.shards)
        if len(every) <= held_out:
            raise ValueError(f"{folder} holds {len(every)} different texts, {held_out} of which are held out; write more")
        # The first shard's: they stay held out when more data is written later.
        self.held_out, self.training = every[:held_out], every[held_out:]
        self._seed = seed
        self._layers: list[int] | None = None

    def use_layers(self, chosen: Sequence[int]) -> None:
        """Give only these of the recorded layers' hidden states out, by their place in the record."""
        self._layers = list(chosen)

    def batch(self, where: Sequence[tuple[int, int]]) -> Batch:
        """The texts at `where`, (shard, row) pairs."""

        def take(name: str) -> torch.Tensor:
            rows = [getattr(self.shards[shard], name)[row] for shard, row in where]
            # Under autocast on a CPU, float16 cannot be stacked.
            return torch.stack([row.float() if row.dtype == torch.float16 else row for row in rows])

        return Batch(
            tokens=take("tokens").long(),
            is_answer=take("kinds") == Kind.ANSWER,
            top_ids=take("top_ids").long(),
            top_lps=take("top_lps"),
            features=take("features") if self._layers is None else take("features")[:, :, self._layers],
            final=take("final"),
        )

    def training_batch(self, index: int, size: int) -> Batch:
        """Batch `index` of an endless sequence."""
        per_epoch = max(len(self.training) // size, 1)
        epoch, place = divmod(index, per_epoch)
        order = list(self.training)
        random.Random(f"{self._seed}:{epoch}").shuffle(order)
        return self.batch(order[place * size : (place + 1) * size])

    def held_out_batches(self, size: int) -> list[Batch]:
        """The held-out texts, always the same."""
        return [self.batch(self.held_out[i : i + size]) for i in range(0, len(self.held_out), size)]

    def frequent_ids(self, count: int) -> torch.Tensor:
        """The `count` ids that the target wrote, or had among its four likeliest, most often in answers; ascending, int64.

        ValueError if there is no answer in any text.
        """
        counts: torch.Tensor | None = None
        for shard in self.shards:
            answers = shard.kinds == Kind.ANSWER
            if not answers.any():
                continue
            ids = torch.cat((shard.top_ids[answers][:, :4].flatten(), shard.tokens[answers])).long()
            size = max(int(ids.max()) + 1, len(counts) if counts is not None else 0)
            more = torch.bincount(ids, minlength=size)
            counts = more if counts is None else more + torch.nn.functional.pad(counts, (0, size - len(counts)))
        if counts is None:
            raise ValueError("no text is long enough to hold an answer; make them longer, in another folder")
        best = counts.topk(min(count, len(counts))).indices
        return best.sort().values


def _distinct(shards: Sequence[Shard]) -> list[tuple[int, int]]:
    """(shard, row) of every text whose beginning, up to its first answer, no earlier text has."""
    seen: set[bytes] = set()
    kept = []
    for number, shard in enumerate(shards):
        answers = shard.kinds == Kind.ANSWER
        first = torch.where(answers.any(dim=1), answers.int().argmax(dim=1), answers.shape[1])
        for row, end in enumerate(first.tolist()):
            # A text that is an answer from its first token on (a file of the user's) is told by all of it.
            key = shard.tokens[row, : end or None].numpy().tobytes()
            if key not in seen:
                seen.add(key)
                kept.append((number, row))
    return kept
