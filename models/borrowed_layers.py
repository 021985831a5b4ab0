"""A head's layers filled from its target's last ones.

Nothing of a target's layer may be left behind: a head that looks at the target's keys was trained on those that these layers
compute, and would meet others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from models.causal_lm import decoder_layers
from models.draft_head import DraftHead, HeadLayer

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # transformers' name -> ours
_MATRICES = {
    **{f"{name}_proj": f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")},
    **{f"{name}_proj": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
_NORMS = {
    "input_norm": "input_layernorm",
    "post_norm": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}


def layer_options(target: nn.Module) -> dict[str, Any]:
    """What a `HeadConfig` must say of its layers to be filled from `target`; ValueError if heads have no such layers."""
    config: Any = target.config.get_text_config()  # type: ignore[operator, union-attr]
    activation = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
    if activation not in _ACTIVATIONS:
        raise ValueError(f"a head cannot be made of layers with the activation {activation!r}; train an lm student")
    rope = dict(getattr(config, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0})
    if rope.get("partial_rotary_factor", 1.0) != 1.0 or any(isinstance(value, dict) for value in rope.values()):
        raise ValueError("a head cannot be made of layers with partial or mixed rotary positions; train an lm student")
    names = dict(decoder_layers(target)[-1].named_parameters())
    return {
        "attention_bias": "self_attn.q_proj.bias" in names,
        "qk_norm": "self_attn.q_norm.weight" in names,
        "activation": _ACTIVATIONS[activation],
        "rope": rope,
    }


@torch.no_grad()
def take_last_layers(head: DraftHead, target: nn.Module) -> None:
    """Copy the target's last layers into those of `head`. ValueError if a layer has more, less or other parts."""
    for layer, source in zip(head.layers, list(decoder_layers(target))[-len(head.layers) :], strict=True):
        theirs = dict(source.named_parameters())
        for name, ours, value in _parts(layer, source):  # type: ignore[arg-type]
            weight = theirs.pop(name, None)
            if weight is None or weight.shape != ours.shape:
                raise ValueError(f"{type(source).__name__} has no {name} of shape {list(ours.shape)}, which a head's layer has")
            ours.copy_(value(weight))
        if theirs:
            raise ValueError(f"{type(source).__name__} has {min(theirs)}, which a head's layer has not; train an lm student")


def _parts(
    layer: HeadLayer, source: nn.Module
) -> Iterator[tuple[str, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]]:
    """The target's name of every part of `layer`, the part, and how it follows from the target's."""
    for ours, theirs in _MATRICES.items():
        matrix = getattr(layer, ours)
        yield f"{theirs}.weight", matrix.weight, _as_it_is
        if matrix.bias is not None:
            yield f"{theirs}.bias", matrix.bias, _as_it_is
    for ours, theirs in _NORMS.items():
        scale = getattr(layer, ours)
        if scale is not None:
            yield f"{theirs}.weight", scale, _scale_of(source, theirs)


def _as_it_is(weight: torch.Tensor) -> torch.Tensor:
    return weight


def _scale_of(source: nn.Module, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """A norm multiplies by its weight, or by one more than its weight: whichever this one does."""

    def scale(weight: torch.Tensor) -> torch.Tensor:
        seen = source.get_submodule(name)(torch.ones_like(weight))
        return weight if (seen - weight).abs().sum() <= (seen - weight - 1.0).abs().sum() else weight + 1.0

    return scale
