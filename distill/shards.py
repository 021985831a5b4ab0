"""Training data on disk: shards of texts with what the target thought at every position.

A shard is one safetensors file; it appears by a rename, so an interrupted run leaves whole shards only and goes on with the
missing ones. Per position: the token, who wrote it, the 32 likeliest next tokens with their log-probabilities at temperature 1,
the hidden states that feature heads are fed with, and the one that the output matrix multiplies. 5 KB for a small model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

TOP = 32  # tokens per position whose log-probabilities are kept
_MANIFEST = "data.json"


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """Texts of one length."""

    tokens: torch.Tensor  # int32 [texts, length]
    kinds: torch.Tensor  # uint8 [texts, length], `distill.dialogue.Kind`
    top_ids: torch.Tensor  # int32 [texts, length, TOP]; of the token AFTER this position
    top_lps: torch.Tensor  # float16 [texts, length, TOP]
    features: torch.Tensor  # bfloat16 [texts, length, layers, hidden_size]
    final: torch.Tensor  # bfloat16 [texts, length, hidden_size]


def write(shard: Shard, path: Path) -> None:
    """Store a shard; `path` exists afterwards as a whole or not at all."""
    partial = path.with_suffix(".part")
    partial.write_bytes(save({name: getattr(shard, name).contiguous() for name in Shard.__slots__}))
    partial.rename(path)


def read(path: Path) -> Shard:
    """A shard, its tensors mapped from the file. ValueError if it is damaged."""
    try:
        with safe_open(path, framework="pt") as file:  # type: ignore[no-untyped-call]
            return Shard(**{name: file.get_tensor(name) for name in Shard.__slots__})
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}); delete it, and the next run writes it anew") from error


def shard_path(folder: Path, index: int) -> Path:
    """Where shard `index` lies."""
    return folder / f"shard-{index:05d}.safetensors"


def shard_paths(folder: Path) -> list[Path]:
    """All shards of a folder, in order."""
    return sorted(folder.glob("shard-*.safetensors"))


def check_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Note what the data of `folder` depends on, or ValueError if it was made from something else."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _MANIFEST
    if not path.exists():
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps(manifest, indent=2) + "\n")
        partial.rename(path)
        return
    found = _read_manifest(path)
    for name, value in manifest.items():
        if found.get(name) != value:
            there = found.get(name)
            raise ValueError(f"{folder} holds data with {name} = {there!r}, this run has {value!r}; give another folder")


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not readable: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not an object")
    return found
