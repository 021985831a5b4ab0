"""From a folder or hub id to a model that is ready to serve: dtype, device, packed weights, refusals."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from models.packed import (
    ByteLinear,
    PackedLinear,
    byte_packing_available,
    fp16_packing_available,
    fp32_packing_available,
    fuse_norms,
    pack_linears,
)
from models.refusal import UnservableModel, check_config, check_weights

Weights = Literal["auto", "fp16", "fp32", "bf16"]

# What reading a folder raises: files that are missing or cut off, configs of the wrong shape, packages a format needs.
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError, SafetensorError, StrictDataclassError)


class ModelNotFound(ValueError):
    """The folder or hub id cannot be read as a transformers model; the message says why, in one line."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where weights live and in which form: `weights` is resolved, never "auto"."""

    device: torch.device
    weights: Literal["fp16", "fp32", "bf16"]

    @property
    def dtype(self) -> torch.dtype:
        """Type of the plain parameters. float16 on a CPU means packed layers with float32 activations."""
        if self.weights == "bf16":
            return torch.bfloat16
        return torch.float16 if self.weights == "fp16" and self.device.type != "cpu" else torch.float32


def choose_placement(device: str = "auto", weights: Weights = "auto") -> Placement:
    """Resolve "auto": CUDA with bfloat16 where there is one, else the CPU with float16-packed layers where it can."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device {device!r} is not a torch device") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {device!r}: this machine, or this build of torch, has no CUDA")
    if weights == "auto":
        if chosen.type != "cpu":
            weights = "bf16"
        else:
            weights = "fp16" if fp16_packing_available() else "fp32"
    elif weights == "fp16" and chosen.type == "cpu" and not fp16_packing_available():
        raise ValueError("weights 'fp16' need a CPU with FBGEMM's half-precision kernels; use 'fp32'")
    return Placement(chosen, weights)


def load_tokenizer(source: str | Path) -> Any:
    """The tokenizer of a local folder or hub id. Raises `ModelNotFound` if it cannot be read."""
    _check_source(source)
    try:
        return AutoTokenizer.from_pretrained(str(source), trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare Exceptions for files it cannot parse
        raise ModelNotFound(f"tokenizer of {source}: {_in_one_line(error)}") from error


def load_model(source: str | Path, placement: Placement) -> nn.Module:
    """Weights of a local folder or hub id, in eval mode, not yet packed (see `prepare`).

    Raises `ModelNotFound` if it cannot be read and `UnservableModel` if it cannot be served exactly.
    """
    _check_source(source)
    try:
        # False, not the default: that one asks on the terminal whether to run a repository's own code.
        config = AutoConfig.from_pretrained(str(source), trust_remote_code=False)
        check_config(config, str(source))
        if config.architectures and not any(a.endswith(("CausalLM", "LMHeadModel")) for a in config.architectures):
            raise UnservableModel(f"{source}: {config.architectures[0]} is not a causal language model")
        model, report = AutoModelForCausalLM.from_pretrained(
            str(source), dtype=placement.dtype, config=config, trust_remote_code=False, output_loading_info=True
        )
    except UnservableModel:
        raise
    except _UNREADABLE as error:
        raise ModelNotFound(f"{source}: {_in_one_line(error)}") from error
    missing = sorted(report["missing_keys"])
    if missing:  # transformers fills them with random numbers
        raise UnservableModel(f"{source}: {len(missing)} weights are missing from its files, the first is {missing[0]}")
    check_weights(model, str(source))
    return model.to(placement.device).eval().requires_grad_(False)  # type: ignore[no-any-return]


def prepare(model: nn.Module, placement: Placement) -> nn.Module:
    """Swap in what makes an eager CPU forward fast; on other devices the modules stay as they are."""
    if placement.device.type == "cpu":
        fuse_norms(model)
        if placement.weights == "fp16":
            pack_linears(model)
        elif placement.weights == "fp32" and fp32_packing_available():
            pack_linears(model, PackedLinear)
    return model


def prepare_drafter(model: nn.Module, placement: Placement) -> nn.Module:
    """As `prepare`, for a model that only guesses: where a CPU would have its layers in half precision, they get eight bits."""
    if placement.device.type != "cpu" or placement.weights != "fp16" or not byte_packing_available():
        return prepare(model, placement)
    fuse_norms(model)
    pack_linears(model, ByteLinear)
    return model


def _check_source(source: str | Path) -> None:
    """Refuse what is plainly no folder before the hub client answers with its rules for repository names."""
    path = Path(source)
    if path.suffix.lower() == ".gguf":
        raise ModelNotFound(f"{source}: a single GGUF file is not served; give a folder or hub id in transformers format")
    if path.is_file():
        raise ModelNotFound(f"{source} is a file; give a folder or hub id in transformers format")
    if not path.exists() and (path.is_absolute() or str(source).startswith((".", "~")) or len(path.parts) > 2):
        raise ModelNotFound(f"{source}: no such folder")


def _in_one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    # "Validation error for field 'x':" says nothing without what follows.
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
