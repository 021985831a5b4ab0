"""Which models are refused at load: those whose answers tree attention over rows could not reproduce exactly.

Two lines of defense. The config is read for what is known not to fit, so that the message can say what it is. Then a probe
compares a small tree, forwarded our way, with the model's own plain forward over each path, which catches what the config
does not say.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import nn

from models.attention import NAME, Segment
from models.causal_lm import CausalLM

# Rotary scalings whose angles depend on how long the longest sequence of the batch is.
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
# Anywhere in the model type: "mamba2", "falcon_mamba" and "recurrent_gemma" alike.
_RECURRENT = ("mamba", "rwkv", "recurrent", "jamba", "zamba", "bamba", "falcon_h1", "nemotron_h", "xlstm", "lfm2")
_RECURRENT_LAYERS = {"linear_attention", "mamba", "mamba2", "recurrent", "conv", "hybrid", "hybrid_sliding"}
_WINDOWED_LAYERS = {"sliding_attention", "chunked_attention", "window_attention", "reference_sliding_attention"}
_FULL_LAYERS = {"full_attention", "attention"}
# Parents of a tree of five nodes: two siblings under the root, one of which has two children.
_PROBE_PARENTS = (-1, 0, 0, 1, 1)


class UnservableModel(ValueError):
    """The model cannot be served exactly; the message names the model and the reason."""


def check_config(config: Any, name: str) -> None:
    """Raise `UnservableModel` for architectures that have no per-token rows or no full attention."""
    if getattr(config, "is_encoder_decoder", False):
        raise UnservableModel(f"{name}: encoder-decoder models are not served; a decoder-only causal LM is needed")
    config = config.get_text_config()
    kind = str(getattr(config, "model_type", ""))
    layer_types = {
        layer for key in ("layer_types", "layers_block_type") for layer in getattr(config, key, None) or ()
    }
    if any(word in kind for word in _RECURRENT) or layer_types & _RECURRENT_LAYERS:
        raise UnservableModel(f"{name}: {kind} keeps a recurrent state, which cannot be cut back to an accepted path")
    windowed = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    if windowed or layer_types & _WINDOWED_LAYERS:
        raise UnservableModel(
            f"{name}: sliding-window attention (sliding_window={getattr(config, 'sliding_window', None)}) is not served; "
            "if the model was trained with full attention, set sliding_window to null in its config.json"
        )
    if layer_types - _FULL_LAYERS:
        raise UnservableModel(f"{name}: layers of type {min(layer_types - _FULL_LAYERS)!r} are not served")
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise UnservableModel(f"{name}: attention scores are capped (attn_logit_softcapping), which is not served")
    for rope_type in _rope_types(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)):
        if rope_type in _LENGTH_DEPENDENT_ROPE:
            raise UnservableModel(f"{name}: rotary scaling {rope_type!r} depends on the batch's longest sequence")
    if not getattr(config, "max_position_embeddings", None):
        raise UnservableModel(f"{name}: the config gives no max_position_embeddings")


def check_weights(model: nn.Module, name: str) -> None:
    """Raise `UnservableModel` if a parameter holds NaN or infinity: such a model answers nonsense without a sign."""
    for key, parameter in model.named_parameters():
        # The sum is not finite if a term is not, and much cheaper; a sum of finite terms may overflow, so look again then.
        if not bool(torch.isfinite(parameter.sum(dtype=torch.float32))) and not bool(torch.isfinite(parameter).all()):
            raise UnservableModel(f"{name}: weights of {key} hold NaN or infinite values")


def check_attention(lm: CausalLM, name: str, *, tolerance: float = 2e-3) -> None:
    """Compare a small tree forward with plain causal forwards over its paths; raise `UnservableModel` if they differ.

    The difference is measured against the spread of the logits, so that the tolerance fits every model; half-precision
    models get ten times as much.
    """
    if next(lm.model.parameters()).dtype != torch.float32:
        tolerance *= 10
    count = len(_PROBE_PARENTS)
    ids = [(7 * i + 3) % lm.num_tokens for i in range(3 + count)]
    prefix, tree = ids[:3], ids[3:]
    taken = lm.pool.allocate(len(ids))
    prefix_rows, rows = taken[: len(prefix)], taken[len(prefix) :]
    paths = _paths()
    visible = torch.zeros(count, count, dtype=torch.bool)
    for node, path in enumerate(paths):
        visible[node, path] = True
    positions = [len(prefix) + len(path) - 1 for path in paths]
    lm.pool.keys[:, taken] = 0
    try:
        empty = np.empty(0, dtype=np.int64)
        lm.forward([Segment(prefix, range(len(prefix)), empty, prefix_rows, ())])
        segment = Segment(tree, positions, np.asarray(prefix_rows), rows, range(count), visible=visible)
        ours = lm.forward([segment]).logits[:, : lm.num_tokens]
        plain = torch.stack([_plain_logits(lm, prefix + [tree[i] for i in path]) for path in paths])
        written = lm.pool.keys[:, taken].abs().amax(dim=(1, 2, 3)) > 0
    except (TypeError, LookupError, AttributeError, RuntimeError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UnservableModel(f"{name}: {type(lm.model).__name__} does not run with tree attention ({reason})") from error
    finally:
        lm.pool.release(taken)
    if not bool(written.all()):  # weak context dependence could hide it from the comparison below
        raise UnservableModel(
            f"{name}: {int((~written).sum())} of {len(written)} layers of {type(lm.model).__name__} have no attention "
            "of the kind whose keys and values can be kept per token"
        )
    plain = plain[:, : lm.num_tokens]
    difference = float((ours - plain).abs().max() / plain.std().clamp(min=1e-6))
    if not difference <= tolerance:
        raise UnservableModel(
            f"{name}: tree attention differs from the model's own by {difference:.2g} of the logits' spread "
            f"(allowed {tolerance:.2g})"
        )


def _rope_types(rope: Any) -> list[str]:
    """Rotary scalings a config names: one for all layers, or one per type of layer."""
    if not isinstance(rope, dict):
        return []
    per_layer_type = [kind for value in rope.values() for kind in _rope_types(value)]
    return [str(rope[key]) for key in ("rope_type", "type") if key in rope] + per_layer_type


def _paths() -> list[list[int]]:
    paths: list[list[int]] = []
    for node, parent in enumerate(_PROBE_PARENTS):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    return paths


@torch.inference_mode()
def _plain_logits(lm: CausalLM, tokens: list[int]) -> torch.Tensor:
    """Last-token logits `[vocab]` of the model's own forward with transformers' eager attention."""
    configs = [lm.model.config, lm.config]
    before = [copy.copy(config._attn_implementation) for config in configs]  # type: ignore[union-attr]
    try:
        for config in configs:
            config._attn_implementation = "eager"  # type: ignore[union-attr, assignment]
        ids = torch.tensor([tokens], device=lm.device)
        logits: torch.Tensor = lm.model(input_ids=ids, use_cache=False).logits[0, -1].float()
        return logits
    finally:
        for config, attention in zip(configs, before, strict=True):
            config._attn_implementation = attention  # type: ignore[union-attr, assignment]
        assert lm.config._attn_implementation == NAME
