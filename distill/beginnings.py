"""How a student begins: shaped after its target, and with as many of the target's weights as fit.

A head's layers begin as the target's last ones, its fused feature as the highest of the hidden states it is given, and the
embedding comes in small: a head that does nothing yet repeats what the target thought one token earlier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from models.causal_lm import decoder_layers
from models.draft_head import DraftHead, HeadConfig, HeadLayer
from models.shared_lm import copy_layers, output_rows, shared_lm

_FEATURE_SIZE = 25.0  # root mean square of a fused feature at the beginning, about that of a middle layer's residual stream
_NOISE = 0.02


def feature_layers(num_layers: int) -> tuple[int, int, int]:
    """A low, a middle and a high layer of the target, whose outputs a head is fed with (EAGLE-3 takes about these)."""
    if num_layers < 3:
        raise ValueError(f"a head needs a target of 3 layers at least, this one has {num_layers}")
    return min(2, num_layers - 3), max(num_layers // 2 - 1, 1), max(num_layers - 4, 2)


def begin_head(
    target: nn.Module, ids: torch.Tensor, layers: Sequence[int], *, num_layers: int, seed: int, combine: str = "add"
) -> DraftHead:
    """A head of `num_layers` layers on the outputs of the target's `layers`, for the draft vocabulary `ids` (ascending)."""
    config = head_config(target, len(ids), layers, num_layers=num_layers, combine=combine)
    generator = torch.Generator().manual_seed(seed)
    head = DraftHead(config)
    head.id_map.copy_(ids)
    hidden = config.hidden_size
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, _NOISE, generator=generator)
        head.fuse_proj.weight[:, -hidden:] += _FEATURE_SIZE * torch.eye(hidden)
        if head.embed_proj is not None:
            head.embed_proj.weight.mul_(10.0)  # embeddings are small beside features
        sources = list(decoder_layers(target))[-num_layers:]
        for layer, source in zip(head.layers, sources, strict=True):
            _copy_layer(layer, source)  # type: ignore[arg-type]
        _copy_if_alike(head.norm, getattr(target.get_decoder(), "norm", None))  # type: ignore[operator]
    head.output.weight = nn.Parameter(output_rows(target)[ids].float().clone(), requires_grad=False)
    return head


def begin_lm(target: nn.Module, ids: torch.Tensor, layers: Sequence[int]) -> nn.Module:
    """A decoder of the target's chosen `layers`, with its embedding and its output rows at `ids`, both frozen."""
    model = shared_lm(target, len(layers), ids)
    copy_layers(target, model, layers)
    return model


def spread_layers(num_layers: int, count: int) -> list[int]:
    """`count` layers to begin an LM student with: two thirds from the bottom, the rest from the top."""
    if not 1 <= count <= num_layers:
        raise ValueError(f"{count} layers of a model with {num_layers}")
    last = max(count // 3, 1) if count > 1 else 0
    return [*range(count - last), *range(num_layers - last, num_layers)]


def head_config(
    target: nn.Module, draft_vocab_size: int, layers: Sequence[int], *, num_layers: int, combine: str = "add"
) -> HeadConfig:
    """The shape of a head for `target`."""
    config: Any = target.config.get_text_config()  # type: ignore[operator, union-attr]
    heads = config.num_attention_heads
    return HeadConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        draft_vocab_size=draft_vocab_size,
        target_layers=tuple(layers),
        target_hidden_size=config.hidden_size,
        combine=combine,  # type: ignore[arg-type]
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-5),
        max_positions=config.max_position_embeddings,
        rope=dict(getattr(config, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0}),
    )


def _copy_layer(layer: HeadLayer, source: nn.Module) -> None:
    """Take over whatever of a target's layer has the same name and shape."""
    attention, mlp = getattr(source, "self_attn", None), getattr(source, "mlp", None)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        weight = getattr(getattr(attention, name, None), "weight", None)
        ours = getattr(layer, name).weight
        if layer.side_by_side and name != "o_proj":
            ours = ours[:, ours.shape[1] // 2 :]  # the feature's half
        if weight is not None and weight.shape == ours.shape:
            ours.copy_(weight)
    for name in ("gate_proj", "up_proj", "down_proj"):
        _copy_if_alike(getattr(layer, name).weight, getattr(mlp, name, None))
    _copy_if_alike(layer.input_norm, getattr(source, "input_layernorm", None))
    _copy_if_alike(layer.post_norm, getattr(source, "post_attention_layernorm", None))


def _copy_if_alike(ours: torch.Tensor, module: nn.Module | None) -> None:
    weight = getattr(module, "weight", None)
    if weight is not None and weight.shape == ours.shape:
        ours.copy_(weight)
