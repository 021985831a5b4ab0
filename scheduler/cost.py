"""What a forward costs: milliseconds by rows, sequences and context, fitted to measurements of this machine.

A forward reads every weight once, so its price rises slowly with the rows until arithmetic takes over; where that happens
decides which trees pay. The model of one model's forward is

    ms = curve(rows) + context_ms * context + row_context_ms * rows * context / sequences + sequences_ms * (sequences - 1)

with `rows` and `context` summed over the sequences of the batch: keys and values are read once per sequence, and each row
attends to its own sequence's context only. The curve is non-decreasing and no slope is negative, whatever the clock said: a
price that falls with more work would make a scheduler ask for the work.

Traps: measure as many rows as will be asked for. Beyond them the price goes on with the steepest of the last two knots' slope
and the mean slope, which on an accelerator is a guess.

    profile = CostProfile.from_json(path.read_text())
    profile.models["target"].ms(8, context=600)
    profile.models["target"].curve(64, context=600)         # of 1, 2, … 64 rows, for `scheduler.sizing`
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise, product
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from scheduler.isotonic import non_decreasing

FORMAT = "graftserve-costs"
VERSION = 1
_LEAST_SHARE = 0.05  # of the cheapest measurement: what a curve at context 0 costs at least, however steep the slopes came out

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Point:
    """One measured forward, usually a median."""

    rows: int  # of all sequences together
    sequences: int
    context: int  # tokens in the cache before the rows, of all sequences together
    ms: float

    def __post_init__(self) -> None:
        if self.sequences < 1 or self.rows < self.sequences or self.context < 0:
            raise ValueError(f"{self}: needs sequences >= 1, a row for each of them, and context >= 0")
        if not (math.isfinite(self.ms) and self.ms > 0):
            raise ValueError(f"{self}: ms must be positive and finite")


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """Milliseconds of one model's forward. `rows` and `knot_ms` are the curve of one sequence at context 0."""

    rows: tuple[int, ...]  # ascending, from 1 up
    knot_ms: tuple[float, ...]  # non-decreasing, positive
    context_ms: float = 0.0  # per token of context
    row_context_ms: float = 0.0  # per row and token of its sequence's context
    sequences_ms: float = 0.0  # per sequence beyond the first
    points: tuple[Point, ...] = ()  # what it was fitted to

    def __post_init__(self) -> None:
        """ValueError for a model that would be cheaper for more work, or no number at all."""
        if not self.rows or len(self.rows) != len(self.knot_ms):
            raise ValueError(f"rows and knot_ms must pair up, got {len(self.rows)} and {len(self.knot_ms)}")
        if self.rows[0] < 1 or any(a >= b for a, b in pairwise(self.rows)):
            raise ValueError(f"rows must rise from at least 1, got {self.rows}")
        if not (self.knot_ms[0] > 0 and math.isfinite(self.knot_ms[-1]) and all(a <= b for a, b in pairwise(self.knot_ms))):
            raise ValueError(f"knot_ms must be positive, finite and non-decreasing, got {self.knot_ms}")
        for name in ("context_ms", "row_context_ms", "sequences_ms"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"{name} must be finite and not negative, got {getattr(self, name)}")

    @classmethod
    def fit(cls, points: Iterable[Point]) -> Self:
        """The model closest to `points`, in relative error. ValueError for fewer than two numbers of rows."""
        points = tuple(sorted(points, key=lambda point: (point.rows, point.sequences, point.context)))
        rows = sorted({point.rows for point in points})
        if len(rows) < 2:
            raise ValueError(f"a latency model needs at least two numbers of rows, got {rows}")
        ms = np.array([point.ms for point in points])
        weights = (ms.min() / ms) ** 2
        work = np.array([_work(point.rows, point.sequences, point.context) for point in points], dtype=np.float64)
        group = np.searchsorted(rows, [point.rows for point in points])
        mass = np.bincount(group, weights)

        def group_means(values: Floats) -> Floats:
            return np.bincount(group, weights * values) / mass

        # What varies at the same number of rows is the slopes' share; the curve takes the rest.
        within = np.stack([column - group_means(column)[group] for column in work.T], axis=1)
        slopes = _not_negative(within * np.sqrt(weights)[:, None], (ms - group_means(ms)[group]) * np.sqrt(weights))
        curve = non_decreasing(group_means(ms - work @ slopes).tolist(), mass.tolist())
        least = _LEAST_SHARE * float(ms.min())
        context_ms, row_context_ms, sequences_ms = slopes.tolist()
        return cls(
            tuple(rows),
            tuple(max(knot, least) for knot in curve),
            context_ms=context_ms,
            row_context_ms=row_context_ms,
            sequences_ms=sequences_ms,
            points=points,
        )

    def ms(self, rows: int, *, sequences: int = 1, context: int = 0) -> float:
        """Milliseconds of a forward over at least one row; non-decreasing in rows and in context."""
        assert rows >= 1 and sequences >= 1 and context >= 0, f"{rows} rows of {sequences} sequences, context {context}"
        work = _work(rows, sequences, context)
        slopes = (self.context_ms, self.row_context_ms, self.sequences_ms)
        return self._of_rows(rows) + sum(slope * amount for slope, amount in zip(slopes, work, strict=True))

    def curve(self, most: int, *, sequences: int = 1, context: int = 0) -> Floats:
        """`[most]`: milliseconds of 1, 2, … `most` rows. Equal to `ms` of each, up to rounding."""
        rows = np.arange(1, most + 1, dtype=np.float64)
        curve = np.interp(rows, self.rows, self.knot_ms)
        beyond = np.maximum(rows - self.rows[-1], 0.0) * self._last_slope
        fixed = self.context_ms * context + self.sequences_ms * (sequences - 1)
        return curve + beyond + fixed + rows * (self.row_context_ms * context / sequences)

    @property
    def misfit(self) -> float:
        """Largest relative distance of a prediction from its measurement; 0 without measurements."""
        predicted = ((self.ms(p.rows, sequences=p.sequences, context=p.context), p.ms) for p in self.points)
        return max((abs(guess / measured - 1) for guess, measured in predicted), default=0.0)

    @property
    def _last_slope(self) -> float:
        """Milliseconds per row beyond the last knot."""
        rows, ms = self.rows, self.knot_ms
        if len(rows) == 1:
            return 0.0
        return max((ms[-1] - ms[-2]) / (rows[-1] - rows[-2]), (ms[-1] - ms[0]) / (rows[-1] - rows[0]))

    def _of_rows(self, count: int) -> float:
        rows, ms = self.rows, self.knot_ms
        right = bisect_right(rows, count)
        if right == 0:
            return ms[0]
        if right == len(rows):
            return ms[-1] + (count - rows[-1]) * self._last_slope
        share = (count - rows[right - 1]) / (rows[right] - rows[right - 1])
        return ms[right - 1] + share * (ms[right] - ms[right - 1])


