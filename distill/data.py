"""The data of a run: decide what it is made from, and write the shards that are missing."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from distill.dialogue import Turns
from distill.shards import check_manifest, read, shard_path, shard_paths, write
from distill.writing import Writer, conversations, readings, write_shard
from models.lockstep import LockstepLM


@dataclass(frozen=True, slots=True)
class DataPlan:
    """What a data folder holds."""

    tokens: int  # at least, over all shards
    length: int = 512  # tokens per text
    texts: int = 64  # per shard, written in step
    seed: int = 0


def write_data(
    load: Callable[[], nn.Module],
    tokenizer: Any,
    folder: Path,
    plan: DataPlan,
    *,
    layers: Sequence[int],
    stops: frozenset[int],
    tokenizer_hash: str,
    extra_text: Sequence[int] = (),
    report: Callable[[int], None],
) -> None:
    """Fill `folder` up to the plan, with a target that `load` gives if anything is missing. Shards that are there stay.

    First come the texts of `extra_text` (token ids), then conversations of the target with itself. `report` is told of tokens
    as they are written. ValueError if the folder holds data of another target or plan, or if nothing can be written.
    """
    cut = readings(extra_text, plan.length)
    if extra_text and not cut:
        raise ValueError(f"the given text has {len(extra_text)} tokens, fewer than one training text of length = {plan.length}")
    manifest = {
        "tokenizer_hash": tokenizer_hash,
        "layers": list(layers),
        "length": plan.length,
        "texts": plan.texts,
        "seed": plan.seed,
        "extra_tokens": len(extra_text),
    }
    if extra_text:  # another text may have as many tokens
        manifest["extra_hash"] = hashlib.sha256(" ".join(map(str, extra_text)).encode()).hexdigest()
    check_manifest(folder, manifest)
    num_extra = -(-len(cut) // plan.texts)  # shards
    num_shards = max(-(-plan.tokens // (plan.length * plan.texts)), num_extra)
    missing = [index for index in range(num_shards) if not shard_path(folder, index).exists()]
    report((num_shards - len(missing)) * plan.length * plan.texts)
    if not missing:
        return
    turns = Turns.of(tokenizer, stops) if missing[-1] >= num_extra else None
    lm = LockstepLM(load(), num_texts=plan.texts, max_length=plan.length, capture=layers)
    for index in missing:
        seed = plan.seed + index
        if index < num_extra:
            writers: list[Writer] = cut[index * plan.texts : (index + 1) * plan.texts]
        else:
            assert turns is not None, "checked above"
            writers = conversations(tokenizer, turns, plan.texts, seed)
        write(write_shard(lm, writers, layers=layers, seed=seed, progress=report), shard_path(folder, index))


def count_tokens(folder: Path) -> int:
    """Tokens that a data folder holds."""
    return sum(read(path).tokens.numel() for path in shard_paths(folder))
