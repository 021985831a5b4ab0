"""What makes an eager CPU forward fast: linear layers packed once at load, RMS norms in one call, a joined gate and up.

The layers keep their place in the model; only the modules are swapped, so transformers' own modelling code still runs.
Packing in half precision keeps activations in float32: a row's result does not depend on how many rows go with it, which
a served answer that must not depend on its neighbors needs. (Dynamic int8 scales activations per call and would break this.)
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import rms_norm


class HalfLinear(nn.Module):
    """A linear layer with weights packed as float16 (FBGEMM) and float32 activations, `[..., in] -> [..., out]`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), None if bias is None else bias.float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output, float32."""
        return torch.ops.quantized.linear_dynamic_fp16(x, self._packed)


class GatedMLP(nn.Module):
    """`down(act(gate(x)) * up(x))` with gate and up packed as one matrix."""

    def __init__(self, joined: HalfLinear, down: HalfLinear, act: nn.Module) -> None:
        super().__init__()
        self.joined, self.down, self.act = joined, down, act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., hidden] -> [..., hidden]`."""
        gate, up = self.joined(x).chunk(2, dim=-1)
        return self.down(self.act(gate) * up)


class FusedRMSNorm(nn.Module):
    """RMS norm in one call, for norms that multiply by `weight` after normalizing in float32."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., hidden] -> [..., hidden]`."""
        return rms_norm(x, self.weight.shape, self.weight, self.eps)


def fp16_packing_available() -> bool:
    """Whether this build of torch has the FBGEMM half-precision kernels (x86 CPUs)."""
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return False
    try:
        HalfLinear(torch.zeros(8, 8), None)(torch.zeros(1, 8))
    except RuntimeError:  # built, but this processor lacks the instructions
        return False
    return True


def fuse_norms(model: nn.Module) -> int:
    """Swap RMS norms for one-call ones where the result is the same to rounding; returns how many were swapped."""
    return _swap(model, _fused_norm)


def pack_linears(model: nn.Module) -> int:
    """Swap every linear layer (and gated MLPs as a whole) for float16-packed ones; returns how many modules were swapped."""
    return _swap(model, _packed_mlp) + _swap(model, _packed_linear)


def _swap(model: nn.Module, make: object) -> int:
    """Replace each child module for which `make(child)` gives a replacement. One module in two places stays one."""
    made: dict[int, nn.Module] = {}
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if id(child) not in made:
                replacement = make(child)  # type: ignore[operator]
                if replacement is None:
                    continue
                made[id(child)] = replacement.eval()
                count += 1
            setattr(parent, name, made[id(child)])
    return count


def _packed_linear(module: nn.Module) -> nn.Module | None:
    return HalfLinear(module.weight, module.bias) if type(module) is nn.Linear else None


def _packed_mlp(module: nn.Module) -> nn.Module | None:
    parts = dict(module.named_children())
    if set(parts) != {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return None
    gate, up, down = parts["gate_proj"], parts["up_proj"], parts["down_proj"]
    if any(type(part) is not nn.Linear or part.bias is not None for part in (gate, up, down)):
        return None
    joined = HalfLinear(torch.cat((gate.weight, up.weight)), None)
    packed = GatedMLP(joined, HalfLinear(down.weight, None), parts["act_fn"])
    return packed if _same(module, packed, gate.in_features, tolerance=2e-2) else None


def _fused_norm(module: nn.Module) -> nn.Module | None:
    """A fused twin of an RMS norm of any family: the scale is `weight` or `1 + weight`, whichever the module uses."""
    if not type(module).__name__.endswith("RMSNorm") or isinstance(module, FusedRMSNorm):
        return None
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    if eps is None or weight is None or weight.dim() != 1:
        return None
    for scale in (weight.detach(), 1.0 + weight.detach().float()):
        fused = FusedRMSNorm(scale.to(weight.dtype), float(eps))
        if _same(module, fused, weight.numel(), tolerance=1e-5):
            return fused
    return None


def _same(old: nn.Module, new: nn.Module, size: int, *, tolerance: float) -> bool:
    """Whether two modules give the same rows on a fixed probe, relative to the size of the old one's output."""
    probe = torch.randn(2, 3, size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        want, got = old(probe), new(probe)
    return bool((want - got).abs().max() <= tolerance * want.abs().max().clamp(min=1e-6))
