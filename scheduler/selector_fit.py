"""Training the selector of delayed trees (2602.16994), and saying what it is worth on prompts that it has not seen.

For a sample with expected tokens E[a] and milliseconds T[a] of every shape a, a selector pi has the throughput ::

    TPS = sum_a pi(a) E[a] / sum_a pi(a) T[a]            a ratio of expectations, not an expectation of ratios

and the loss is the mean of -log(TPS / base) plus a tail penalty, `penalty` times the mean of max(1 - TPS / base, 0)^2 over the
worst `tail` of the batch: what is lost against the base where most is lost. The base is the best single shape for the sample's
temperature and top-p, so a selector that learned nothing is about as good as a well-chosen constant.

The source names neither optimizer nor the weights of the penalty; ours are AdamW, penalty 1, tail 0.1. Ours is also a bonus
for the entropy of pi that fades to zero over training: without it pi is soon sure of what is good on average, and a shape to
which it gives no probability any more is never learned, however good it is somewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scheduler.selector import SCALARS, SHAPES, Floats, Selector, SelectorConfig
from scheduler.value import folds

_TEMPERATURE, _TOP_P = SCALARS.index("temperature"), SCALARS.index("top_p")


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Roots with the value and the price of every shape."""

    groups: NDArray[np.intp]  # [n]: the prompt of each
    features: Floats  # [n, scalars]
    tokens: Floats  # [n, shapes]: expected per step, the target's own one included
    ms: Floats  # [n, shapes]

    def __post_init__(self) -> None:
        count = len(self.groups)
        wanted = ((count, len(SCALARS)), (count, len(SHAPES)), (count, len(SHAPES)))
        found = (self.features.shape, self.tokens.shape, self.ms.shape)
        if found != wanted or not count:
            raise ValueError(f"features, tokens and ms must be {wanted} and not empty, got {found}")
        if not (np.isfinite(self.features).all() and (self.tokens >= 1).all() and (self.ms > 0).all()):
            raise ValueError("features must be finite, tokens at least 1, ms positive")

    def take(self, chosen: NDArray[np.bool_]) -> Self:
        """The samples where `chosen` `[n]` is True."""
        return type(self)(self.groups[chosen], self.features[chosen], self.tokens[chosen], self.ms[chosen])

    @property
    def settings(self) -> list[tuple[float, float]]:
        """Temperature and top-p of each sample."""
        return [(float(row[_TEMPERATURE]), float(row[_TOP_P])) for row in self.features]


