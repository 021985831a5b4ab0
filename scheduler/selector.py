"""The neural selector of delayed trees: which (K, L1, L2) to draw next, decided before the step from what is known at its root.

Source: NDE (2602.16994). Actions are K in 1..4 paths of L2 in 0..8 tokens behind a trunk of L1 in 0..8; of these 324 only 233
shapes are distinct, and only those are kept. A small network maps features to one logit per shape, the largest is taken. It is
trained (:mod:`scheduler.selector_fit`) for one verification rule, and for one machine through the time model ::

    T(K, L1, L2) = sum_{j < L1} t_q(l + j, 1 row) + sum_{j < L2} t_q(l + L1 + j K, K rows) + t_p(l, 1 + L1 + K L2 rows)

with prices of a cost profile at context l. The source interpolates t_q and t_p over the length alone, and puts the tree into
it; rows are ours, since a tree's rows and a context's tokens do not cost the same.

Features: entropies of the target and the drafter at the token before the root and of the drafter at the root (the target's own
at the root would need its pass), both divergences and the distance of the first two, context, temperature, top-p, and both
prices at that context. Hidden states of either model may be added (`hidden`), each through its own projection, as there.

    selector = Selector.load(path)
    shape = selector.select(scalars(p_before, q_before, q_root, ...), budget=16)       # a tree.policies.sampled.Delayed
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from scheduler.cost import CostProfile
from tree.policies.sampled import Delayed

FORMAT = "graftserve-selector-1"
MOST_PATHS, LONGEST = 4, 8

SHAPES: tuple[Delayed, ...] = tuple(
    dict.fromkeys(
        Delayed(k, trunk, branch).canonical()
        for k, trunk, branch in product(range(1, MOST_PATHS + 1), range(LONGEST + 1), range(LONGEST + 1))
    )
)
"""Every distinct shape. The first one drafts nothing: plain decoding is an action like any other."""

SCALARS: tuple[str, ...] = (
    "target_entropy",  # at the token before the root, nats
    "draft_entropy",  # there
    "root_entropy",  # the drafter's at the root
    "kl_target_draft",
    "kl_draft_target",
    "distance",  # L1
    "log_context",
    "temperature",
    "top_p",
    "log_draft_ms",  # price of a one-row call at this context
    "log_target_ms",
)

_LEAST = 1e-9  # a probability below counts as this in a divergence
_PROJECTED = 128
_WIDTHS = (512, 32)

Floats = NDArray[np.float64]


def scalars(
    p_before: Tensor,
    q_before: Tensor,
    q_root: Tensor,
    *,
    context: int,
    temperature: float,
    top_p: float,
    draft_ms: float,
    target_ms: float,
) -> tuple[float, ...]:
    """The scalar features, in the order of `SCALARS`, all finite. Rows are distributions `[vocab]` of equal length."""
    p, q, r = (row.double().clamp(min=0.0) for row in (p_before, q_before, q_root))
    log_p, log_q = p.clamp(min=_LEAST).log(), q.clamp(min=_LEAST).log()
    values = torch.stack(
        [
            torch.special.entr(p).sum(),
            torch.special.entr(q).sum(),
            torch.special.entr(r).sum(),
            (p * (log_p - log_q)).sum().clamp(min=0.0),
            (q * (log_q - log_p)).sum().clamp(min=0.0),
            (p - q).abs().sum(),
        ]
    )
    rest = (math.log1p(context), temperature, top_p, math.log(draft_ms), math.log(target_ms))
    return (*values.tolist(), *rest)


def step_ms(shape: Delayed, profile: CostProfile, drafter: str, context: int) -> float:
    """T: milliseconds of a step that draws `shape` at a context of so many tokens; a drafter without a price costs nothing."""
    k, trunk, branch = shape.num_paths, shape.trunk, shape.branch
    drafting = 0.0
    if drafter in profile.models:
        price = profile.models[drafter]
        drafting = sum(price.ms(1, context=context + j) for j in range(trunk))
        drafting += sum(price.ms(k if j else 1, context=context + trunk + j * k) for j in range(branch))
    return drafting + profile.ms("target", 1 + trunk + k * branch, context=context)


def all_ms(profile: CostProfile, drafter: str, context: int) -> Floats:
    """`[shapes]`: T of every shape."""
    return np.array([step_ms(shape, profile, drafter, context) for shape in SHAPES])


@dataclass(frozen=True, slots=True)
class SelectorConfig:
    """What a selector is built of."""

    verifier: str  # the rule it was trained for
    hidden: tuple[int, ...] = ()  # sizes of the hidden states among its features
    inputs: tuple[str, ...] = SCALARS  # scalar features that it looks at
    dropout: float = 0.1

    def __post_init__(self) -> None:
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
        unknown = [name for name in self.inputs if name not in SCALARS]
        if unknown:
            raise ValueError(f"inputs: {unknown[0]!r} is not one of {', '.join(SCALARS)}")
        if any(size < 1 for size in self.hidden):
            raise ValueError(f"hidden must be sizes of at least 1, got {self.hidden}")


class Selector(nn.Module):
    """Features to logits over `SHAPES`. Standardizes scalars by what it saw in training."""

    def __init__(self, config: SelectorConfig) -> None:
        super().__init__()
        self.config = config
        self.projections = nn.ModuleList(
            nn.Sequential(nn.Linear(size, _PROJECTED), nn.LayerNorm(_PROJECTED)) for size in config.hidden
        )
        sizes = (len(SCALARS) + _PROJECTED * len(config.hidden), *_WIDTHS)
        layers: list[nn.Module] = []
        for before, after in zip(sizes, sizes[1:], strict=False):
            layers += [nn.Linear(before, after), nn.GELU(), nn.Dropout(config.dropout)]
        output = nn.Linear(sizes[-1], len(SHAPES))
        for parameter in output.parameters():  # no shape begins ahead of others by chance
            nn.init.zeros_(parameter)
        self.body = nn.Sequential(*layers, output)
        self.center = nn.Buffer(torch.zeros(len(SCALARS)))
        self.scale = nn.Buffer(torch.ones(len(SCALARS)))
        self._inputs = torch.tensor([float(name in config.inputs) for name in SCALARS])
        self._nodes = torch.tensor([shape.budget for shape in SHAPES])

    def forward(self, features: Tensor, hidden: Sequence[Tensor] = ()) -> Tensor:
        """`[rows, shapes]` logits for scalars `[rows, scalars]` and one `[rows, size]` per hidden state of the config."""
        assert len(hidden) == len(self.projections), f"{len(hidden)} hidden states, expected {len(self.projections)}"
        parts = [(features - self.center) / self.scale * self._inputs]
        parts += [project(state.float()) for project, state in zip(self.projections, hidden, strict=True)]
        logits: Tensor = self.body(torch.cat(parts, dim=-1))
        return logits

    @torch.inference_mode()
    def select(self, features: Sequence[float], hidden: Sequence[Tensor] = (), *, budget: int | None = None) -> Delayed:
        """The shape to draw, of at most `budget` nodes, root included. Hidden states are `[size]`. Puts dropout off."""
        self.eval()
        row = torch.tensor([tuple(features)], dtype=torch.float32)
        logits = self(row, [state[None] for state in hidden])[0]
        if budget is not None:
            if budget < 1:
                raise ValueError(f"budget must be at least 1 (the root), got {budget}")
            logits = logits.masked_fill(self._nodes > budget, -torch.inf)
        return SHAPES[int(logits.argmax())]

    def save(self, path: Path) -> None:
        """Write weights and config as one safetensors file."""
        metadata = {"format": FORMAT, "config": json.dumps(asdict(self.config)), "scalars": json.dumps(SCALARS)}
        save_file({name: value.contiguous() for name, value in self.state_dict().items()}, path, metadata)

    @classmethod
    def load(cls, path: Path) -> Self:
        """The selector of a file. ValueError for one that holds none, or one with other features; OSError."""
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                weights = {name: file.get_tensor(name) for name in file.keys()}
        except FileNotFoundError:
            raise
        except Exception as error:  # the library's own error class is not public
            raise ValueError(f"{path}: not a safetensors file: {error}") from error
        if metadata.get("format") != FORMAT:
            raise ValueError(f"{path}: not a selector, its format is {metadata.get('format')!r}")
        if tuple(json.loads(metadata["scalars"])) != SCALARS:
            raise ValueError(f"{path}: it has other features than this version; train it again")
        config = json.loads(metadata["config"])
        inputs = tuple(config.get("inputs", SCALARS))
        selector = cls(SelectorConfig(config["verifier"], tuple(config["hidden"]), inputs, float(config["dropout"])))
        try:
            selector.load_state_dict(weights)
        except RuntimeError as error:
            raise ValueError(f"{path}: weights do not fit the config: {error}") from error
        return selector.eval()
