"""Random draft heads for toy targets: as modules, as their plain twins, and as checkpoints in the published formats."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from models import toy
from models.draft_head import DraftHead, HeadConfig, HeadLayer
from tests.plain_draft_head import PlainHead

Combine = Literal["concat", "add"]
Tensors = dict[str, torch.Tensor]

HEADS, KV_HEADS, HEAD_DIM, EPS = 4, 2, 8, 1e-5
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def toy_head(
    target: PreTrainedModel,
    combine: Combine = "add",
    *,
    seed: int = 0,
    layers: Sequence[int] = (0, 1, 2),
    num_layers: int = 1,
    num_draft: int | None = None,
    **options: Any,
) -> DraftHead:
    """Random weights at unit scale over `num_draft` of the target's tokens, not in order (None: all of them)."""
    vocab, hidden = target.config.vocab_size, target.config.hidden_size
    count = vocab if num_draft is None else num_draft
    config = HeadConfig(
        hidden_size=options.pop("hidden_size", hidden),
        intermediate_size=options.pop("intermediate_size", 48),
        num_layers=num_layers,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        draft_vocab_size=count,
        target_layers=tuple(layers),
        target_hidden_size=hidden,
        combine=combine,
        rms_norm_eps=options.pop("rms_norm_eps", EPS),
        **options,
    )
    head = DraftHead(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in head.named_parameters():
        weight.copy_(_draw(weight.shape, generator, 2.5 if name == "output.weight" else 1.0))
    head.id_map = torch.tensor(random.Random(seed).sample(range(vocab), count))
    return head


def tail_head(
    target: PreTrainedModel, *, num_layers: int = 1, seed: int = 0, num_draft: int | None = None, **options: Any
) -> DraftHead:
    """A head of random weights shaped like the target's last layers, which looks at the target's own keys and values.

    Its last feature is what these layers are fed with in the target.
    """
    followed = target.config.num_hidden_layers - 1 - num_layers
    return toy_head(
        target,
        seed=seed,
        layers=options.pop("layers", sorted({0, 1, followed})),
        num_layers=num_layers,
        num_draft=num_draft,
        context="target",
        norm_fed_back=options.pop("norm_fed_back", True),
        project_fed_back=options.pop("project_fed_back", True),
        intermediate_size=target.config.intermediate_size,
        rms_norm_eps=target.config.rms_norm_eps,
        rope=dict(target.config.rope_parameters),
        **options,
    )


@torch.no_grad()
def targets_layers(target: PreTrainedModel, config: HeadConfig) -> list[HeadLayer]:
    """The last layers of a target of the Llama family in the form of a head's."""
    copies = []
    for index, source in enumerate(target.model.layers[-config.num_layers :]):
        layer = HeadLayer(config, index).requires_grad_(False)
        for part in ("self_attn", "mlp"):
            for name, module in getattr(source, part).named_children():
                if name.endswith("_proj"):
                    getattr(layer, name).weight.copy_(module.weight)
        layer.input_norm.copy_(source.input_layernorm.weight)
        layer.post_norm.copy_(source.post_attention_layernorm.weight)
        copies.append(layer)
    return copies


def forgetful_below(num_layers: int, *, vocab: int, seed: int = 0, layers: int = 4) -> PreTrainedModel:
    """A target whose layers below the last `num_layers` do nothing: what these read is the token's embedding alone."""
    target = toy.tiny_causal_lm("llama", vocab, seed, layers=layers)
    with torch.no_grad():
        for layer in target.model.layers[:-num_layers]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return target


@torch.no_grad()
def knowing_tail(target: PreTrainedModel, num_layers: int) -> DraftHead:
    """The head that *is* the last layers of a target which is forgetful below them: it computes what the target does."""
    head = tail_head(target, num_layers=num_layers)
    for layer, source in zip(head.layers, targets_layers(target, head.config), strict=True):
        layer.load_state_dict(source.state_dict())
    head.fuse_proj.weight.zero_()
    head.back_proj.weight.zero_()
    head.embed_proj.weight.copy_(torch.eye(len(head.norm)))
    head.norm.copy_(target.model.norm.weight)
    head.output.weight.copy_(target.lm_head.weight[head.id_map])
    return head


def plain_twin(head: DraftHead, target: PreTrainedModel) -> PlainHead:
    """The same head for the oracle, by the names of the published checkpoints."""
    config = head.config
    weights: Tensors = {}
    for name, weight in head.named_parameters():
        weights[_public_name(name, config.combine)] = weight.detach().clone()
    return PlainHead(
        weights,
        target.get_input_embeddings().weight.detach(),
        head.id_map.tolist(),
        config.target_layers,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.rms_norm_eps,
        config.rope,
        norm_each=config.norm_features,
        norm_fed_back=config.norm_fed_back,
        looks_at_target=config.context == "target",
    )


def _public_name(name: str, combine: Combine) -> str:
    whole = {"fuse_proj.weight": "fc.weight", "norm": "norm.weight", "output.weight": "lm_head.weight"}
    if not name.startswith("layers."):
        return whole.get(name, name)
    _, index, rest = name.split(".", 2)
    part = rest.removesuffix(".weight")
    side_by_side = combine == "concat" and index == "0"
    norms = {
        "input_norm": "hidden_norm" if side_by_side else "input_layernorm",
        "embedding_norm": "input_layernorm",
        "post_norm": "post_attention_layernorm",
    }
    if part in norms:
        return f"layers.{index}.{norms[part]}.weight"
    return f"layers.{index}.{'mlp' if part in ('gate_proj', 'up_proj', 'down_proj') else 'self_attn'}.{part}.weight"


def checkpoint_tensors(target: PreTrainedModel, *, seed: int = 0, num_draft: int = 20, num_layers: int = 1) -> Tensors:
    """The tensors of a head by the names of the speculators format, drawn without any of our modules."""
    vocab, hidden = target.config.vocab_size, target.config.hidden_size
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, 3 * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (num_draft, hidden),
    }
    for index in range(num_layers):
        layer, width = f"layers.{index}", hidden if index else 2 * hidden
        shapes |= {
            f"{layer}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, width),
            f"{layer}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, width),
            f"{layer}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, width),
            f"{layer}.self_attn.o_proj.weight": (hidden, HEADS * HEAD_DIM),
            f"{layer}.mlp.gate_proj.weight": (48, hidden),
            f"{layer}.mlp.up_proj.weight": (48, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, 48),
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
        }
    shapes["layers.0.hidden_norm.weight"] = (hidden,)
    tensors = {name: _draw(shape, generator, 2.5 if name == "lm_head.weight" else 1.0) for name, shape in shapes.items()}
    chosen = sorted(random.Random(seed).sample(range(vocab), num_draft))
    tensors["d2t"] = torch.tensor(chosen) - torch.arange(num_draft)
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, torch.tensor(chosen), True)
    return tensors


