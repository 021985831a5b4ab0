"""Line charts by matplotlib, which is loaded when something is drawn and not before: the server never draws.

    panel = Panel("top-1 by depth", [Curve("small", (1, 2), (0.6, 0.5))], x_title="depth", y_title="share right")
    draw([panel], Path("quality.png"))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FORMATS = (".png", ".svg")
"""Endings of the files that can be drawn."""

# Told apart by people who do not see all colors, too.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_MARKERS = "osD^vP*X"  # change where the colors begin again
_GRAY = "#999999"
_PANEL = (4.8, 4.0)  # inches
_LEGEND_LINE = 0.22  # inches
_PER_PANEL = 2  # names below one panel's width


@dataclass(frozen=True, slots=True)
class Curve:
    """Points, joined or not. Curves of one name share their place in the legend, whatever panel they are in."""

    name: str  # "" keeps it out of the legend
    xs: Sequence[float]
    ys: Sequence[float]
    color: int | None = 0  # number of a color; None: gray, for what is no measurement
    style: str = "-"  # of the line, as matplotlib names it: "-", "--", or "" for points alone
    sizes: Sequence[float] = ()  # of the dots, in points; none: all alike


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart. A range of None follows the data."""

    title: str
    curves: Sequence[Curve]
    x_title: str = ""
    y_title: str = ""
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None
    whole_x: bool = False  # x counts something: no ticks between whole numbers


def check_file(file: Path) -> None:
    """ValueError, naming the file, for an ending that nothing can be drawn as."""
    if file.suffix not in FORMATS:
        raise ValueError(f"{file}: drawings are written as {' or '.join(FORMATS)} files")


def draw(panels: Sequence[Panel], file: Path, title: str = "", columns: int | None = None) -> None:
    """Draw panels side by side, or `columns` of them in a row, one legend for all below; the file's ending says the format.

    No window system and no global state is used. ValueError for another ending than those of `FORMATS`, OSError for a file
    that cannot be written.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    check_file(file)
    num_names = len({curve.name for panel in panels for curve in panel.curves if curve.name})
    across = columns or len(panels)
    per_line = _PER_PANEL * across
    legend_height = _LEGEND_LINE * (-(-num_names // per_line) + 1)
    down = -(-len(panels) // across)
    width, height = _PANEL[0] * across, _PANEL[1] * down + legend_height
    # Text stays text in an SVG, and the same data gives the same file. A "$" in a name is no formula.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "graftserve", "text.parse_math": False}):
        figure = Figure(figsize=(width, height), layout="constrained")
        shown: dict[str, Line2D] = {}
        for panel, axes in zip(panels, figure.subplots(down, across, squeeze=False).flat, strict=True):
            axes.set_title(panel.title)
            axes.set_xlabel(panel.x_title)
            axes.set_ylabel(panel.y_title)
            axes.grid(color="#dddddd")
            axes.set_axisbelow(True)
            for number, curve in enumerate(panel.curves):
                color = _GRAY if curve.color is None else _COLORS[curve.color % len(_COLORS)]
                marker = "" if curve.color is None else _MARKERS[curve.color // len(_COLORS) % len(_MARKERS)]
                gid, style = f"{panel.title} {number}", curve.style or "none"
                (line,) = axes.plot(curve.xs, curve.ys, linestyle=style, color=color, gid=gid)
                if curve.sizes:
                    areas = [size**2 for size in curve.sizes]
                    axes.scatter(curve.xs, curve.ys, s=areas, color=color, alpha=0.7, marker=marker or "o")
                else:
                    line.set_marker(marker)
                    line.set_markersize(4)
                if curve.name:
                    shown.setdefault(curve.name, line)
            axes.set_xlim(panel.x_range)
            axes.set_ylim(panel.y_range)
            if panel.whole_x:
                axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if title:
            figure.suptitle(title)
        if shown:
            lines, names = list(shown.values()), list(shown)
            figure.legend(lines, names, loc="outside lower center", ncols=min(len(shown), per_line), frameon=False)
        kind = file.suffix.removeprefix(".")
        figure.savefig(file, format=kind, dpi=120, metadata={"Date": None} if kind == "svg" else None)
