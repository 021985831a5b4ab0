"""The oracle of the draft-head tests: a head computed the obvious way, one entry after another, everything from scratch.

Written from the paper (EAGLE-3, 2503.01840) and the layout of its checkpoints, in float64 and without anything of
`models.draft_head`: no cache, no mask, no batch. The target's hidden states, and the keys and values that a head which looks at
the target starts from, come from transformers itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

Weights = Mapping[str, torch.Tensor]


@torch.inference_mode()
def target_states(target: PreTrainedModel, tokens: Sequence[int], layers: Sequence[int]) -> torch.Tensor:
    """What leaves `layers` (not the last one) of the target at every token, `[n, layers, hidden]`."""
    assert max(layers) < target.config.num_hidden_layers - 1, "transformers shows the last layer's output only behind the norm"
    target.config._attn_implementation = "eager"
    states = target(torch.tensor([list(tokens)]), output_hidden_states=True, use_cache=False).hidden_states
    return torch.stack([states[layer + 1][0] for layer in layers], dim=1)


@torch.inference_mode()
def target_memory(
    target: PreTrainedModel, tokens: Sequence[int], count: int
) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Per layer, of the target's last `count`, the keys and values `[kv_heads, head_dim]` of every token, in float64."""
    target.config._attn_implementation = "eager"
    output = target(torch.tensor([list(tokens)]), use_cache=True)
    cache = output["cache"] if "cache" in output else output["past_key_values"]  # renamed in transformers 5
    memory = []
    for layer in cache.layers[-count:]:
        keys, values = layer.keys[0].double(), layer.values[0].double()
        memory.append([(keys[:, place], values[:, place]) for place in range(len(tokens))])
    return memory


