"""A small decoder that shares its embedding and output rows with a target: what an LM drafter is made of.

It is the target's own architecture with fewer layers. The embedding is not stored with it but borrowed at load, and the output
covers only the ids of a map, whose rows are the target's as well.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from models.causal_lm import decoder_layers


def shared_lm(target: nn.Module, num_layers: int, ids: torch.Tensor) -> nn.Module:
    """A float32 model like `target` with `num_layers` random layers, its embedding, and its output rows at `ids`.

    Embedding and output rows are frozen. ValueError if the target has rows with a bias, or fewer layers.
    """
    config: Any = copy.deepcopy(target.config)
    if not 1 <= num_layers <= config.get_text_config().num_hidden_layers:
        raise ValueError(f"layers: {num_layers} of a model with {config.get_text_config().num_hidden_layers}")
    text = config.get_text_config()
    text.num_hidden_layers = num_layers
    if getattr(text, "layer_types", None):
        text.layer_types = list(text.layer_types)[:num_layers]
    config.tie_word_embeddings = False
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.set_input_embeddings(_frozen_embedding(target))
    replace_output(model, output_rows(target)[ids])
    return model  # type: ignore[no-any-return]


def copy_layers(source: nn.Module, destination: nn.Module, layers: Sequence[int]) -> None:
    """Fill the layers and the last norm of `destination` from the chosen `layers` of `source`."""
    ours, theirs = decoder_layers(destination), decoder_layers(source)
    assert len(ours) == len(layers), "one source layer per layer"
    for layer, index in zip(ours, layers, strict=True):
        layer.load_state_dict(theirs[index].state_dict())
    last_norm(destination).load_state_dict(last_norm(source).state_dict())


def output_rows(model: nn.Module) -> torch.Tensor:
    """The output matrix `[vocab, hidden]`; ValueError for one with a bias or of another kind."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    if type(head) is not nn.Linear or head.bias is not None:
        raise ValueError("the target's output layer is not a plain matrix")
    return head.weight.detach()


def replace_output(model: nn.Module, rows: torch.Tensor) -> None:
    """Make `rows` `[ids, hidden]` the frozen output matrix of `model`."""
    head = nn.Linear(rows.shape[1], rows.shape[0], bias=False)
    head.weight = nn.Parameter(rows.float().clone(), requires_grad=False)
    model.set_output_embeddings(head)  # type: ignore[operator]


def own_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights that are the student's own: all but embedding and output rows."""
    shared = {id(p) for m in (model.get_input_embeddings(), model.get_output_embeddings()) for p in m.parameters()}  # type: ignore[operator]
    return {name: p.detach() for name, p in model.named_parameters() if id(p) not in shared}


def _frozen_embedding(target: nn.Module) -> nn.Embedding:
    weight = target.get_input_embeddings().weight.detach().float()  # type: ignore[operator]
    return nn.Embedding.from_pretrained(weight, freeze=True)


def last_norm(model: nn.Module) -> nn.Module:
    """The norm before the output matrix; ValueError if it is in no known place."""
    decoder = model.get_decoder()  # type: ignore[operator]
    for name in ("norm", "final_layernorm", "ln_f"):
        if isinstance(found := getattr(decoder, name, None), nn.Module):
            return found
    raise ValueError(f"{type(model).__name__} keeps its last norm in no known place")
