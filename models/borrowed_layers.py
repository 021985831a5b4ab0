"""A head's layers filled from its target's last ones."""

from __future__ import annotations

import torch
from torch import nn

from models.causal_lm import decoder_layers
from models.draft_head import DraftHead, HeadLayer


@torch.no_grad()
def take_last_layers(head: DraftHead, target: nn.Module) -> int:
    """Copy the weights of the target's last layers that have the name and shape of ours; returns how many matrices fitted."""
    fitted = 0
    for layer, source in zip(head.layers, list(decoder_layers(target))[-len(head.layers) :], strict=True):
        fitted += _take(layer, source)  # type: ignore[arg-type]
    return fitted


def _take(layer: HeadLayer, source: nn.Module) -> int:
    attention, mlp = getattr(source, "self_attn", None), getattr(source, "mlp", None)
    fitted = 0
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        fitted += _copy_if_alike(getattr(layer, name).weight, getattr(attention, name, None))
    for name in ("gate_proj", "up_proj", "down_proj"):
        fitted += _copy_if_alike(getattr(layer, name).weight, getattr(mlp, name, None))
    _copy_if_alike(layer.input_norm, getattr(source, "input_layernorm", None))
    _copy_if_alike(layer.post_norm, getattr(source, "post_attention_layernorm", None))
    return fitted


def _copy_if_alike(ours: torch.Tensor, module: nn.Module | None) -> bool:
    weight = getattr(module, "weight", None)
    if weight is None or weight.shape != ours.shape:
        return False
    ours.copy_(weight)
    return True
