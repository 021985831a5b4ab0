"""The target writes training data: conversations with itself, many at once, a shard at a time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from distill.dialogue import Dialogue, Kind, Turns
from distill.shards import TOP, Shard
from models.lockstep import LockstepLM


class Writer(Protocol):
    """Decides the next token of one text; `distill.dialogue.Dialogue` is one."""

    kinds: list[Kind]

    def next_temperature(self) -> float:
        """Temperature to draw the next token at; 0 for the likeliest one."""

    def push(self, drawn: int) -> int:
        """The next token, `drawn` or another."""


class Reading:
    """A text that exists already: the target only says what it would have written."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = iter(tokens)
        self.kinds: list[Kind] = []

    def next_temperature(self) -> float:
        """Nothing is drawn."""
        return 0.0

    def push(self, drawn: int) -> int:
        """The text's next token."""
        self.kinds.append(Kind.ANSWER)
        return next(self._tokens)


def conversations(tokenizer: Any, turns: Turns, count: int, seed: int) -> list[Writer]:
    """`count` conversations that have not begun."""
    rng = random.Random(seed)

    def encode(text: str) -> Sequence[int]:
        ids: Sequence[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    return [Dialogue(turns, encode, random.Random(rng.random())) for _ in range(count)]


def readings(tokens: Sequence[int], length: int) -> list[Writer]:
    """Texts of `length` tokens each, cut from a longer one; what is left at its end is dropped."""
    return [Reading(tokens[start : start + length]) for start in range(0, len(tokens) - length + 1, length)]


def write_shard(
    lm: LockstepLM, writers: Sequence[Writer], *, layers: Sequence[int], seed: int, progress: Callable[[int], None]
) -> Shard:
    """One text per writer, written in step; a function of the model, the writers and `seed`.

    `progress` is told the number of tokens that each step adds.
    """
    noise = torch.Generator(device=lm.device).manual_seed(seed)
    drawn = [0] * len(writers)
    lm.restart()
    kept: dict[str, list[torch.Tensor]] = {name: [] for name in ("tokens", "top_ids", "top_lps", "features", "final")}
    for _ in range(lm.max_length):
        tokens = torch.tensor([writer.push(token) for writer, token in zip(writers, drawn, strict=True)])
        step = lm.step(tokens.to(lm.device))
        lps = step.logits.log_softmax(dim=-1)
        top = lps.topk(min(TOP, lps.shape[1]), dim=-1)
        temperatures = torch.tensor([writer.next_temperature() for writer in writers], device=lm.device)
        drawn = _draw(lps, temperatures, noise).tolist()
        kept["tokens"].append(tokens.int())
        kept["top_ids"].append(top.indices.int().cpu())
        kept["top_lps"].append(top.values.half().cpu())
        kept["features"].append(torch.stack([step.features[layer] for layer in layers], dim=1).bfloat16().cpu())
        kept["final"].append(step.final.bfloat16().cpu())
        progress(len(writers))
    kinds = torch.tensor([writer.kinds for writer in writers], dtype=torch.uint8)
    return Shard(kinds=kinds, **{name: torch.stack(steps, dim=1) for name, steps in kept.items()})


def _draw(lps: torch.Tensor, temperatures: torch.Tensor, noise: torch.Generator) -> torch.Tensor:
    """One token per row of `lps` `[rows, vocab]`; where the temperature is 0 the likeliest."""
    drawn = lps.argmax(dim=-1)
    hot = temperatures.nonzero()[:, 0]
    if len(hot):
        reached = (lps[hot] / temperatures[hot, None]).softmax(dim=-1).cumsum(dim=-1)
        uniform = torch.rand(len(hot), 1, generator=noise, device=lps.device)
        drawn[hot] = torch.searchsorted(reached, uniform * reached[:, -1:])[:, 0].clamp(max=lps.shape[1] - 1)
    return drawn
