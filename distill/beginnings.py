"""How a student begins: shaped after its target, and with as many of the target's weights as fit.

A head's layers begin as the target's last ones. What they read, the hidden state that the target would have below them at the
next token, is guessed linearly from what the head is given; ridge regression finds the weights of that guess. So a head agrees
with its target before the first training step more often than after a hundred thousand tokens from a random beginning (figures
in docs/experiments.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from distill.batches import Batch, Texts
from distill.regress import Regression
from distill.students import target_attention
from models.adapted import adapt
from models.borrowed_layers import layer_options, take_last_layers
from models.draft_head import DraftHead, HeadConfig, HeadLayer
from models.shared_lm import copy_layers, last_norm, output_rows, shared_lm

_NOISE = 0.02
_SKIPPED = 4  # tokens at the beginning of a text, where models keep hidden states of an extraordinary size
_REGRESSION_TEXTS = 96  # 50,000 tokens of 512 are plenty for some two thousand inputs
_BATCH = 4


def recorded_layers(num_layers: int, depths: Sequence[int] = (3, 8)) -> tuple[int, ...]:
    """Layers of the target whose outputs training data keeps: a low one, a middle one, and those that heads of `depths` follow.

    Depths that the target is too shallow for are left out; ValueError if none remains.
    """
    followed = [num_layers - 1 - depth for depth in depths if num_layers - 1 - depth > 0]
    if not followed:
        raise ValueError(f"a target of {num_layers} layers is too shallow for a head of {min(depths)}")
    low = min(2, followed[0], followed[-1])
    return tuple(sorted({low, max((num_layers - 1) // 2, low), *followed}))


def head_layers(recorded: Sequence[int], num_target_layers: int, num_layers: int) -> tuple[int, ...]:
    """The recorded layers that a head of `num_layers` is fed with: low, middle, and the one that its own layers follow."""
    followed = num_target_layers - 1 - num_layers
    if followed not in recorded:
        possible = sorted(num_target_layers - 1 - layer for layer in recorded if layer > 0)
        raise ValueError(f"the data suits heads of {', '.join(map(str, possible))} layers, not of {num_layers}")
    return tuple(sorted({*recorded[:2], followed}))


def begin_head(
    target: nn.Module, texts: Texts, ids: torch.Tensor, layers: Sequence[int], *, num_layers: int, rank: int, seed: int
) -> tuple[DraftHead, list[HeadLayer]]:
    """A head of `num_layers` layers on the outputs of the target's `layers`, for the draft vocabulary `ids` (ascending).

    With a `rank`, its layers are frozen but for a difference of that rank (`models.adapted`). Also returned are the target's
    last layers in the form of a head's, frozen: what the head attends to in training.
    """
    config = head_config(target, len(ids), layers, num_layers=num_layers, rank=rank)
    generator = torch.Generator().manual_seed(seed)
    head = DraftHead(config)
    head.id_map.copy_(ids)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, _NOISE, generator=generator)
        take_last_layers(head, target)
        tail = []
        for index, layer in enumerate(head.layers):
            tail.append(HeadLayer(config, index).requires_grad_(False))
            tail[-1].load_state_dict(layer.state_dict())
        norm = getattr(last_norm(target), "weight", None)
        if norm is not None and norm.shape == head.norm.shape:
            head.norm.copy_(norm)
        embedding = target.get_input_embeddings().weight.detach().float().cpu()  # type: ignore[operator]
        _fit_inputs(head, tail, texts, embedding)
    if rank:
        adapt(head.layers, rank, seed=seed)
    head.output.weight = nn.Parameter(output_rows(target)[ids].float().clone(), requires_grad=False)
    return head, tail


def _fit_inputs(head: DraftHead, tail: Sequence[HeadLayer], texts: Texts, embedding: torch.Tensor) -> None:
    """Fit `fuse_proj` and `embed_proj` on true text, then `back_proj` on the head's own first step."""
    assert head.embed_proj is not None and head.back_proj is not None, "a head that adds its inputs"
    where = texts.training[:_REGRESSION_TEXTS]
    batches = [texts.batch(where[i : i + _BATCH]) for i in range(0, len(where), _BATCH)]
    size, hidden = embedding.shape[1], head.config.hidden_size
    features = Regression(len(head.config.target_layers) * size + size, hidden)
    for batch in batches:
        seen = head.normed(batch.features[:, :-1].float()).flatten(-2)
        inputs = torch.cat((seen, embedding[batch.tokens[:, 1:]]), dim=-1)
        features.add(_rows(inputs), _rows(batch.features[:, 1:, -1].float()))
    weights = features.solve().T
    head.fuse_proj.weight.copy_(weights[:, :-size])
    head.embed_proj.weight.copy_(weights[:, -size:])
    back = Regression(hidden, hidden)
    for batch in batches[: len(batches) // 3 + 1]:
        own = head.last_norm(_first_step(head, tail, batch, embedding)[:, :-1])
        rest = batch.features[:, 2:, -1].float() - head.embed_proj(embedding[batch.tokens[:, 2:]])
        back.add(_rows(own), _rows(rest))
    head.back_proj.weight.copy_(back.solve().T)


def _first_step(head: DraftHead, tail: Sequence[HeadLayer], batch: Batch, embedding: torch.Tensor) -> torch.Tensor:
    """The head's hidden states one step ahead of true text, `[texts, length - 1, hidden]`."""
    attention = target_attention(head, tail, batch.features)
    texts, length = batch.tokens.shape
    starts = torch.arange(length - 1).expand(texts, -1)
    attention.begin_step(starts)
    return head.extend(head.fuse(batch.features[:, :-1].float()), embedding[batch.tokens[:, 1:]], starts + 1, attention)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x[:, _SKIPPED:].flatten(0, 1)


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
    target: nn.Module, draft_vocab_size: int, layers: Sequence[int], *, num_layers: int, rank: int = 0
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
        context="target",
        rank=rank,
        norm_fed_back=True,
        project_fed_back=True,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-5),
        max_positions=config.max_position_embeddings,
        **layer_options(target),
    )
