"""Many texts of one length written in step: the forward for making training data, where throughput is all that counts.

Every text of the batch gets exactly one token per forward, so nothing is ragged: keys and values lie in one dense block per
layer and there is no mask. On a CPU the linear layers run in bfloat16 with float32 in between; what is written is training
data, so a rounding that serving must not have does no harm here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from models.causal_lm import decoder_layers
from models.packed import BFloatLinear, fuse_norms, pack_linears

NAME = "graftserve_lockstep"


@dataclass(slots=True, eq=False)
class LockstepStep:
    """What one forward gives: `logits` `[texts, vocab]` float32; `features[layer]` and `final` `[texts, hidden_size]`."""

    logits: torch.Tensor
    features: dict[int, torch.Tensor]
    final: torch.Tensor  # behind the last norm: what the output matrix multiplies


@dataclass(slots=True, eq=False)
class _Block:
    """Keys and values of all texts, `[layers, texts, kv_heads, length, head_dim]`, and how far they are written."""

    keys: torch.Tensor
    values: torch.Tensor
    length: int = 0


class LockstepLM:
    """A transformers decoder over `num_texts` texts of up to `max_length` tokens. Takes the model over: it is packed."""

    def __init__(self, model: nn.Module, *, num_texts: int, max_length: int, capture: Sequence[int] = ()) -> None:
        config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
        parameter = next(model.parameters())
        self.model, self.num_texts, self.max_length = model, num_texts, max_length
        self.device = parameter.device
        if self.device.type == "cpu":
            fuse_norms(model)
            pack_linears(model, BFloatLinear)
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        shape = (config.num_hidden_layers, num_texts, kv_heads, max_length, head_dim)
        keys, values = (torch.zeros(shape, dtype=torch.bfloat16, device=self.device) for _ in range(2))
        self._block = _Block(keys, values)
        self._seen: dict[int, torch.Tensor] = {}
        self._final: torch.Tensor | None = None
        model.config._attn_implementation = NAME  # type: ignore[union-attr, assignment]
        config._attn_implementation = NAME
        layers = decoder_layers(model)
        for layer in capture:
            layers[layer].register_forward_hook(self._remember(layer))
        model.get_output_embeddings().register_forward_pre_hook(self._remember_final)  # type: ignore[operator]

    def restart(self) -> None:
        """Begin new texts."""
        self._block.length = 0

    @torch.inference_mode()
    def step(self, tokens: torch.Tensor) -> LockstepStep:
        """Append `tokens`, int64 `[n]`, n up to `num_texts`, one to each text. IndexError when the texts are full."""
        position = self._block.length
        if position == self.max_length:
            raise IndexError(f"texts are full at {self.max_length} tokens")
        output = self.model(
            input_ids=tokens[:, None],
            position_ids=torch.full((len(tokens), 1), position, dtype=torch.int64, device=self.device),
            use_cache=False,
            lockstep=self._block,
        )
        self._block.length = position + 1
        assert self._final is not None, "the output layer was not called"
        return LockstepStep(output.logits[:, 0].float(), dict(self._seen), self._final)

    def _remember(self, layer: int) -> Any:
        def hook(_module: nn.Module, _inputs: object, output: Any) -> None:
            self._seen[layer] = (output[0] if isinstance(output, tuple) else output)[:, 0]

        return hook

    def _remember_final(self, _module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self._final = inputs[0][:, 0]


def _lockstep_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    scaling: float | None = None,
    lockstep: _Block,
    **_kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one new token per text: `query` `[texts, heads, 1, head_dim]` to `[texts, 1, heads, head_dim]`."""
    layer, position = int(module.layer_idx), lockstep.length  # type: ignore[arg-type]
    texts, heads, _one, head_dim = query.shape
    lockstep.keys[layer, :texts, :, position] = key[:, :, 0]
    lockstep.values[layer, :texts, :, position] = value[:, :, 0]
    kv_heads = key.shape[1]
    # The query heads that share a key head stand in line as its queries: no mask, no repeated keys.
    grouped = query.view(texts, kv_heads, heads // kv_heads, head_dim).bfloat16()
    seen = slice(0, position + 1)
    output = scaled_dot_product_attention(
        grouped, lockstep.keys[layer, :texts, :, seen], lockstep.values[layer, :texts, :, seen], scale=scaling
    )
    return output.reshape(texts, 1, heads, head_dim).to(query.dtype), None


AttentionInterface.register(NAME, _lockstep_attention)
