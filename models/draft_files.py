"""A trained drafter as a folder: `config.json`, `model.safetensors`, and a model card that nobody has to read to use it.

Only what is the drafter's own is stored, in half precision: embedding and output rows are the target's, borrowed at load.
A folder belongs to one target; it is recognized by the hash of its tokenizer and by its sizes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import nn

from models.adapted import adapt, merge
from models.borrowed_layers import take_last_layers
from models.draft_head import DraftHead, HeadConfig
from models.refusal import UnservableModel
from models.shared_lm import output_rows, own_state, shared_lm

MARK, FORMAT = "graftserve_drafter", 1
_CONFIG, _WEIGHTS, _ID_MAP = "config.json", "model.safetensors", "id_map"


Family = Literal["head", "lm"]


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """What a folder says of itself."""

    family: Family
    target: str  # name, for people
    tokenizer_hash: str
    num_layers: int
    training: dict[str, Any]  # numbers of the run, for people
    head: HeadConfig | None = None


def is_drafter_folder(path: Path) -> bool:
    """Whether `path` is a folder that `save_drafter` wrote."""
    config = path / _CONFIG
    if not config.is_file():
        return False
    try:
        found = json.loads(config.read_text())
    except ValueError:
        return False
    return isinstance(found, dict) and MARK in found


def save_drafter(folder: Path, info: DrafterInfo, module: nn.Module, ids: torch.Tensor) -> None:
    """Write config and weights of a `DraftHead` or a `shared_lm`; `ids` int64 `[draft_vocab]` leads to the target's ids.

    ArithmeticError for weights that half precision cannot hold; then a drafter that was there before stays.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state = _head_state(module) if isinstance(module, DraftHead) else own_state(module)
    weights = {name: tensor.detach().half().contiguous() for name, tensor in state.items()}
    for name, tensor in weights.items():
        if not torch.isfinite(tensor).all():
            raise ArithmeticError(f"weight {name} holds numbers that half precision cannot hold")
    weights[_ID_MAP] = ids.int()
    partial = folder / (_WEIGHTS + ".part")
    partial.write_bytes(save(weights))  # `save_file` would make a file that only its owner may read
    partial.rename(folder / _WEIGHTS)
    config = {
        MARK: FORMAT,
        "family": info.family,
        "target": info.target,
        "tokenizer_hash": info.tokenizer_hash,
        "num_layers": info.num_layers,
        "head": None if info.head is None else info.head.to_dict(),
        "training": info.training,
    }
    (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def read_info(folder: Path) -> DrafterInfo:
    """The folder's config. UnservableModel if it makes no sense."""
    try:
        config = json.loads((folder / _CONFIG).read_text())
        if config[MARK] != FORMAT:
            raise ValueError(f"format {config[MARK]}, this version reads {FORMAT}")
        family = config["family"]
        if family not in ("head", "lm"):
            raise ValueError(f"family {family!r}")
        head = HeadConfig.from_dict(config["head"]) if family == "head" else None
        return DrafterInfo(
            family, config["target"], config["tokenizer_hash"], int(config["num_layers"]), config.get("training", {}), head
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnservableModel(f"{folder}: cannot read {_CONFIG}: {error!r}") from error


def load_drafter(
    folder: Path, target: nn.Module, *, tokenizer_hash: str, dtype: torch.dtype
) -> tuple[nn.Module, torch.Tensor]:
    """A `DraftHead` or a decoder with the target's embedding, in eval mode, and its id map int64 `[draft_vocab]`.

    `target` is the loaded model, not yet packed. Raises UnservableModel for a drafter of another target and for broken weights.
    """
    info = read_info(folder)
    if info.tokenizer_hash != tokenizer_hash:
        raise UnservableModel(f"{folder}: this drafter was trained for {info.target}, whose tokenizer is not the target's")
    try:
        weights = load_file(folder / _WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise UnservableModel(f"{folder}: cannot read {_WEIGHTS}: {error}") from error
    ids = _checked_ids(weights.pop(_ID_MAP, None), len(output_rows(target)), folder)
    for name, tensor in weights.items():
        if not torch.isfinite(tensor).all():
            raise UnservableModel(f"{folder}: weight {name} holds NaN or infinite numbers")
    module = _head(info, target, ids, folder) if info.family == "head" else _lm(info, target, ids, folder)
    own = _head_state(module) if isinstance(module, DraftHead) else own_state(module)
    _check_names(weights, own, folder)
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(weights[name])
    merge(module)
    if isinstance(module, DraftHead):
        for layer in module.layers:
            layer.join()  # type: ignore[operator]
    for parameter in module.parameters():  # not the buffers: rounded rotary frequencies turn far tokens by whole radians
        parameter.data = parameter.data.to(dtype)
    return module.to(next(target.parameters()).device).eval().requires_grad_(False), ids


def _head(info: DrafterInfo, target: nn.Module, ids: torch.Tensor, folder: Path) -> nn.Module:
    assert info.head is not None, "checked by read_info"
    rows = output_rows(target)
    if info.head.target_hidden_size != rows.shape[1] or info.head.draft_vocab_size != len(ids):
        raise UnservableModel(f"{folder}: this drafter's sizes are not those of the target")
    layers = target.config.get_text_config().num_hidden_layers  # type: ignore[operator, union-attr]
    for layer in info.head.target_layers:
        if not 0 <= layer < layers:
            raise UnservableModel(f"{folder}: this drafter reads layer {layer}, the target has {layers}")
    if info.head.rank and info.head.num_layers > layers:
        raise UnservableModel(f"{folder}: this drafter changes the last {info.head.num_layers} layers, the target has {layers}")
    try:
        head = DraftHead(info.head)
    except (ValueError, TypeError, KeyError, RuntimeError, StrictDataclassError) as error:  # sizes that are none
        raise UnservableModel(f"{folder}: {_CONFIG}: {_first_line(error)}") from error
    head.id_map.copy_(ids)
    if info.head.rank:
        try:
            take_last_layers(head, target)
        except ValueError as error:
            raise UnservableModel(f"{folder}: this drafter's layers are not the target's: {error}") from error
        adapt(head.layers, info.head.rank)
    if not info.head.own_output:
        head.output.weight = nn.Parameter(rows[ids.to(rows.device)].float().cpu(), requires_grad=False)
    return head


def _lm(info: DrafterInfo, target: nn.Module, ids: torch.Tensor, folder: Path) -> nn.Module:
    try:
        return shared_lm(target, info.num_layers, ids)
    except ValueError as error:
        raise UnservableModel(f"{folder}: {error}") from error


def _head_state(head: DraftHead) -> dict[str, torch.Tensor]:
    """The weights that are stored: all but borrowed output rows."""
    borrowed = set() if head.config.own_output else {"output.weight"}
    return {name: p.detach() for name, p in head.named_parameters() if name not in borrowed}


def _checked_ids(ids: torch.Tensor | None, vocab_size: int, folder: Path) -> torch.Tensor:
    if ids is None or ids.dim() != 1 or not len(ids) or ids.is_floating_point():
        raise UnservableModel(f"{folder}: {_WEIGHTS} holds no id map")
    ids = ids.long()
    if ids.min() < 0 or ids.max() >= vocab_size or len(ids.unique()) != len(ids):
        raise UnservableModel(f"{folder}: the id map names ids outside the target's {vocab_size}, or one id twice")
    return ids


def _check_names(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], folder: Path) -> None:
    for name, tensor in wanted.items():
        if name not in found:
            raise UnservableModel(f"{folder}: weight {name} is missing")
        if found[name].shape != tensor.shape:
            raise UnservableModel(f"{folder}: weight {name} is {list(found[name].shape)}, expected {list(tensor.shape)}")
    extra = sorted(set(found) - set(wanted))
    if extra:
        raise UnservableModel(f"{folder}: unknown weight {extra[0]}")


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
