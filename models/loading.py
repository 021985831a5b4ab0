"""From a folder or hub id to a model that is ready to serve: dtype, device, packed weights, refusals."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from models.packed import fp16_packing_available, fuse_norms, pack_linears
from models.refusal import UnservableModel, check_config, check_weights

Weights = Literal["auto", "fp16", "fp32", "bf16"]


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
    """The tokenizer of a local folder or hub id."""
    try:
        return AutoTokenizer.from_pretrained(str(source))
    except (OSError, ValueError, KeyError) as error:
        raise ModelNotFound(f"tokenizer of {source}: {_first_line(error)}") from error


def load_model(source: str | Path, placement: Placement) -> nn.Module:
    """Weights of a local folder or hub id, in eval mode, not yet packed (see `prepare`).

    Raises `ModelNotFound` if it cannot be read and `UnservableModel` if it cannot be served exactly.
    """
    if Path(source).suffix == ".gguf":
        raise ModelNotFound(f"{source}: a single GGUF file is not served; give a folder or hub id in transformers format")
    try:
        config = AutoConfig.from_pretrained(str(source))
        check_config(config, str(source))
        if config.architectures and not any(a.endswith(("CausalLM", "LMHeadModel")) for a in config.architectures):
            raise UnservableModel(f"{source}: {config.architectures[0]} is not a causal language model")
        model = AutoModelForCausalLM.from_pretrained(str(source), dtype=placement.dtype, config=config)
    except UnservableModel:
        raise
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelNotFound(f"{source}: {_first_line(error)}") from error
    check_weights(model, str(source))
    return model.to(placement.device).eval().requires_grad_(False)  # type: ignore[no-any-return]


def prepare(model: nn.Module, placement: Placement) -> nn.Module:
    """Swap in what makes an eager CPU forward fast; on other devices the modules stay as they are."""
    if placement.device.type == "cpu":
        fuse_norms(model)
        if placement.weights == "fp16":
            pack_linears(model)
    return model


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
