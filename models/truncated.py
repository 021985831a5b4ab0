"""A cheaper model made of a model's own first and last layers: nothing is copied, every module is shared.

Untrained, it is a stand-in for a distilled drafter: it knows the target's embedding and output matrix and agrees with the
target often enough to be worth measuring, at a price in proportion to its layers.
"""

from __future__ import annotations

import copy

from torch import nn

from models.causal_lm import CausalLM, decoder_layers


def truncate(lm: CausalLM, first: int, last: int, *, num_rows: int) -> CausalLM:
    """A `CausalLM` over the `first` first and `last` last layers of `lm`, sharing its weights, with its own row pool.

    ValueError if that would be no layer at all or more layers than the model has.
    """
    layers = decoder_layers(lm.model)
    if first < 0 or last < 0 or not 1 <= first + last <= len(layers):
        raise ValueError(f"truncated drafter: {first} first and {last} last layers of a model with {len(layers)} layers")
    chosen = [*range(first), *range(len(layers) - last, len(layers))]
    decoder = lm.model.get_decoder()  # type: ignore[operator]
    short = _shallow(decoder)
    name = next(key for key, child in decoder.named_children() if child is layers)
    short._modules[name] = nn.ModuleList(layers[i] for i in chosen)
    model = _replace_child(lm.model, decoder, short)
    slots = {_layer_index(layers[i], i): slot for slot, i in enumerate(chosen)}
    return CausalLM(model, num_rows=num_rows, num_tokens=lm.num_tokens, slots=slots)


def _shallow(module: nn.Module) -> nn.Module:
    """A module with the same parameters and children, whose list of children can be changed without touching the original."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin


def _replace_child(module: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """A shallow twin of `module` in which the descendant `old` is `new`."""
    if module is old:
        return new
    twin = _shallow(module)
    for name, child in module._modules.items():
        if child is old:
            twin._modules[name] = new
        elif child is not None and any(descendant is old for descendant in child.modules()):
            twin._modules[name] = _replace_child(child, old, new)
    return twin


def _layer_index(layer: nn.Module, default: int) -> int:
    """The index by which a layer's attention module names its cache."""
    for module in layer.modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int):
            return index
    return default
