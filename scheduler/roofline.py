"""What forwards should cost on accelerators that are not here, from bandwidth and arithmetic alone.

    python -m scheduler.roofline        # writes scheduler/profiles/*.json anew

A forward of n rows takes the longer of two times, reading every weight once or two operations per weight and row; then reading
the keys and values of the context; and a few microseconds per layer for starting its kernels from a captured graph: ::

    max(bytes of weights / bandwidth, 2 * weights * n / operations) + context * bytes of a token / bandwidth + layers * start

These are assumptions, not measurements: what is reached of the peaks is a guess that is written into each profile, attention's
own arithmetic, the sampler and the host are left out. A measured profile (`graftserve calibrate`) replaces them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from scheduler.cost import CostProfile, LatencyModel, Origin
from scheduler.profiles import PROFILES

_ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
_MEMORY_REACHED = 0.75
_ARITHMETIC_REACHED = 0.55
_START_US = 10.0  # per layer


@dataclass(frozen=True, slots=True)
class Accelerator:
    """Peaks of one device."""

    name: str
    gigabytes: int
    bandwidth: float  # bytes per second
    operations: float  # per second, dense, 16-bit; twice as many in 8 bit


@dataclass(frozen=True, slots=True)
class Size:
    """A dense decoder."""

    name: str
    weights: float
    layers: int
    kv_width: int  # entries of keys and values per layer and token, together
    weight_bytes: int = 2
    kv_bytes: int = 2

    @property
    def gigabytes(self) -> float:
        """Of its weights."""
        return self.weights * self.weight_bytes / 1e9


GPU_80 = Accelerator("80 GB data-center GPU, 3.35 TB/s, 989 TFLOP/s dense at 16 bit", 80, 3.35e12, 989e12)
GPU_141 = Accelerator("141 GB data-center GPU, 4.8 TB/s, 989 TFLOP/s dense at 16 bit", 141, 4.8e12, 989e12)

SMALL = Size("0.5B", 0.49e9, 24, 2 * 2 * 64)
MEDIUM = Size("1.7B", 1.72e9, 28, 2 * 8 * 128)
TRIOS: dict[str, tuple[Size, Size, Size]] = {
    "8b": (Size("8B", 8.0e9, 32, 2 * 8 * 128), SMALL, MEDIUM),
    "32b": (Size("32B", 32.8e9, 64, 2 * 8 * 128), SMALL, MEDIUM),
    # At 16 bit it would fit neither device beside its cache; at 8 bit the smaller one has 5 GB left.
    "70b": (
        Size("70B", 70.6e9, 80, 2 * 8 * 128, weight_bytes=1),
        replace(SMALL, weight_bytes=1),
        Size("3B", 3.2e9, 28, 2 * 8 * 128, weight_bytes=1),
    ),
}
"""Target, small and medium drafter by the end of the profile's name."""


def latency(size: Size, device: Accelerator) -> LatencyModel:
    """Milliseconds of a forward of `size` on `device`."""
    bandwidth = device.bandwidth * _MEMORY_REACHED
    operations = device.operations * _ARITHMETIC_REACHED * (2 if size.weight_bytes == 1 else 1)
    memory = size.weights * size.weight_bytes / bandwidth
    start = size.layers * _START_US * 1e-6
    knots = tuple(round(1e3 * (max(memory, 2 * size.weights * n / operations) + start), 5) for n in _ROWS)
    per_token = 1e3 * size.layers * size.kv_width * size.kv_bytes / bandwidth
    return LatencyModel(_ROWS, knots, context_ms=per_token)


def profile(device: Accelerator, target: Size, small: Size, medium: Size) -> CostProfile:
    """The three models together on one device."""
    models = {"target": latency(target, device), "small": latency(small, device), "medium": latency(medium, device)}
    assumed = (
        f"{device.name}; computed from rooflines, not measured: {_MEMORY_REACHED:.0%} of the bandwidth and "
        f"{_ARITHMETIC_REACHED:.0%} of the arithmetic reached, {_START_US:g} us per layer, batch 1"
    )
    names = f"target {target.name}, small {small.name}, medium {medium.name}, dense decoders"
    weights = f"{8 * target.weight_bytes} bit, keys and values 16 bit"
    return CostProfile(models, Origin(assumed, names, weights, "-", "computed"))


def profiles() -> dict[str, CostProfile]:
    """Every profile by name."""
    found = {}
    for device in (GPU_80, GPU_141):
        for name, trio in TRIOS.items():
            assert sum(size.gigabytes for size in trio) < 0.95 * device.gigabytes, f"{name} does not fit {device.name}"
            found[f"gpu{device.gigabytes}-{name}"] = profile(device, *trio)
    return found


if __name__ == "__main__":
    for name, made in profiles().items():
        (PROFILES / f"{name}.json").write_text(made.to_json(), "utf-8")
