"""Attention of unrolled drafting steps, as training needs it: every position of a text starts a chain of its own.

In step 0 entry t sees the entries up to t, as in any decoder. In step s the chain that began at t appends its s-th drafted
entry: it sees the *true* entries up to t and its own drafted ones, which is what a head sees when it drafts (training-time
test, 2503.01840 section 3). All chains of a text share the true entries' keys, so a step costs one masked product with those,
and one inner product per drafted entry.
"""

from __future__ import annotations

import torch


class ChainAttention:
    """The attention of one head over one batch of texts; call `begin_step` before each unrolled step."""

    def __init__(self, num_layers: int) -> None:
        self._true: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * num_layers
        self._drafted: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(num_layers)]
        self._starts: torch.Tensor | None = None

    def begin_step(self, starts: torch.Tensor | None) -> None:
        """`starts` int64 `[texts, n]`: where the chains began, the same at every drafted step; None: step 0."""
        self._starts = starts

    def look_at(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take `[texts, kv_heads, length, dim]` as a layer's true entries, instead of a step 0."""
        self._true[layer] = (keys, values)

    def keep(self, chosen: torch.Tensor) -> torch.Tensor:
        """Go on with the `chosen` chains only, int64 `[texts, k]`; returns where they began."""
        assert self._starts is not None, "no chains yet"

        def pick(x: torch.Tensor) -> torch.Tensor:
            index = chosen[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
            return x.gather(2, index)

        self._drafted = [[(pick(key), pick(value)) for key, value in layer] for layer in self._drafted]
        self._starts = self._starts.gather(1, chosen)
        return self._starts

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Queries `[texts, heads, n, dim]`, keys and values `[texts, kv_heads, n, dim]` to `[texts, n, heads * dim]`."""
        texts, heads, count, dim = q.shape
        share = heads // k.shape[1]
        if self._starts is None:
            self._true[layer] = (k, v)
            output = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=share > 1)
            return output.transpose(1, 2).reshape(texts, count, heads * dim)
        true = self._true[layer]
        assert true is not None, "step 0 comes first"
        self._drafted[layer].append((k, v))
        keys, values = (t.repeat_interleave(share, dim=1) if share > 1 else t for t in true)
        drafted = [
            tuple(t.repeat_interleave(share, dim=1) if share > 1 else t for t in pair) for pair in self._drafted[layer]
        ]
        later = torch.arange(keys.shape[2], device=q.device) > self._starts[:, None, :, None]
        q = q * dim**-0.5
        scores = (q @ keys.transpose(-1, -2)).float().masked_fill(later, float("-inf"))
        own = torch.stack([(q * key).sum(-1, dtype=torch.float32) for key, _ in drafted], dim=-1)
        weights = torch.cat((scores, own), dim=-1).softmax(dim=-1).to(v.dtype)
        output = weights[..., : keys.shape[2]] @ values
        for index, (_, value) in enumerate(drafted):
            output = output + weights[..., keys.shape[2] + index, None] * value
        return output.transpose(1, 2).reshape(texts, count, heads * dim)