def write_release(folder: Path, target: PreTrainedModel, tensors: Tensors, *, pickled: bool = True, **config: Any) -> Path:
    """A checkpoint as the EAGLE-3 authors release them."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {"architectures": ["LlamaForCausalLMEagle3"], **_layer_config(target), "draft_vocab_size": len(tensors["d2t"])}
    (folder / "config.json").write_text(json.dumps({**values, **config}))
    named = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    if pickled:
        torch.save(named, folder / "pytorch_model.bin")
    else:
        save_file(named, folder / "model.safetensors")
    return folder


def write_speculators(
    folder: Path, target: PreTrainedModel, tensors: Tensors, *, layer: Mapping[str, Any] | None = None, **config: Any
) -> Path:
    """A checkpoint as the speculators library writes them."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "toys/target", "architectures": []}},
        "draft_vocab_size": len(tensors.get("lm_head.weight", ())),
        "norm_before_residual": True,
        "target_hidden_size": None,
        "transformer_layer_config": {**_layer_config(target), **(layer or {})},
    }
    (folder / "config.json").write_text(json.dumps({**values, **config}))
    save_file(tensors, folder / "model.safetensors")
    return folder


def _layer_config(target: PreTrainedModel) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": target.config.hidden_size,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": EPS,
        "rope_theta": 5000.0,
        "max_position_embeddings": 512,
        "vocab_size": target.config.vocab_size,
    }


def _draw(shape: Sequence[int], generator: torch.Generator, gain: float) -> torch.Tensor:
    """Matrices keep vectors at unit scale, times `gain`; norms are near one, yet not one."""
    drawn = torch.randn(*shape, generator=generator)
    return gain * drawn / math.sqrt(shape[1]) if len(shape) == 2 else 1.0 + 0.2 * drawn
