"""A draft head: a few decoder layers that go on from the target's own hidden states.

Source: EAGLE-3 (2503.01840), of whose checkpoints this module is the shape, and its training-time test. The target's hidden
states at a low, a middle and a high layer are fused into one vector per token; together with the embedding of the *next* token
they are what the head sees of the text. For tokens that the head drafted itself, which the target has not seen, its own hidden
state takes the place of the fused one.

Entry i of a text is (feature of token i, embedding of token i + 1) at position i, and predicts token i + 2. The output covers a
reduced vocabulary; an id map leads from it to the target's ids.

Decided here: how the two inputs meet. `concat` is EAGLE-3's way: both go side by side into the first attention, only the
feature into the residual stream. A small model's attention passes values through few key-value heads, too few for a whole
embedding, so `add` puts the projected embedding into the residual stream instead, and every layer is an ordinary one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.functional import gelu, rms_norm, silu
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""The attention of one layer, which also remembers the new keys and values.

(layer, queries `[texts, heads, n, head_dim]`, keys and values `[texts, kv_heads, n, head_dim]`) ->
`[texts, n, heads * head_dim]`.
"""


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """Shape of a draft head. Sizes are the target's where the two meet."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    draft_vocab_size: int
    target_layers: tuple[int, ...]  # whose outputs are fused
    target_hidden_size: int
    combine: Literal["concat", "add"] = "add"
    context: Literal["own", "target"] = "own"  # whose keys and values of the verified text its attention sees
    norm_features: bool = True  # bring every hidden state to the same size before they are fused
    norm_together: bool = False  # ... or all layers' states of a token as one vector
    norm_before_residual: bool = False  # "concat": the normed feature, not the feature itself, starts the residual stream
    norm_fed_back: bool = False  # what stands in for the features of drafted tokens comes from behind the last norm
    project_fed_back: bool = False  # ... and is brought to its place by a matrix of its own
    attention_bias: bool = False  # of queries, keys and values
    qk_norm: bool = False  # queries and keys are normed, head by head, before they are rotated
    activation: Literal["silu", "gelu_tanh"] = "silu"
    rank: int = 0  # of the difference between its layers and the target's last ones, which is all that is stored; 0: all is
    own_output: bool = False  # False: the output rows are the target's own, picked by the id map
    rms_norm_eps: float = 1e-5
    max_positions: int = 8192
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> HeadConfig:
        """From a JSON object; ValueError for unknown or missing keys."""
        known = {f.name for f in fields(HeadConfig)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"unknown key {unknown[0]!r} in a draft head's config")
        try:
            return HeadConfig(**{**values, "target_layers": tuple(values["target_layers"])})
        except (KeyError, TypeError) as error:
            raise ValueError(f"a draft head's config lacks a value: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """As a JSON object."""
        return {**asdict(self), "target_layers": list(self.target_layers), "rope": dict(self.rope)}


class HeadLayer(nn.Module):
    """One pre-norm decoder layer. With `side_by_side` its attention sees embedding and feature next to each other."""

    def __init__(self, config: HeadConfig, index: int) -> None:
        super().__init__()
        hidden, wide = config.hidden_size, config.intermediate_size
        self.index, self.config = index, config
        self.side_by_side = config.combine == "concat" and index == 0
        width = 2 * hidden if self.side_by_side else hidden
        self.q_proj = nn.Linear(width, config.num_heads * config.head_dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(width, config.num_kv_heads * config.head_dim, bias=config.attention_bias)
        self.v_proj = nn.Linear(width, config.num_kv_heads * config.head_dim, bias=config.attention_bias)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, hidden, bias=False)
        self.gate_proj = nn.Linear(hidden, wide, bias=False)
        self.up_proj = nn.Linear(hidden, wide, bias=False)
        self.down_proj = nn.Linear(wide, hidden, bias=False)
        self.input_norm = nn.Parameter(torch.ones(hidden))
        self.post_norm = nn.Parameter(torch.ones(hidden))
        self.embedding_norm = nn.Parameter(torch.ones(hidden)) if self.side_by_side else None
        self.q_norm = nn.Parameter(torch.ones(config.head_dim)) if config.qk_norm else None
        self.k_norm = nn.Parameter(torch.ones(config.head_dim)) if config.qk_norm else None
        self.qkv_proj: nn.Module | None = None  # see `join`
        self.gate_up_proj: nn.Module | None = None

    def forward(
        self, x: torch.Tensor, embeddings: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], attend: Attend
    ) -> torch.Tensor:
        """`x` and `embeddings` `[texts, n, hidden]` -> `[texts, n, hidden]`."""
        x, seen = self._seen(x, embeddings)
        q, k, v = self.attention_inputs(seen, rotation)
        x = x + self.o_proj(attend(self.index, q, k, v))
        seen = _norm(x, self.post_norm, self.config.rms_norm_eps)
        if self.gate_up_proj is None:
            gate, up = self.gate_proj(seen), self.up_proj(seen)
        else:
            gate, up = self.gate_up_proj(seen).chunk(2, dim=-1)
        activated = silu(gate) if self.config.activation == "silu" else gelu(gate, approximate="tanh")
        return x + self.down_proj(activated * up)

    def join(self) -> None:
        """Make one matrix of those that multiply the same vector: with few rows, a call costs as much as its arithmetic."""
        q, k, v = self.q_proj, self.k_proj, self.v_proj
        self.qkv_proj = _joined((q, k, v))
        self.gate_up_proj = _joined((self.gate_proj, self.up_proj))
        for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
            delattr(self, name)

    def keys_values(
        self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[texts, kv_heads, n, head_dim]` of `x` `[texts, n, hidden]`, of a layer that sees no embedding."""
        return self.attention_inputs(_norm(x, self.input_norm, self.config.rms_norm_eps), rotation)[1:]

    def attention_inputs(
        self, seen: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries `[texts, heads, n, head_dim]`, keys and values `[texts, kv_heads, n, head_dim]`."""
        config = self.config
        split = (*seen.shape[:2], -1, config.head_dim)
        if self.qkv_proj is None:
            q, k, v = (proj(seen).view(split).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        else:
            every = self.qkv_proj(seen).view(split).transpose(1, 2)
            if self.q_norm is None:  # queries and keys may be turned together
                turned = _rotate(every[:, : config.num_heads + config.num_kv_heads], rotation)
                q, k = turned.split((config.num_heads, config.num_kv_heads), dim=1)
                return q, k, every[:, config.num_heads + config.num_kv_heads :]
            q, k, v = every.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = _norm(q, self.q_norm, config.rms_norm_eps), _norm(k, self.k_norm, config.rms_norm_eps)
        return _rotate(q, rotation), _rotate(k, rotation), v

    def _seen(self, x: torch.Tensor, embeddings: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Start of the residual stream, and what the attention reads."""
        config = self.config
        seen = _norm(x, self.input_norm, config.rms_norm_eps)
        if self.embedding_norm is None:
            return x, seen
        start = seen if config.norm_before_residual else x
        return start, torch.cat((_norm(embeddings, self.embedding_norm, config.rms_norm_eps), seen), dim=-1)


class DraftHead(nn.Module):
    """Weights of a draft head, and its pieces of arithmetic: fuse, extend, read out, feed back."""

    id_map: torch.Tensor

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.fuse_proj = nn.Linear(len(config.target_layers) * config.target_hidden_size, hidden, bias=False)
        self.embed_proj = nn.Linear(config.target_hidden_size, hidden, bias=False) if config.combine == "add" else None
        self.back_proj = nn.Linear(hidden, hidden, bias=False) if config.project_fed_back else None
        self.layers = nn.ModuleList(HeadLayer(config, index) for index in range(config.num_layers))
        self.norm = nn.Parameter(torch.ones(hidden))
        self.output = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.register_buffer("id_map", torch.arange(config.draft_vocab_size))  # draft id -> target id
        self.rotary = LlamaRotaryEmbedding(_rope_config(config))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> DraftHead:
        """A head cast to half precision keeps exact rotary frequencies: rounded, they turn far tokens by whole radians."""
        exact = self.rotary.inv_freq
        super()._apply(fn, recurse)
        self.rotary.inv_freq = exact.to(self.rotary.inv_freq.device)
        return self

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """The target's hidden states `[..., layers, target_hidden]` as one vector per token, `[..., hidden]`."""
        features = self.normed(features).flatten(-2)
        if self.config.norm_together:
            features = rms_norm(features, features.shape[-1:], eps=self.config.rms_norm_eps)
        return self.fuse_proj(features)  # type: ignore[no-any-return]

    def normed(self, features: torch.Tensor) -> torch.Tensor:
        """Each layer's hidden states `[..., layers, target_hidden]` brought to the same size, if the head does that."""
        if not self.config.norm_features:
            return features
        return rms_norm(features, features.shape[-1:], eps=self.config.rms_norm_eps)

    def extend(
        self, fused: torch.Tensor, embeddings: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Hidden states of new entries, before the last norm, `[texts, n, hidden]`.

        `fused` and `embeddings` are `[texts, n, hidden]`, `positions` int64 `[texts, n]` or `[1, n]`.
        """
        x = fused if self.embed_proj is None else fused + self.embed_proj(embeddings)
        cos, sin = self.rotary(x, positions)
        rotation = (cos[:, None], sin[:, None])
        for layer in self.layers:
            x = layer(x, embeddings, rotation, attend)
        return x

    def feed_back(self, hidden: torch.Tensor) -> torch.Tensor:
        """What stands in for `fused` of tokens drafted from entries, given these entries' hidden states from `extend`."""
        hidden = self.last_norm(hidden) if self.config.norm_fed_back else hidden
        return hidden if self.back_proj is None else self.back_proj(hidden)

    def last_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the output rows multiply; comparable with the target's own when they share those rows."""
        return _norm(hidden, self.norm, self.config.rms_norm_eps)

    def read_out(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits over the draft vocabulary, `[..., draft_vocab]`, of hidden states as `extend` returns them."""
        return self.output(self.last_norm(hidden))  # type: ignore[no-any-return]


def _joined(parts: Sequence[nn.Linear]) -> nn.Linear:
    """One layer whose output is that of all parts side by side."""
    weight = torch.cat([part.weight for part in parts])
    joined = nn.Linear(weight.shape[1], weight.shape[0], bias=parts[0].bias is not None)
    joined.weight = nn.Parameter(weight, requires_grad=False)
    if joined.bias is not None:
        joined.bias = nn.Parameter(torch.cat([part.bias for part in parts]), requires_grad=False)
    return joined


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def _rotate(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotary position embedding, halves apart (as Llama has it), on `[texts, heads, n, head_dim]`."""
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def _rope_config(config: HeadConfig) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=config.num_heads * config.head_dim,
        num_attention_heads=config.num_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_positions,
        rope_parameters=dict(config.rope),
    )
