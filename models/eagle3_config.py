"""What the config.json of a published EAGLE-3 head says about its shape (2503.01840), in the two formats that are in use.

The *release* format keeps everything at the top level, as a Llama config does. The *speculators* format (of the library of that
name) nests the decoder layer's config and names the target that the head was trained for.

Decided here: which of the target's layers a head listens to. Unless the config says so, to the hidden states that *enter*
layers 2, n // 2 and n - 3, as in the releases. Ids at the top level count layers by what enters them; ids inside `eagle_config`
count them by what leaves them: the two conventions differ by one, and the programs that write these files keep to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.draft_head import HeadConfig
from models.refusal import UnservableModel

_MIN_LAYERS = 7  # of a target, for 2 < n // 2 < n - 3
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
_REQUIRED = ("hidden_size", "intermediate_size", "num_attention_heads")


def is_eagle3(values: Mapping[str, Any]) -> bool:
    """Whether a parsed config.json is that of an EAGLE-3 head. Some releases give a plain Llama architecture."""
    if "speculators_model_type" in values:
        return bool(values["speculators_model_type"] == "eagle3")
    return any("eagle3" in str(name).lower() for name in values.get("architectures") or ()) or "draft_vocab_size" in values


def verifier_name(values: Mapping[str, Any]) -> str | None:
    """The target that the head was trained for, as far as the config says."""
    verifier = (values.get("speculators_config") or {}).get("verifier") or {}
    name = verifier.get("name_or_path")
    return str(name) if name else None


def read_head_config(
    values: Mapping[str, Any], name: str, *, num_target_layers: int, target_hidden_size: int, target_vocab_size: int
) -> HeadConfig:
    """The shape of the head. Raises `UnservableModel` for what is missing, contradicts the target, or is not served."""
    if not is_eagle3(values):
        kind = values.get("speculators_model_type") or (values.get("architectures") or ["unknown"])[0]
        raise UnservableModel(f"{name}: {kind} is not an EAGLE-3 draft head")
    layer = values["transformer_layer_config"] if "speculators_model_type" in values else values
    for key in _REQUIRED:
        if not layer.get(key):
            raise UnservableModel(f"{name}: config.json gives no {key}")
    options = {**(values.get("eagle_config") or {}), **values}
    if options.get("use_aux_hidden_state") is False:
        raise UnservableModel(f"{name}: the head reads the target's last layer only, which is EAGLE-1, not EAGLE-3")
    if layer.get("hidden_act", "silu") != "silu":
        raise UnservableModel(f"{name}: activation {layer['hidden_act']!r} is not served in a draft head")
    if set(layer.get("layer_types") or ()) - {"full_attention"}:
        raise UnservableModel(f"{name}: layers of type {layer['layer_types'][0]!r} are not served in a draft head")
    heads = int(layer["num_attention_heads"])
    kv_heads = int(layer.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise UnservableModel(f"{name}: {heads} query heads cannot share {kv_heads} key-value heads")
    hidden_size = int(layer["hidden_size"])
    expected = int(options.get("target_hidden_size") or hidden_size)
    if expected != target_hidden_size:
        raise UnservableModel(f"{name}: made for a target of hidden size {expected}, this one's is {target_hidden_size}")
    return HeadConfig(
        hidden_size=hidden_size,
        intermediate_size=int(layer["intermediate_size"]),
        num_layers=int(layer.get("num_hidden_layers") or 1),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=int(layer.get("head_dim") or hidden_size // heads),
        draft_vocab_size=int(values.get("draft_vocab_size") or layer.get("vocab_size") or target_vocab_size),
        target_layers=_target_layers(values, name, num_target_layers),
        target_hidden_size=target_hidden_size,
        combine="concat",
        norm_features=bool(options.get("fc_norm")),
        norm_together=bool(options.get("norm_before_fc")),
        norm_before_residual=bool(options.get("norm_before_residual")),
        norm_fed_back=bool(options.get("norm_output")),
        own_output=True,
        rms_norm_eps=float(layer.get("rms_norm_eps") or 1e-6),
        max_positions=int(layer.get("max_position_embeddings") or 2048),
        rope=_rope(layer, name),
    )


def _target_layers(values: Mapping[str, Any], name: str, num_layers: int) -> tuple[int, ...]:
    """Layers of the target whose outputs are fused, counted from 0."""
    entering = values.get("eagle_aux_hidden_state_layer_ids")
    leaving = (values.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if entering:
        layers = tuple(int(layer) - 1 for layer in entering)
    elif leaving:
        layers = tuple(int(layer) for layer in leaving)
    elif num_layers < _MIN_LAYERS:
        raise UnservableModel(
            f"{name}: the head listens to layers near the 2nd, the middle and the last but 3rd of a target with "
            f"{_MIN_LAYERS} layers or more; this one has {num_layers}"
        )
    else:
        layers = (1, num_layers // 2 - 1, num_layers - 4)
    for layer in layers:
        if not 0 <= layer < num_layers:
            raise UnservableModel(
                f"{name}: the head listens to what leaves layer {layer}, counted from 0, of a target with {num_layers} layers"
            )
    return layers


def _rope(layer: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Rotary parameters in the form that `LlamaConfig` takes, from the old keys or the new one."""
    rope = dict(layer.get("rope_parameters") or layer.get("rope_scaling") or {})
    if any(isinstance(value, dict) for value in rope.values()):
        raise UnservableModel(f"{name}: rotary parameters per type of layer are not served in a draft head")
    # Text has one position per token, for which the sections of multimodal rotation change nothing.
    rope = {key: value for key, value in rope.items() if not key.startswith("mrope_")}
    kind = str(rope.pop("rope_type", None) or rope.get("type") or "default")
    rope.pop("type", None)
    kind = "default" if kind == "mrope" else kind
    if kind in _LENGTH_DEPENDENT_ROPE:
        raise UnservableModel(f"{name}: rotary scaling {kind!r} depends on the batch's longest sequence")
    if float(rope.pop("partial_rotary_factor", None) or layer.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UnservableModel(f"{name}: rotation of a part of each head is not served in a draft head")
    theta = float(rope.pop("rope_theta", None) or layer.get("rope_theta") or 10000.0)
    return {**rope, "rope_type": kind, "rope_theta": theta}
