"""The curves of a training run: agreement by depth over tokens and over minutes, divergence over tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.plots import Curve, Panel


def training_panels(log: Sequence[dict[str, Any]]) -> list[Panel]:
    """Three charts; `log` is what `distill.train.read_log` returns, with at least one line."""
    millions = [line["tokens"] / 1e6 for line in log]
    minutes = [line["seconds"] / 60 for line in log]
    agreement, divergence = (_by_depth(log, key) for key in ("agreement", "divergence"))
    return [
        _panel("agreement with the target's first choice", "million tokens", millions, agreement),
        _panel("agreement with the target's first choice", "minutes", minutes, agreement),
        _panel("KL divergence, nats", "million tokens", millions, divergence),
    ]


def _by_depth(log: Sequence[dict[str, Any]], key: str) -> list[list[float]]:
    return [[line[key][depth] for line in log] for depth in range(len(log[0][key]))]


def _panel(title: str, unit: str, xs: Sequence[float], by_depth: Sequence[Sequence[float]]) -> Panel:
    curves = [Curve(f"depth {number + 1}", xs, ys, number) for number, ys in enumerate(by_depth)]
    return Panel(title, curves, unit, y_range=(0.0, max(map(max, by_depth)) * 1.05 or 1.0))
