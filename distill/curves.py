"""The curves of a run as one SVG: agreement by depth over tokens and over minutes, divergence over tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 420, 260, 52, 40, 30
_COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#9467bd", "#8c564b")


def draw_curves(log: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Write three charts side by side; `log` is what `distill.train.read_log` returns, with at least one line."""
    depths = range(len(log[0]["agreement"]))
    millions = [line["tokens"] / 1e6 for line in log]
    minutes = [line["seconds"] / 60 for line in log]
    agreement = {f"depth {d + 1}": [line["agreement"][d] for line in log] for d in depths}
    divergence = {f"depth {d + 1}": [line["divergence"][d] for line in log] for d in depths}
    charts = [
        _chart("agreement with the target's first choice", "million tokens", millions, agreement),
        _chart("agreement with the target's first choice", "minutes", minutes, agreement),
        _chart("KL divergence, nats", "million tokens", millions, divergence),
    ]
    body = "".join(f'<g transform="translate({index * _WIDTH},24)">{chart}</g>' for index, chart in enumerate(charts))
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{3 * _WIDTH}" height="{_HEIGHT + 24}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="12" y="18" font-size="14">{escape(title)}</text>{body}</svg>\n'
    )


def _chart(title: str, unit: str, xs: Sequence[float], series: dict[str, list[float]]) -> str:
    """One chart with axes from 0 to the largest value, one line per series."""
    right, top = max(xs) or 1.0, max(max(ys) for ys in series.values()) or 1.0
    width, height = _WIDTH - _LEFT - 16, _HEIGHT - _BOTTOM - _TOP

    def x_of(x: float) -> float:
        return _LEFT + width * x / right

    def y_of(y: float) -> float:
        return _TOP + height * (1 - y / top)

    parts = [f'<text x="{_LEFT}" y="18">{escape(title)}</text>']
    for tick in range(5):
        value = top * tick / 4
        y = y_of(value)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{_LEFT + width}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.2f}</text>')
        x = x_of(right * tick / 4)
        parts.append(f'<text x="{x:.1f}" y="{_TOP + height + 16}" text-anchor="middle">{right * tick / 4:.2g}</text>')
    parts.append(f'<text x="{_LEFT + width / 2}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(unit)}</text>')
    for number, (name, ys) in enumerate(series.items()):
        color = _COLORS[number % len(_COLORS)]
        points = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in zip(xs, ys, strict=True))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        place = f'x="{_LEFT + width - 4}" y="{_TOP + 14 * (number + 1)}"'
        parts.append(f'<text {place} fill="{color}" text-anchor="end">{name}</text>')
    return "".join(parts)
