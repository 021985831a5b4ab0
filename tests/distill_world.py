"""A toy target that has turns, data it wrote itself, and data that is only shaped like it: for tests of distillation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from distill import dialogue
from distill.data import DataPlan, write_data
from distill.dialogue import Kind
from distill.shards import TOP, Shard
from drafters.vocab import tokenizer_hash
from models.toy import byte_tokenizer, tiny_causal_lm

VOCAB, HIDDEN, LAYERS = 259, 32, 6
RECORDED = (2,)  # what a target of six layers records for a head of three
TOKENIZER = byte_tokenizer()
STOPS = frozenset({256})


def toy_target(seed: int = 1, **options: Any) -> PreTrainedModel:
    """A fresh copy each time: writing data takes a model over."""
    return tiny_causal_lm("llama", VOCAB, seed, layers=LAYERS, hidden=HIDDEN, **options)


@contextmanager
def short_turns(message: int = 12, answer: int = 60) -> Iterator[None]:
    """A random model hardly ever ends a turn; let ours begin shortly and be ended early, so that short texts hold answers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dialogue, "_LONGEST_MESSAGE", message)
        patch.setattr(dialogue, "_LONGEST_ANSWER", answer)
        patch.setattr(dialogue, "opening", lambda rng: "".join(rng.choices(ascii_lowercase, k=4)))
        yield


def write_toy_data(
    folder: Path, plan: DataPlan, *, extra: Sequence[int] = (), target: PreTrainedModel | None = None, **changes: Any
) -> list[int]:
    """Fill `folder`; returns what was reported. `changes` are other arguments of `write_data`."""
    reported: list[int] = []
    arguments: dict[str, Any] = {"layers": RECORDED, "stops": STOPS, "tokenizer_hash": tokenizer_hash(TOKENIZER), **changes}
    with short_turns():
        write_data(
            lambda: target or toy_target(), TOKENIZER, folder, plan, extra_text=extra, report=reported.append, **arguments
        )
    return reported


def made_up_shard(
    tokens: torch.Tensor, kinds: torch.Tensor | None = None, *, layers: int = 2, seed: int = 0, vocab: int = 50
) -> Shard:
    """Random teaching for `tokens` `[texts, length]`; the second half of each text is an answer unless `kinds` says more."""
    texts, length = tokens.shape
    generator = torch.Generator().manual_seed(seed)
    if kinds is None:
        kinds = torch.full((texts, length), int(Kind.USER), dtype=torch.uint8)
        kinds[:, length // 2 :] = int(Kind.ANSWER)
    logits = torch.randn(texts, length, vocab, generator=generator)
    top = logits.log_softmax(-1).topk(TOP)
    return Shard(
        tokens=tokens.int(),
        kinds=kinds,
        top_ids=top.indices.int(),
        top_lps=top.values.half(),
        features=torch.randn(texts, length, layers, 8, generator=generator).bfloat16(),
        final=torch.randn(texts, length, 8, generator=generator).bfloat16(),
    )
