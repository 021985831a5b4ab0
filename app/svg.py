"""Line charts as SVG text, without a plotting library: one panel has axes from given ranges, curves, and a title.

    panel = Panel("top-1 by depth", x=(1, 5), y=(0, 1), x_ticks=(1, 2, 3, 4, 5), y_ticks=(0, 0.5, 1))
    panel.curve([(1, 0.6), (2, 0.5)], "#0072b2")
    file.write_text(page([panel], legend=[("small", "#0072b2", False)]))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT, _MARGIN = 380, 320, 56  # pixels of a panel, and what of them is left around the axes


@dataclass(slots=True)
class Panel:
    """One chart. Ranges and ticks are in data units; points outside of the ranges are drawn outside of the axes."""

    title: str
    x: tuple[float, float]
    y: tuple[float, float]
    x_ticks: Sequence[float]
    y_ticks: Sequence[float]
    x_title: str = ""
    y_title: str = ""
    _drawn: list[str] = field(default_factory=list)

    def curve(
        self, points: Sequence[tuple[float, float]], color: str, *, dashed: bool = False, sizes: Sequence[float] = ()
    ) -> None:
        """Join points by a line, each with a dot; `sizes` are the dots' radii in pixels, 3 each if there are none."""
        places = [self._place(*point) for point in points]
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        self._drawn.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.6"{dash}/>')
        for (x, y), radius in zip(places, sizes or [3.0] * len(places), strict=True):
            self._drawn.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="{color}" fill-opacity="0.8"/>')

    def elements(self) -> str:
        """The panel as SVG elements, its upper left corner at 0, 0."""
        left, bottom, middle = _MARGIN, _HEIGHT - _MARGIN, _WIDTH / 2
        parts = [_text(middle, 24, self.title, "middle", bold=True), _text(middle, _HEIGHT - 14, self.x_title, "middle")]
        parts.append(f'<g transform="rotate(-90 14 {_HEIGHT / 2})">{_text(14, _HEIGHT / 2, self.y_title, "middle")}</g>')
        for tick in self.x_ticks:
            x, _ = self._place(tick, self.y[0])
            parts += [_rule(x, bottom, x, _MARGIN), _text(x, bottom + 16, f"{tick:g}", "middle")]
        for tick in self.y_ticks:
            _, y = self._place(self.x[0], tick)
            parts += [_rule(left, y, _WIDTH - _MARGIN, y), _text(left - 8, y + 4, f"{tick:g}", "end")]
        return "\n".join([*parts, *self._drawn])

    def _place(self, x: float, y: float) -> tuple[float, float]:
        """Pixels of a point; y grows downwards there."""
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return _MARGIN + across * (_WIDTH - 2 * _MARGIN), _HEIGHT - _MARGIN - up * (_HEIGHT - 2 * _MARGIN)


def page(panels: Sequence[Panel], legend: Sequence[tuple[str, str, bool]]) -> str:
    """An SVG document: panels side by side, and a legend of (name, color, dashed) below them."""
    width, height = _WIDTH * len(panels), _HEIGHT + 20 * len(legend) + 16
    font = 'font-family="sans-serif" font-size="12"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" {font}>']
    parts.append(f'<rect width="{width}" height="{height}" fill="white"/>')
    for index, panel in enumerate(panels):
        parts.append(f'<g transform="translate({index * _WIDTH} 0)">\n{panel.elements()}\n</g>')
    for index, (name, color, dashed) in enumerate(legend):
        y = _HEIGHT + 10 + 20 * index
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        parts.append(f'<line x1="{_MARGIN}" y1="{y}" x2="{_MARGIN + 30}" y2="{y}" stroke="{color}" stroke-width="2"{dash}/>')
        parts.append(_text(_MARGIN + 38, y + 4, name))
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, content: str, anchor: str = "start", *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}>{escape(content)}</text>'


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#ddd"/>'