@dataclass(frozen=True, slots=True)
class SelectorFit:
    """How a selector is trained."""

    epochs: int = 100
    batch: int = 64
    learning_rate: float = 2e-3
    weight_decay: float = 0.01
    penalty: float = 1.0  # lambda
    tail: float = 0.1  # alpha
    entropy: float = 0.1  # weight of the bonus at the beginning
    dropout: float = 0.1
    held_out: int = 5  # one prompt in so many is not trained on
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("epochs", 1), ("batch", 1), ("held_out", 2)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not 0.0 < self.tail <= 1.0:
            raise ValueError(f"tail must be in (0, 1], got {self.tail}")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be positive, got {self.learning_rate}")
        for name in ("weight_decay", "penalty", "entropy"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")


def throughput(logits: Tensor, tokens: Tensor, ms: Tensor) -> Tensor:
    """`[rows]` TPS of softmax(logits): all arguments are `[rows, shapes]`."""
    chance = torch.softmax(logits, dim=-1)
    return (chance * tokens).sum(dim=-1) / (chance * ms).sum(dim=-1)


def tail_penalty(speedup: Tensor, tail: float) -> Tensor:
    """Mean of max(1 - speedup, 0)^2 over the worst share `tail` of `speedup` `[rows]`, at least one of them."""
    lost = (1.0 - speedup).clamp(min=0.0) ** 2
    return lost.topk(max(round(tail * len(lost)), 1)).values.mean()


def loss(logits: Tensor, tokens: Tensor, ms: Tensor, base: Tensor, options: SelectorFit) -> Tensor:
    """What training minimizes; `base` `[rows]` is the throughput to beat."""
    speedup = throughput(logits, tokens, ms) / base
    return -speedup.log().mean() + options.penalty * tail_penalty(speedup, options.tail)


def static_shapes(samples: Samples) -> dict[tuple[float, float], int]:
    """Number of the best single shape, by temperature and top-p: the cheap fallback, and the base."""
    best = {}
    settings = samples.settings
    for setting in dict.fromkeys(settings):
        here = np.array([own == setting for own in settings])
        best[setting] = int(np.argmax(samples.tokens[here].sum(axis=0) / samples.ms[here].sum(axis=0)))
    return best


def fit_selector(
    samples: Samples, verifier: str, options: SelectorFit | None = None, *, inputs: Sequence[str] = SCALARS
) -> tuple[Selector, Mapping[str, Any]]:
    """The selector, which looks at `inputs` only, and a report. With one prompt nothing is held out, and the report says so."""
    options = options or SelectorFit()
    parts = folds(samples.groups, options.held_out)
    held = parts[0] if len(parts) > 1 else np.zeros(len(samples.groups), dtype=np.bool_)
    known = samples.take(~held)
    static = static_shapes(known)
    overall = int(np.argmax(known.tokens.sum(axis=0) / known.ms.sum(axis=0)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        selector = Selector(SelectorConfig(verifier, inputs=tuple(inputs), dropout=options.dropout))
        _train(selector, known, static, options)
    report = {
        "shapes": len(SHAPES),
        "inputs": list(inputs),
        "prompts": len(np.unique(samples.groups)),
        "trained": _judged(selector, known, static, overall),
        "held_out": _judged(selector, samples.take(held), static, overall) if held.any() else None,
    }
    return selector, report


def _train(selector: Selector, samples: Samples, static: Mapping[tuple[float, float], int], options: SelectorFit) -> None:
    features = torch.tensor(samples.features, dtype=torch.float32)
    tokens, ms = (torch.tensor(part, dtype=torch.float32) for part in (samples.tokens, samples.ms))
    chosen = torch.tensor([static[setting] for setting in samples.settings])[:, None]
    base = (tokens.gather(1, chosen) / ms.gather(1, chosen))[:, 0]
    selector.center.copy_(features.mean(dim=0))
    spread = features.std(dim=0, correction=0)
    selector.scale.copy_(torch.where(spread > 1e-6, spread, 1.0))  # a setting that never changes
    optimizer = torch.optim.AdamW(selector.parameters(), lr=options.learning_rate, weight_decay=options.weight_decay)
    selector.train()
    for epoch in range(options.epochs):
        bonus = options.entropy * max(1.0 - epoch / (0.75 * options.epochs), 0.0)
        order = torch.randperm(len(features))
        for start in range(0, len(order), options.batch):
            rows = order[start : start + options.batch]
            logits = selector(features[rows])
            value = loss(logits, tokens[rows], ms[rows], base[rows], options)
            value = value - bonus * torch.special.entr(torch.softmax(logits, dim=-1)).sum(dim=-1).mean()
            optimizer.zero_grad()
            torch.autograd.backward(value)
            optimizer.step()
    selector.eval()


@torch.inference_mode()
def _judged(
    selector: Selector, samples: Samples, static: Mapping[tuple[float, float], int], overall: int
) -> dict[str, float]:
    """Tokens per millisecond of what the selector picks, of the best single shapes, and of an oracle."""
    each = np.arange(len(samples.groups))
    picked = selector(torch.tensor(samples.features, dtype=torch.float32)).argmax(dim=-1).numpy()
    fixed = np.array([static.get(setting, overall) for setting in samples.settings])
    return {
        "roots": float(len(each)),
        "selector": float(samples.tokens[each, picked].sum() / samples.ms[each, picked].sum()),
        "static": float(samples.tokens[each, fixed].sum() / samples.ms[each, fixed].sum()),
        "oracle": oracle_rate(samples),
        "shapes_used": float(len(np.unique(picked))),
    }


def oracle_rate(samples: Samples) -> float:
    """The largest tokens per millisecond over all choices of a shape per sample (Dinkelbach)."""
    each, rate = np.arange(len(samples.groups)), 0.0
    for _ in range(50):
        best = np.argmax(samples.tokens - rate * samples.ms, axis=1)
        found = float(samples.tokens[each, best].sum() / samples.ms[each, best].sum())
        if found <= rate * (1 + 1e-12):
            break
        rate = found
    return rate
