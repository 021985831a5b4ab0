"""Drawings of a run: speed-ups by category; what a verification yields for what it costs, beside the cost of forwards.

The first has bars: a schedule's median over the prompts of a category, with 10th and 90th percentile. In the second, lines of
equal speed are drawn at the prices of this very run: those of one forward of a drafter and of one verification, both averaged
over all schedules, and of one token of plain decoding. Beside it, points on the target's curve mark how many rows each schedule
had verified on average.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from app.decode_bench.counts import Counts, counts
from app.decode_bench.methods import THEIRS
from app.decode_bench.report import Results
from app.plots import Curve, Panel, draw
from scheduler.auto_budget import TARGET
from scheduler.cost import LatencyModel

CATEGORIES, STEPS = "speed-by-category.png", "steps.png"
_SPEEDS = (0.5, 1.0, 1.5, 2.0, 3.0)  # times plain decoding
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_STYLES = ("-", "--", ":", "-.")  # of the models' curves
_LEGEND_ENTRY = 2.2  # inches
_HATCHES = ("", "//", "..", "xx")  # change where the colors begin again


@dataclass(frozen=True, slots=True)
class Prices:
    """Milliseconds of decoding on this machine, as the run itself had them."""

    plain: float  # one token of plain decoding
    verification: float  # one step of the other schedules without its drafting
    forward: float  # one forward of a drafter; 0 if there was none

    def tau(self, speed: float, delta: float) -> float:
        """Tokens per verification that make a schedule with `delta` forwards `speed` times as fast as plain decoding."""
        return speed * (self.verification + delta * self.forward) / self.plain


def draw_all(results: Results, costs: Mapping[str, LatencyModel], context: int, folder: Path) -> list[Path]:
    """Draw what there is to draw and return the files.

    Args:
        costs: latency models by name, "target" among them; none: they are left out.
        context: tokens before the rows whose cost is drawn.

    Raises OSError for a folder that cannot be written to.
    """
    folder.mkdir(exist_ok=True)
    files = []
    if len(results.methods) > 1:
        _bars(results, folder / CATEGORIES)
        files.append(folder / CATEGORIES)
    panels = [steps_panel(results), costs_panel(results, costs, context) if costs else None]
    if shown := [panel for panel in panels if panel is not None]:
        draw(shown, folder / STEPS)
        files.append(folder / STEPS)
    return files


def prices(results: Results) -> Prices | None:
    """None if plain decoding or all the others wrote nothing that could be priced."""
    plain, *others = [counts(method) for method in results.methods if method.name not in THEIRS]
    spent = [found for found in (plain, *others) if found.steps]
    if len(spent) < 2 or spent[0] is not plain:
        return None
    drafting = spent[1:]
    forwards = sum(count.forwards for found in drafting for count in found.drafters.values())
    draft_s = sum(found.draft_s for found in drafting if found.delta)
    return Prices(
        plain=1000 * (_beside_drafts(plain) + plain.draft_s) / plain.tokens,
        verification=1000 * sum(map(_beside_drafts, drafting)) / sum(found.steps for found in drafting),
        forward=1000 * draft_s / forwards if forwards else 0.0,
    )


def _beside_drafts(found: Counts) -> float:
    return found.verify_s + (found.other_s or 0.0)


def steps_panel(results: Results) -> Panel | None:
    """Tokens over draft forwards per verification, one point per schedule, with lines of equal speed; None without prices."""
    price = prices(results)
    if price is None:
        return None
    points: list[Curve] = []
    for number, method in enumerate(results.methods):
        found = counts(method)
        if found.tau is not None and found.delta is not None:
            points.append(Curve(method.name, [found.delta], [found.tau], color=number, style=""))
    right = 1.15 * max([1.0, *(curve.xs[0] for curve in points)])
    top = 1.15 * max([2.0, *(curve.ys[0] for curve in points)])
    speeds = [speed for speed in _SPEEDS if price.tau(speed, 0) < top]
    name = f"{', '.join(f'{speed:g}' for speed in speeds)} times ar"
    lines = [
        Curve("" if number else name, [0.0, right], [price.tau(speed, 0), price.tau(speed, right)], color=None, style="--")
        for number, speed in enumerate(speeds)
    ]
    return Panel(
        "what a verification yields, and takes",
        [*lines, *points],
        x_title="draft forwards per verification",
        y_title="tokens per verification",
        x_range=(-0.03 * right, right),
        y_range=(0.0, top),
    )


def costs_panel(results: Results, costs: Mapping[str, LatencyModel], context: int) -> Panel:
    """Milliseconds of a forward over rows, one curve per model; points where the schedules' mean verification is."""
    means = {method.name: counts(method).rows_per_step for method in results.methods}
    most = max([32, *(round(rows + 1) for rows in means.values() if rows is not None)])
    rows = list(range(1, most + 1))
    curves = [
        Curve(f"forward of {name}", rows, model.curve(most, context=context).tolist(), color=None, style=style)
        for (name, model), style in zip(costs.items(), cycle(_STYLES), strict=False)
    ]
    for number, (name, mean) in enumerate(means.items()):
        if mean is not None:
            low, share = int(mean), mean % 1
            ms = (1 - share) * costs[TARGET].ms(low, context=context) + share * costs[TARGET].ms(low + 1, context=context)
            curves.append(Curve(name, [mean], [ms], color=number, style=""))
    title = f"one forward over n rows, context {context}"
    return Panel(title, curves, x_title="rows", y_title="ms", whole_x=True)


def _bars(results: Results, file: Path) -> None:
    """One group of bars per category, and one of all prompts; one bar per method."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    plain, *others = results.methods
    kinds = results.kinds()
    groups: Sequence[str | None] = [None, *kinds]
    with rc_context({"text.parse_math": False}):
        across = max(6.0, 1.2 + 0.22 * (len(others) + 1) * len(groups))
        figure = Figure(figsize=(across, 4.4), layout="constrained")
        axes = figure.subplots()
        width = 0.8 / len(others)
        for number, method in enumerate(others):
            ratios = [results.ratio(method, plain, group) for group in groups]
            shown = [(place, ratio) for place, ratio in enumerate(ratios) if ratio is not None]
            axes.bar(
                [place + (number + 0.5) * width - 0.4 for place, _ in shown],
                [ratio.median for _, ratio in shown],
                width,
                yerr=[[r.median - r.low for _, r in shown], [r.high - r.median for _, r in shown]],
                error_kw={"linewidth": 0.7},
                color=_COLORS[number % len(_COLORS)],
                hatch=_HATCHES[number // len(_COLORS) % len(_HATCHES)],
                label=method.name,
            )
        axes.axhline(1.0, color="#999999", linestyle="--")
        names = ["all", *(f"{kind} ({len(prompts)})" for kind, prompts in kinds.items())]
        axes.set_xticks(range(len(groups)), names, rotation=30, ha="right")
        axes.set_ylabel("times ar, end to end")
        figure.legend(loc="outside lower center", ncols=int(across / _LEGEND_ENTRY), frameon=False)
        figure.savefig(file, dpi=120)
