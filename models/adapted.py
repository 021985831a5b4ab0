"""Low-rank differences to borrowed weights (LoRA, 2106.09685): what a head made of its target's layers trains and stores.

`Adapted` stands in for a linear layer while it is trained; `merge` makes plain layers of them again.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import linear


class Adapted(nn.Module):
    """`(weight + up @ down) @ x + bias`, `[..., in] -> [..., out]`; `weight` and `bias` are frozen and no part of the state."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, layer: nn.Linear, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        size_out, size_in = layer.weight.shape
        self.register_buffer("weight", layer.weight.detach(), persistent=False)
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach(), persistent=False)
        self.down = nn.Parameter(torch.randn(rank, size_in, generator=generator) * size_in**-0.5)
        self.up = nn.Parameter(torch.zeros(size_out, rank))  # nothing is changed at the beginning

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output."""
        return linear(x, self.weight, self.bias) + linear(linear(x, self.down), self.up)

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """A plain layer that computes the same, up to rounding."""
        plain = nn.Linear(self.weight.shape[1], self.weight.shape[0], bias=self.bias is not None)
        if self.bias is not None:
            plain.bias = nn.Parameter(self.bias, requires_grad=False)
        plain.weight = nn.Parameter(self.weight + self.up @ self.down, requires_grad=False)
        return plain


def adapt(module: nn.Module, rank: int, *, seed: int = 0) -> None:
    """Freeze every linear layer below `module` and give it a difference of `rank`, or less where it is smaller."""
    generator = torch.Generator().manual_seed(seed)
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, Adapted(child, min(rank, *child.weight.shape), generator))


def merge(module: nn.Module) -> None:
    """Undo `adapt`, keeping what was learned."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Adapted):
                setattr(parent, name, child.merged())