@dataclass(frozen=True, slots=True)
class Origin:
    """What a profile was measured on. Every field is text, for people and for comparing."""

    machine: str
    model: str
    weights: str
    threads: str
    date: str  # ISO 8601, UTC


@dataclass(frozen=True, slots=True)
class CostProfile:
    """One latency model per model: "target" and the drafters that run one, by name."""

    models: Mapping[str, LatencyModel]
    origin: Origin

    def ms(self, model: str, rows: int, *, sequences: int = 1, context: int = 0) -> float:
        """Milliseconds of a forward of `model`. KeyError if it was not measured: a drafter without a model costs no forward."""
        return self.models[model].ms(rows, sequences=sequences, context=context)

    def to_json(self) -> str:
        """A document that people can read and `from_json` takes."""
        models = {name: _model_json(model) for name, model in self.models.items()}
        origin = {entry.name: getattr(self.origin, entry.name) for entry in fields(Origin)}
        document = {"format": FORMAT, "version": VERSION, **origin, "models": models}
        return json.dumps(document, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The profile of a document. ValueError that says what is wrong with it."""
        try:
            document = json.loads(text)
            if document.pop("format") != FORMAT or document.pop("version") != VERSION:
                raise ValueError(f"expected {FORMAT}, version {VERSION}")
            models = {name: _model(entry) for name, entry in document.pop("models").items()}
            return cls(models, Origin(**{key: str(value) for key, value in document.items()}))
        except KeyError as error:
            raise ValueError(f"not a cost profile: {error.args[0]!r} is missing") from error
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"not a cost profile: {error}") from error


def _work(rows: int, sequences: int, context: int) -> tuple[float, float, float]:
    """What the slopes are multiplied with: tokens of context, rows times their context, further sequences."""
    return context, rows * context / sequences, sequences - 1


def _not_negative(columns: Floats, values: Floats) -> Floats:
    """Least squares with coefficients >= 0, exact: the best of the feasible fits to every subset of the few columns."""
    best, best_error = np.zeros(columns.shape[1]), float(values @ values)
    for chosen in product((False, True), repeat=columns.shape[1]):
        used = [index for index, flag in enumerate(chosen) if flag and np.any(columns[:, index])]
        if not used:
            continue
        scale = np.linalg.norm(columns[:, used], axis=0)  # columns differ by orders of magnitude
        part = np.linalg.lstsq(columns[:, used] / scale, values, rcond=None)[0] / scale
        error = float(np.sum((values - columns[:, used] @ part) ** 2))
        if np.all(part >= 0) and error < best_error:
            best, best_error = np.zeros(columns.shape[1]), error
            best[used] = part
    return best


def _model_json(model: LatencyModel) -> dict[str, Any]:
    fitted = {entry.name: getattr(model, entry.name) for entry in fields(LatencyModel) if entry.name != "points"}
    return {**fitted, "points": [[point.rows, point.sequences, point.context, point.ms] for point in model.points]}


def _model(entry: dict[str, Any]) -> LatencyModel:
    rows: Sequence[int] = entry["rows"]
    points = tuple(Point(*values) for values in entry["points"])
    slopes = {name: float(entry[name]) for name in ("context_ms", "row_context_ms", "sequences_ms")}
    return LatencyModel(tuple(rows), tuple(map(float, entry["knot_ms"])), **slopes, points=points)
