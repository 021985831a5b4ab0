"""What makes an eager CPU forward fast: linear layers packed once at load, RMS norms in one call, a joined gate and up.

The layers keep their place in the model; only the modules are swapped, so transformers' own modelling code still runs.
Activations stay in float32 with either kind of packing: a row's result does not depend (beyond rounding) on how many rows
go with it, which a served answer that must not depend on its neighbors needs. (Dynamic int8 scales activations per call
and would break this.)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn
from torch.nn.functional import linear, rms_norm

from models.threads import no_helpers, num_processors

_ROWS_PACKED_FOR = 8  # rows the float32 layout is chosen for; other counts work, and gain nearly as much


class HalfLinear(nn.Module):
    """A linear layer with weights packed as float16 (FBGEMM) and float32 activations, `[..., in] -> [..., out]`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), None if bias is None else bias.float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output, float32."""
        return torch.ops.quantized.linear_dynamic_fp16(x, self._packed)


class PackedLinear(nn.Module):
    """A linear layer with float32 weights in the layout that oneDNN multiplies fastest, `[..., in] -> [..., out]`.

    A plain layer is laid out anew at each call, which for a few rows costs more than the multiplication.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._bias = None if bias is None else bias.detach().float()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().float(), _ROWS_PACKED_FOR)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output, float32."""
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return output


class ByteLinear(nn.Module):
    """A linear layer with weights rounded to eight bits, one scale per output, `[..., in] -> [..., out]` in float32.

    For drafters only. Inputs are rounded too, with one scale for all rows of a call, so a row's result depends a little on its
    neighbors: that may change what is guessed, never what is served. With few rows two to three times as fast as halves.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        weight = weight.detach().float()
        scales = (weight.abs().amax(dim=1) / 127).clamp(min=1e-8).double()
        zeros = torch.zeros(len(weight), dtype=torch.int64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch means to replace quantized tensors; `byte_packing_available` will notice
            rounded = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
        self._packed = torch.ops.quantized.linear_prepack(rounded, None if bias is None else bias.detach().float())
        # Without the dot-product instructions, sums of full eight-bit products overflow their sixteen bits.
        self._has_seven_bits = not _has_dot_products()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output, float32."""
        return torch.ops.quantized.linear_dynamic(x, self._packed, self._has_seven_bits)  # type: ignore[no-any-return]


class BFloatLinear(nn.Module):
    """A linear layer multiplied in bfloat16 by oneDNN, float32 outside, `[..., in] -> [..., out]`.

    On processors with bfloat16 instructions twice as fast as the others for many rows, and too coarse for serving.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._bias = None if bias is None else bias.detach().bfloat16()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().bfloat16(), _ROWS_PACKED_FOR)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output, float32."""
        output = torch.ops.mkldnn._linear_pointwise(x.bfloat16(), self._packed, self._bias, "none", [], "")
        return output.float()  # type: ignore[no-any-return]


class GatedMLP(nn.Module):
    """`down(act(gate(x)) * up(x))` with gate and up packed as one matrix."""

    def __init__(self, joined: nn.Module, down: nn.Module, act: nn.Module) -> None:
        super().__init__()
        self.joined, self.down, self.act = joined, down, act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., hidden] -> [..., hidden]`."""
        gate, up = self.joined(x).chunk(2, dim=-1)
        return self.down(self.act(gate) * up)


PackedKind = type[HalfLinear] | type[PackedLinear] | type[ByteLinear] | type[BFloatLinear]


