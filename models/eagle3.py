"""Published EAGLE-3 heads (2503.01840): from a folder or hub id to a `DraftHead` with its weights.

Both formats hold the same tensors; a release calls its one layer `midlayer`, the speculators format `layers.0`. `d2t` is a
table of offsets: draft id `i` is the target's id `i + d2t[i]`. `t2d`, the same thing as a mask over the target's ids, is
checked against it. What a checkpoint holds beyond that is refused by name: with a weight left out the drafter would be worse,
and nothing would say so.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file

from models.draft_head import DraftHead, HeadConfig
from models.eagle3_config import read_head_config, verifier_name
from models.head_lm import HeadLM
from models.loading import ModelNotFound, Placement, prepare_drafter
from models.refusal import UnservableModel

Weights = dict[str, torch.Tensor]

_FILES = ("*.json", "*.safetensors", "*.bin", "*.model")
# Not part of the head: the vocabularies are read apart, the verifier's own layers serve training only.
_APART = ("d2t", "t2d", "embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight")


@dataclass(frozen=True, slots=True, eq=False)
class Eagle3Checkpoint:
    """A head as read: float32 on the CPU, in eval mode, its config and weights checked against the target's config."""

    head: DraftHead
    embedding: torch.Tensor | None  # [target vocab, hidden]; None: the head uses the target's
    verifier: str | None  # the target it was trained for, if the checkpoint says so
    folder: Path


def read_eagle3(source: str | Path, target_config: Any) -> Eagle3Checkpoint:
    """Read a head from a local folder or hub id and check it against the transformers config of its target.

    Raises:
        ModelNotFound: no such folder or repository, or files that cannot be read.
        UnservableModel: not an EAGLE-3 head; a weight that is missing, unknown, of the wrong shape, or not finite; vocabularies
            that do not fit; another hidden size than the target's.
    """
    target, name = target_config.get_text_config(), str(source)
    folder = _folder(source)
    values = _read_config(folder, name)
    try:
        config = read_head_config(
            values,
            name,
            num_target_layers=int(target.num_hidden_layers),
            target_hidden_size=int(target.hidden_size),
            target_vocab_size=int(target.vocab_size),
        )
        head = DraftHead(config).eval().requires_grad_(False)
    except UnservableModel:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:  # values of the wrong type
        raise UnservableModel(f"{name}: config.json: {_first_line(error)}") from error
    weights = _read_weights(folder, name)
    _check_finite(weights, name)
    _fill(head, weights, name)
    head.id_map = read_id_map(weights, config.draft_vocab_size, int(target.vocab_size), name)
    embedding = weights.get("embed_tokens.weight")
    if embedding is None and config.hidden_size != config.target_hidden_size:
        raise UnservableModel(
            f"{name}: embed_tokens.weight is missing, and the target's embedding is {config.target_hidden_size} wide, "
            f"the head's must be {config.hidden_size}"
        )
    if embedding is not None:
        expected = (int(target.vocab_size), config.hidden_size)
        if embedding.dim() != 2 or embedding.shape[1] != expected[1] or embedding.shape[0] < expected[0]:
            raise UnservableModel(f"{name}: embed_tokens.weight is {tuple(embedding.shape)}, expected {expected}")
        embedding = embedding.float()
    return Eagle3Checkpoint(head, embedding, verifier_name(values), folder)


def place_eagle3(
    checkpoint: Eagle3Checkpoint, target_embedding: torch.Tensor, placement: Placement, *, num_rows: int
) -> HeadLM:
    """The head ready to draft, next to the target: its dtype and device, packed on a CPU. Takes the checkpoint's head over.

    `target_embedding` is `[vocab, target_hidden]`. A copy of it in the checkpoint, as many have, is not kept.
    """
    embedding, own = target_embedding, checkpoint.embedding
    if own is not None:
        own = own.to(embedding)
        embedding = embedding if torch.equal(own, embedding) else own
    head = checkpoint.head.to(embedding.device, embedding.dtype)
    for layer in head.layers:
        layer.join()  # type: ignore[operator]
    prepare_drafter(head, placement)
    return HeadLM(head, embedding, num_rows=num_rows)


def read_id_map(weights: Mapping[str, torch.Tensor], num_draft: int, num_target: int, name: str) -> torch.Tensor:
    """The target's id of every draft id, int64 `[num_draft]`.

    Raises `UnservableModel` if one lies outside the target's vocabulary, or two are the same.
    """
    offsets = weights.get("d2t")
    if offsets is None:
        if num_draft != num_target:
            raise UnservableModel(
                f"{name}: d2t is missing, and without it {num_draft} draft ids cannot be those of a target with {num_target}"
            )
        offsets = torch.zeros(num_draft, dtype=torch.int64)
    if tuple(offsets.shape) != (num_draft,) or offsets.is_floating_point() or offsets.dtype == torch.bool:
        raise UnservableModel(
            f"{name}: d2t is {tuple(offsets.shape)} of {offsets.dtype}, expected {(num_draft,)} of an integer type"
        )
    ids = offsets.to(torch.int64) + torch.arange(num_draft)
    outside = ((ids < 0) | (ids >= num_target)).nonzero()
    if len(outside):
        draft = int(outside[0])
        raise UnservableModel(
            f"{name}: d2t maps draft id {draft} to {int(ids[draft])}, outside the target's vocabulary of {num_target}"
        )
    first: dict[int, int] = {}
    for draft, target in enumerate(ids.tolist()):
        if first.setdefault(target, draft) != draft:
            raise UnservableModel(f"{name}: d2t maps draft ids {first[target]} and {draft} both to {target}")
    mask = weights.get("t2d")
    if mask is not None and sorted(first) != mask.flatten().nonzero().flatten().tolist():
        raise UnservableModel(f"{name}: t2d and d2t name different tokens")
    return ids