@dataclass(frozen=True)
class PlainHead:
    """Weights by the names of the public checkpoints, the layers as `layers.0` and up; two more projections are ours alone."""

    weights: Weights
    embedding: torch.Tensor
    ids: Sequence[int]  # draft id -> target id
    layers: Sequence[int]  # of the target
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope: Mapping[str, Any] = field(default_factory=dict)
    norm_each: bool = False
    norm_before_residual: bool = False
    norm_together: bool = False
    norm_fed_back: bool = False
    looks_at_target: bool = False  # at the keys and values of the target's last layers, instead of entries of its own

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", {name: weight.double() for name, weight in self.weights.items()})

    def log_probs(self, target: PreTrainedModel, text: Sequence[int], path: Sequence[int] = ()) -> torch.Tensor:
        """Log-probabilities `[draft_vocab]` of what follows `text` and then the drafted tokens `path`."""
        return torch.log_softmax(self._weight("lm_head.weight") @ self.last_state(target, text, path), dim=-1)

    def last_state(self, target: PreTrainedModel, text: Sequence[int], path: Sequence[int] = ()) -> torch.Tensor:
        """What the output rows multiply for that, `[hidden]`."""
        states = target_states(target, text[:-1], self.layers).double()
        if self.looks_at_target:
            memory = target_memory(target, text[:-1], self._num_layers())
            first = len(text) - 1  # the root stands at its own position, behind all that the target has been fed
            hidden = self._entry(self._fused(states[-1]), text[-1], first, memory)
        else:
            memory = [[] for _ in range(self._num_layers())]
            for place, token in enumerate(text[1:]):
                hidden = self._entry(self._fused(states[place]), token, place, memory)
            first = len(text) - 2
        for depth, token in enumerate(path, start=1):
            hidden = self._entry(self._fed_back(hidden), token, first + depth, memory)
        return self._normed(hidden, "norm.weight")

    def row(self, target: PreTrainedModel, text: Sequence[int], path: Sequence[int] = ()) -> dict[int, float]:
        """The same by target id; ids that are missing have no probability."""
        return dict(zip(self.ids, self.log_probs(target, text, path).tolist(), strict=True))

    def _fused(self, states: torch.Tensor) -> torch.Tensor:
        parts = []
        for index, state in enumerate(states):
            part = _unit(state, self.eps) if self.norm_each else state
            parts.append(part * self._weight(f"fc_norm.{index}.weight") if f"fc_norm.{index}.weight" in self.weights else part)
        joined = torch.cat(parts)
        if self.norm_together:
            joined = _unit(joined, self.eps) * self._weight("input_norm.weight")
        return self._weight("fc.weight") @ joined

    def _fed_back(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self._normed(hidden, "norm.weight") if self.norm_fed_back else hidden
        return self._weight("back_proj.weight") @ hidden if "back_proj.weight" in self.weights else hidden

    def _entry(self, x: torch.Tensor, token: int, position: int, memory: list[Any]) -> torch.Tensor:
        """One entry through every layer; `memory[layer]` holds the keys and values of those before it."""
        embedding = self.embedding[token].double()
        side_by_side = "embed_proj.weight" not in self.weights
        if not side_by_side:
            x = x + self._weight("embed_proj.weight") @ embedding
        for layer in range(self._num_layers()):
            name = f"layers.{layer}"
            if layer == 0 and side_by_side:
                normed = self._normed(x, f"{name}.hidden_norm.weight")
                x = normed if self.norm_before_residual else x
                seen = torch.cat((self._normed(embedding, f"{name}.input_layernorm.weight"), normed))
            else:
                seen = self._normed(x, f"{name}.input_layernorm.weight")
            x = x + self._weight(f"{name}.self_attn.o_proj.weight") @ self._attention(name, seen, position, memory[layer])
            seen = self._normed(x, f"{name}.post_attention_layernorm.weight")
            gate = self._weight(f"{name}.mlp.gate_proj.weight") @ seen
            up = self._weight(f"{name}.mlp.up_proj.weight") @ seen
            x = x + self._weight(f"{name}.mlp.down_proj.weight") @ (gate * torch.sigmoid(gate) * up)
        return x

    def _attention(self, name: str, seen: torch.Tensor, position: int, memory: list[Any]) -> torch.Tensor:
        q, k, v = (self._weight(f"{name}.self_attn.{part}_proj.weight") @ seen for part in "qkv")
        keys = torch.stack([self._rotated(key, position) for key in k.split(self.head_dim)])
        memory.append((keys, v.view(self.kv_heads, self.head_dim)))
        outputs = []
        for head, query in enumerate(q.split(self.head_dim)):
            shared = head // (self.heads // self.kv_heads)
            query = self._rotated(query, position)
            scores = torch.stack([query @ keys[shared] for keys, _ in memory]) / math.sqrt(self.head_dim)
            values = torch.stack([values[shared] for _, values in memory])
            outputs.append(torch.softmax(scores, dim=0) @ values)
        return torch.cat(outputs)

    def _rotated(self, x: torch.Tensor, position: int) -> torch.Tensor:
        half = self.head_dim // 2
        angles = torch.tensor([position * self._frequency(i) for i in range(half)], dtype=torch.float64)
        first, second = x[:half], x[half:]
        return torch.cat(
            (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin())
        )

    def _frequency(self, i: int) -> float:
        plain = float(self.rope.get("rope_theta", 10000.0)) ** (-2 * i / self.head_dim)
        kind = self.rope.get("rope_type", "default")
        if kind == "default":
            return plain
        factor = self.rope["factor"]
        if kind == "linear":
            return plain / factor
        assert kind == "llama3", kind
        # Llama 3.1: long waves are stretched, short ones are not, in between there is a ramp.
        turns = self.rope["original_max_position_embeddings"] * plain / (2 * math.pi)
        low, high = self.rope["low_freq_factor"], self.rope["high_freq_factor"]
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        return plain * (kept + (1 - kept) / factor)

    def _normed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return _unit(x, self.eps) * self._weight(name)

    def _weight(self, name: str) -> torch.Tensor:
        return self.weights[name]

    def _num_layers(self) -> int:
        return 1 + max(int(key.split(".")[1]) for key in self.weights if key.startswith("layers."))


def _unit(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean() + eps)
