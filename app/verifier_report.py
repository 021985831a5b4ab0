"""What was measured of tree policies and rules: a table, the funnel, charts and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.plots import Curve, Panel
from app.verifier_bench import PairCounts

COLUMNS = ("policy + rule", "T", "rule", "verified", "tau", "delta", "nodes", "tree, µs", "rule, µs", "own share", "step, ms")
_SHOWN_DEPTHS = 8


def rows(counts: Sequence[PairCounts]) -> list[tuple[str, ...]]:
    """Cells under `COLUMNS`."""
    return [
        (
            one.name,
            f"{one.temperature:g}",
            one.rule,
            str(one.verifications),
            *(_decimals(value) for value in (one.tau, one.delta, one.nodes_per_verification)),
            *(_per_step(seconds, one, 1e6, 0) for seconds in (one.seconds.tree, one.seconds.rule)),
            "-" if one.seconds.own_share is None else f"{one.seconds.own_share:.1%}",
            _per_step(one.seconds.step, one, 1e3, 1),
        )
        for one in counts
    ]


def legend() -> str:
    """What the columns say."""
    return (
        "verified: verifications. tau: tokens per verification, the target's own included. delta: drafter forwards per "
        "verification. nodes: verified ones, the root included. tree, rule: time of growing trees and of deciding, without the "
        "models, per verification; own share: of the whole step. At T = 0 all lossless rules decide alike."
    )


def funnel_columns(counts: Sequence[PairCounts]) -> tuple[str, ...]:
    """Headings of :func:`funnel_rows`."""
    return ("policy + rule", "T", *(f"depth {depth}" for depth in range(1, _num_depths(counts) + 1)))


def funnel_rows(counts: Sequence[PairCounts]) -> list[tuple[str, ...]]:
    """Per pair and depth: share of verifications that accepted a node there, of those that had one there."""
    lines = []
    for one in counts:
        cells = [f"{depth.accepted / depth.offered:.0%}" for depth in one.funnel[: _num_depths(counts)] if depth.offered]
        lines.append((one.name, f"{one.temperature:g}", *cells, *[""] * (_num_depths(counts) - len(cells))))
    return lines


def panels(counts: Sequence[PairCounts]) -> list[Panel]:
    """Two charts per temperature: how deep verifications accept, and tau against delta, a dot per prompt."""
    found = []
    names = list(dict.fromkeys(one.name for one in counts))
    for temperature in dict.fromkeys(one.temperature for one in counts):
        some = [one for one in counts if one.temperature == temperature]
        accepted = []
        dots = []
        for one in some:
            depths = range(len(one.funnel) + 1)
            shares = [1.0, *(depth.accepted / max(one.verifications, 1) for depth in one.funnel)]
            accepted.append(Curve(one.name, depths, shares, names.index(one.name)))
            xs, ys = [delta for delta, _ in one.by_prompt], [tau for _, tau in one.by_prompt]
            dots.append(Curve(one.name, xs, ys, names.index(one.name), ""))
        most = max((delta for one in some for delta, _ in one.by_prompt), default=1.0) or 1.0
        line = Curve("perfect chain: tau = delta + 1", (0, most), (1, most + 1), None, "--")
        found += [
            Panel(f"accepted so deep, T = {temperature:g}", accepted, "depth", "share of verifications", whole_x=True),
            Panel(f"cost and gain, T = {temperature:g}", [line, *dots], "delta: forwards", "tau: tokens"),
        ]
    return found


def pair_json(one: PairCounts) -> dict[str, Any]:
    """One pair at one temperature as a JSON object: raw counts, and the ratios of the table."""
    count = max(one.verifications, 1)
    seconds = one.seconds
    return {
        "name": one.name,
        "temperature": one.temperature,
        "rule": one.rule,
        "verifications": one.verifications,
        "tokens": one.tokens,
        "forwards": one.forwards,
        "nodes": one.nodes,
        "lossy_tokens": one.lossy_tokens,
        "tau": one.tau,
        "delta": one.delta,
        "seconds": {name: getattr(seconds, name) for name in ("step", "draft", "tree", "target", "rule")},
        "tree_us": 1e6 * seconds.tree / count,
        "rule_us": 1e6 * seconds.rule / count,
        "own_share": seconds.own_share,
        "funnel": [
            {"depth": number, "offered": depth.offered, "accepted": depth.accepted, "ranks": _histogram(depth.ranks)}
            for number, depth in enumerate(one.funnel, 1)
        ],
        "by_prompt": [{"delta": delta, "tau": tau} for delta, tau in one.by_prompt],
    }


def _histogram(ranks: dict[int, int]) -> list[int]:
    return [ranks.get(rank, 0) for rank in range(max(ranks, default=-1) + 1)]


def _num_depths(counts: Sequence[PairCounts]) -> int:
    return min(max((len(one.funnel) for one in counts), default=0), _SHOWN_DEPTHS)


def _per_step(seconds: float, one: PairCounts, unit: float, digits: int) -> str:
    return f"{unit * seconds / one.verifications:.{digits}f}" if one.verifications else "-"


def _decimals(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