def _fill(head: DraftHead, weights: Mapping[str, torch.Tensor], name: str) -> None:
    """Put the weights in their places; every one must be there, of the right shape, and have a place."""
    config = head.config
    places = _places(config)
    extra = sorted(set(weights) - set(places) - set(_APART) - set(_feature_norms(config)))
    if extra:
        raise UnservableModel(f"{name}: weights of a kind that is not served, the first is {extra[0]}")
    own = dict(head.named_parameters())
    assert set(places.values()) == set(own), "a weight of ours has no name in the checkpoint"
    for theirs, ours in places.items():
        found, shape = _get(weights, theirs, name), tuple(own[ours].shape)
        if tuple(found.shape) != shape:
            raise UnservableModel(f"{name}: {theirs} is {tuple(found.shape)}, expected {shape}")
        own[ours].copy_(found)
    norms = [_get(weights, key, name).flatten().float() for key in _feature_norms(config)]
    if norms:
        # A norm's weights in front of a matrix are a scale of its columns.
        scale = torch.cat(norms)
        if len(scale) != head.fuse_proj.in_features:
            columns = head.fuse_proj.in_features
            raise UnservableModel(f"{name}: the norms before fc have {len(scale)} weights, fc {columns} columns")
        head.fuse_proj.weight.mul_(scale)


def _places(config: HeadConfig) -> dict[str, str]:
    """The checkpoint's name of every parameter -> ours."""
    places = {"fc.weight": "fuse_proj.weight", "norm.weight": "norm", "lm_head.weight": "output.weight"}
    for index in range(config.num_layers):
        theirs, ours = f"layers.{index}", f"layers.{index}"
        for matrix in ("q_proj", "k_proj", "v_proj", "o_proj"):
            places[f"{theirs}.self_attn.{matrix}.weight"] = f"{ours}.{matrix}.weight"
        for matrix in ("gate_proj", "up_proj", "down_proj"):
            places[f"{theirs}.mlp.{matrix}.weight"] = f"{ours}.{matrix}.weight"
        places[f"{theirs}.post_attention_layernorm.weight"] = f"{ours}.post_norm"
        # In the first layer, which alone sees the embedding, that one's norm has the name of the layer's own in the others.
        places[f"{theirs}.input_layernorm.weight"] = f"{ours}.{'input_norm' if index else 'embedding_norm'}"
        if index == 0:
            places[f"{theirs}.hidden_norm.weight"] = f"{ours}.input_norm"
    return places


def _feature_norms(config: HeadConfig) -> list[str]:
    """The checkpoint's names of the norms in front of `fc`, in the order of its columns."""
    if config.norm_together:
        return ["input_norm.weight"]
    return [f"fc_norm.{index}.weight" for index in range(len(config.target_layers))] if config.norm_features else []


def _get(weights: Mapping[str, torch.Tensor], key: str, name: str) -> torch.Tensor:
    if key not in weights:
        raise UnservableModel(f"{name}: the weight {key} is missing")
    return weights[key]


def _check_finite(weights: Mapping[str, torch.Tensor], name: str) -> None:
    for key, tensor in weights.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor.float()).all()):
            raise UnservableModel(f"{name}: weights of {key} hold NaN or infinite values")


def _folder(source: str | Path) -> Path:
    path = Path(source)
    if path.is_dir():
        return path
    if path.exists() or path.is_absolute() or str(source).startswith((".", "~")) or len(path.parts) > 2:
        raise ModelNotFound(f"{source}: no such folder")
    try:
        return Path(snapshot_download(str(source), allow_patterns=list(_FILES)))
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"{source}: {_first_line(error)}") from error


def _read_config(folder: Path, name: str) -> dict[str, Any]:
    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"{name}: config.json: {_first_line(error)}") from error
    if not isinstance(values, dict):
        raise ModelNotFound(f"{name}: config.json is not an object")
    return values


def _read_weights(folder: Path, name: str) -> Weights:
    """Every tensor of the folder by its name in the speculators format."""
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        raise ModelNotFound(f"{name}: neither *.safetensors nor pytorch_model.bin in the folder")
    weights: Weights = {}
    for file in files:
        try:
            read = load_file(file) if file.suffix == ".safetensors" else torch.load(file, map_location="cpu", weights_only=True)
            weights.update({_common_name(str(key)): tensor for key, tensor in read.items()})
        except (OSError, ValueError, RuntimeError, AttributeError, EOFError, pickle.UnpicklingError, SafetensorError) as error:
            raise ModelNotFound(f"{name}: {file.name}: {_first_line(error)}") from error
    return weights


def _common_name(key: str) -> str:
    return f"layers.0.{key.removeprefix('midlayer.')}" if key.startswith("midlayer.") else key


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
