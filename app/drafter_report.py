"""What was measured of drafters, as tables, as a line of calibration, as JSON and as charts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from app.drafter_price import TARGET, Price
from app.drafter_quality import FLOOR, NUM_BINS, DepthQuality, Quality
from app.measure import spread
from app.plots import Curve, Panel

COLUMNS = ("depth", "positions", "answered", "top-1", "top-4", "log-loss", "p = 0", "calibration error")


def quality_rows(quality: Quality) -> list[tuple[str, ...]]:
    """Cells under `COLUMNS`, one row per depth."""
    return [
        (
            str(counts.depth),
            str(counts.positions),
            _share(counts.answered, counts.positions),
            *(_decimals(value) for value in (counts.top1, counts.top4, counts.log_loss)),
            _share(counts.impossible, counts.positions),
            _decimals(counts.calibration_error),
        )
        for counts in quality.depths
    ]


def legend() -> str:
    """What the columns of the quality table say."""
    return (
        "top-1, top-4: the target's token is the drafter's best, or one of its best four. answered: it had a candidate. "
        f"log-loss: nats, no token below p = {FLOOR:g}. p = 0: it ruled the target's token out."
    )


def calibration_line(quality: Quality) -> str:
    """How often the best token was right, by how likely the drafter held it, at depth 1."""
    first = quality.depths[0]
    bins = [f"{b.confidence:.2f} → {b.agreed:.2f} ({b.count})" for b in first.bins if b.count]
    if not bins:
        return f"{quality.drafter}: no candidates, so no calibration"
    return f"{quality.drafter}, probability of its best token → how often right (positions): {', '.join(bins)}"


def halt_lines(quality: Quality) -> Iterator[str]:
    """One line per reason for which the drafter gave texts up."""
    for reason, count in quality.halts.items():
        yield f"{quality.drafter} gave {count} texts up ({reason}); their positions from there on are not in the table"


def price_rows(prices: Sequence[Price]) -> list[tuple[str, ...]]:
    """By number of rows: a row per model in milliseconds, median and quartiles, and one per drafter relative to the target."""
    counts = sorted({price.rows for price in prices})
    found = {(price.who, price.rows): spread([1000 * second for second in price.seconds]) for price in prices}
    lines = []
    for who in dict.fromkeys(price.who for price in prices):
        lines.append((f"{who}, ms", *(str(found[who, count]) for count in counts)))
        if who != TARGET:
            ratios = [found[who, count].median / found[TARGET, count].median for count in counts]
            lines.append((f"{who} / {TARGET}", *(f"{ratio:.2f}" for ratio in ratios)))
    return lines


def quality_json(quality: Quality) -> dict[str, Any]:
    """A drafter as a JSON object; ratios that have no positions are null."""
    return {
        "name": quality.drafter,
        "runs_model": quality.runs_model,
        "halts": dict(quality.halts),
        "depths": [_depth_json(counts) for counts in quality.depths],
    }


def price_json(prices: Sequence[Price]) -> list[dict[str, Any]]:
    """Raw samples, medians and ratios to the target with the same number of rows."""
    medians = {(price.who, price.rows): spread(price.seconds).median for price in prices}
    return [
        {
            "who": price.who,
            "rows": price.rows,
            "median_ms": 1000 * medians[price.who, price.rows],
            "ratio_to_target": medians[price.who, price.rows] / medians[TARGET, price.rows],
            "seconds": list(price.seconds),
        }
        for price in prices
    ]


def panels(qualities: Sequence[Quality]) -> list[Panel]:
    """Agreement by depth, and calibration at depth 1, where larger dots stand for more positions."""
    agreement: list[Curve] = []
    calibration = [Curve("", (0, 1), (0, 1), None, "--")]
    for number, quality in enumerate(qualities):
        for title, name, style in (("top-1", "top1", "-"), ("top-4", "top4", "--")):
            found = [(counts.depth, value) for counts in quality.depths if (value := getattr(counts, name)) is not None]
            xs, ys = [depth for depth, _ in found], [value for _, value in found]
            agreement.append(Curve(f"{quality.drafter}, {title}", xs, ys, number, style))
        first = quality.depths[0]
        bins = [b for b in first.bins if b.count]
        sizes = [3 + 12 * (b.count / first.answered) ** 0.5 for b in bins]
        name = f"{quality.drafter}, top-1"
        calibration.append(Curve(name, [b.confidence for b in bins], [b.agreed for b in bins], number, sizes=sizes))
    whole, share = (-0.02, 1.02), "share right"
    deepest = max(len(quality.depths) for quality in qualities)
    return [
        Panel("agreement with the target", agreement, "depth", share, (0.5, deepest + 0.5), whole, whole_x=True),
        Panel("calibration at depth 1", calibration, "probability of the best token", share, whole, whole),
    ]


def _depth_json(counts: DepthQuality) -> dict[str, Any]:
    bins = [
        {
            "from": index / NUM_BINS,
            "count": filled.count,
            "hits": filled.hits,
            "confidence": filled.confidence if filled.count else None,
            "agreed": filled.agreed if filled.count else None,
        }
        for index, filled in enumerate(counts.bins)
    ]
    names = ("depth", "positions", "answered", "top1_hits", "top4_hits", "impossible")
    ratios = ("top1", "top4", "log_loss", "calibration_error")
    return {**{name: getattr(counts, name) for name in (*names, *ratios)}, "bins": bins}


def _decimals(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"