class FusedRMSNorm(nn.Module):
    """RMS norm in one call, for norms that multiply by `weight` after normalizing in float32."""

    weight: torch.Tensor

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., hidden] -> [..., hidden]`."""
        return rms_norm(x, self.weight.shape, self.weight, self.eps)


@no_helpers()
def fp16_packing_available() -> bool:
    """Whether this build of torch has the FBGEMM half-precision kernels (x86 CPUs)."""
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return False
    try:
        HalfLinear(torch.zeros(8, 8), None)(torch.zeros(1, 8))
    except RuntimeError:  # built, but this processor lacks the instructions
        return False
    return True


@no_helpers()
def byte_packing_available() -> bool:
    """Whether this build of torch has the FBGEMM eight-bit kernels, and they are right."""
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return False
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(24, 16, generator=generator), torch.randn(3, 16, generator=generator)
    try:
        with torch.inference_mode():
            off = (ByteLinear(weight, None)(x) - linear(x, weight)).norm() / linear(x, weight).norm()
    except (RuntimeError, AttributeError, TypeError, NotImplementedError):  # gone, or of another shape, in other builds
        return False
    return bool(off < 0.05)


def _has_dot_products() -> bool:
    """Whether the processor multiplies bytes without overflow (VNNI)."""
    known = getattr(torch.cpu, "_is_avx512_vnni_supported", None) or getattr(torch.cpu, "_is_vnni_supported", None)
    return bool(known and known())


@no_helpers()
def fp32_packing_available() -> bool:
    """Whether this build of torch packs float32 layers through oneDNN, and packs them right."""
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(24, 16, generator=generator), torch.randn(3, 16, generator=generator)
    try:
        with torch.inference_mode():
            return bool((PackedLinear(weight, None)(x) - linear(x, weight)).abs().max() <= 1e-4)
    except (RuntimeError, AttributeError, TypeError):  # private operations: absent, or of another shape, in other builds
        return False


def fuse_norms(model: nn.Module) -> int:
    """Swap RMS norms for one-call ones where the result is the same to rounding; returns how many were swapped."""
    return _swap(model, _fused_norm)


def pack_linears(model: nn.Module, kind: PackedKind = HalfLinear) -> int:
    """Swap every linear layer (and gated MLPs as a whole) for packed ones; returns how many modules were swapped.

    The rounding of a half has about three digits, that of a single seven: how far a packed MLP may be off its original.
    """
    tolerance = {HalfLinear: 2e-2, PackedLinear: 1e-4, ByteLinear: 1e-1, BFloatLinear: 5e-2}[kind]

    def packed_mlp(module: nn.Module) -> nn.Module | None:
        return _packed_mlp(module, kind, tolerance)

    def packed_linear(module: nn.Module) -> nn.Module | None:
        return kind(module.weight, module.bias) if type(module) is nn.Linear else None

    return _swap(model, packed_mlp) + _swap(model, packed_linear)


def _swap(model: nn.Module, make: Callable[[nn.Module], nn.Module | None]) -> int:
    """Replace each child module for which `make(child)` gives a replacement. One module in two places stays one.

    Packing is single-threaded work outside of Python, so two threads nearly halve the time that a start waits for it.
    """
    children = {id(child): child for parent in model.modules() for child in parent._modules.values() if child is not None}
    with ThreadPoolExecutor(max_workers=num_processors()) as threads:
        made = dict(zip(children, threads.map(make, children.values()), strict=True))
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            replacement = made.get(id(child))
            if replacement is not None:
                setattr(parent, name, replacement.eval())
    return sum(replacement is not None for replacement in made.values())


def _packed_mlp(module: nn.Module, kind: PackedKind, tolerance: float) -> nn.Module | None:
    parts = dict(module.named_children())
    if set(parts) != {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return None
    gate, up, down = parts["gate_proj"], parts["up_proj"], parts["down_proj"]
    if any(type(part) is not nn.Linear or part.bias is not None for part in (gate, up, down)):
        return None
    joined = kind(torch.cat((gate.weight, up.weight)), None)  # type: ignore[arg-type]
    packed = GatedMLP(joined, kind(down.weight, None), parts["act_fn"])  # type: ignore[arg-type]
    return packed if _same(module, packed, int(gate.in_features), tolerance=tolerance) else None  # type: ignore[arg-type]


def _fused_norm(module: nn.Module) -> nn.Module | None:
    """A fused twin of an RMS norm of any family: the scale is `weight` or `1 + weight`, whichever the module uses."""
    if not type(module).__name__.endswith("RMSNorm") or isinstance(module, FusedRMSNorm):
        return None
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    # Half-precision norms round twice, the fused one once; torch has no fused call for mixed types either.
    if eps is None or weight is None or weight.dim() != 1 or weight.dtype != torch.float32:
        return None
    for scale in (weight.detach(), 1.0 + weight.detach()):
        fused = FusedRMSNorm(scale, float(eps))
        if _same(module, fused, weight.numel(), tolerance=1e-5):
            return fused
    return None


def _same(old: nn.Module, new: nn.Module, size: int, *, tolerance: float) -> bool:
    """Whether two modules give the same rows on a fixed probe, relative to the size of the old one's output."""
    probe = torch.randn(2, 3, size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        want, got = old(probe), new(probe)
    return bool((want - got).abs().max() <= tolerance * want.abs().max().clamp(min=1e-6))
