"""The runtime half of value-guided calls: a rule that says from one row of signals whether to call the medium drafter.

A rule is a threshold on one signal, two levels of thresholds, a weighted sum, or a constant. It is made offline
(:mod:`scheduler.rule_fit`), kept as a JSON file that people can read, and evaluated in about a microsecond.

    rule = Rule.from_json(path.read_text())
    rule.decide(features(growth.tree, growth.frontier("ngram"), growth.frontier("medium"), moment))
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from scheduler.features import FEATURES, Row

FORMAT = "graftserve-call-rule"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Split:
    """A threshold on one signal, and what is decided on either side of it: call, skip, or a further split."""

    signal: int  # index in FEATURES
    threshold: float
    above: bool | Split  # where the signal exceeds the threshold
    below: bool | Split

    def __post_init__(self) -> None:
        if not 0 <= self.signal < len(FEATURES):
            raise ValueError(f"signal must be an index of {len(FEATURES)} signals, got {self.signal}")
        if not math.isfinite(self.threshold):
            raise ValueError(f"threshold must be finite, got {self.threshold}")


@dataclass(frozen=True, slots=True)
class Weighted:
    """Call where sum(weight * signal) + bias > 0."""

    weights: tuple[float, ...]  # in the order of FEATURES
    bias: float

    def __post_init__(self) -> None:
        if len(self.weights) != len(FEATURES) or not all(map(math.isfinite, (*self.weights, self.bias))):
            raise ValueError(f"weights must be {len(FEATURES)} finite numbers, got {self.weights} and bias {self.bias}")


Test = bool | Split | Weighted


@dataclass(frozen=True, slots=True)
class Rule:
    """Whether to call the medium, by the row of signals; and how often in one decoding step at most."""

    test: Test
    max_calls: int = 5
    steps: int = 3  # drafting steps of a decoding step that it was fitted for
    report: Mapping[str, Any] = field(default_factory=dict, compare=False)  # of the fit, for people

    def __post_init__(self) -> None:
        if self.max_calls < 0:
            raise ValueError(f"max_calls must not be negative, got {self.max_calls}")
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")

    def decide(self, row: Row, calls: int = 0) -> bool:
        """Whether to call now, after `calls` in this decoding step."""
        if calls >= self.max_calls:
            return False
        test = self.test
        if isinstance(test, Weighted):
            return sum(weight * value for weight, value in zip(test.weights, row, strict=True)) + test.bias > 0.0
        while isinstance(test, Split):
            test = test.above if row[test.signal] > test.threshold else test.below
        return test

    def decide_all(self, rows: NDArray[np.float64]) -> NDArray[np.bool_]:
        """`[...]` decisions for rows `[..., signals]`, calls so far aside; equal to `decide` of each up to rounding of sums."""
        return _decide_all(self.test, rows)

    def describe(self) -> str:
        """The rule as a sentence."""
        return f"call the medium {_words(self.test)}"

    def to_json(self) -> str:
        """A document that people can read and `from_json` takes."""
        document = {
            "format": FORMAT,
            "version": VERSION,
            "rule": self.describe(),
            "test": _test_json(self.test),
            "max_calls": self.max_calls,
            "steps": self.steps,
            "report": self.report,
        }
        return json.dumps(document, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The rule of a document. ValueError that says what is wrong with it."""
        try:
            document = json.loads(text)
            if document["format"] != FORMAT or document["version"] != VERSION:
                raise ValueError(f"expected {FORMAT}, version {VERSION}")
            report = document.get("report", {})
            return cls(_test(document["test"]), int(document["max_calls"]), int(document["steps"]), report)
        except KeyError as error:
            raise ValueError(f"not a call rule: {error.args[0]!r} is missing") from error
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"not a call rule: {error}") from error


def _decide_all(test: Test, rows: NDArray[np.float64]) -> NDArray[np.bool_]:
    if isinstance(test, Split):
        above = rows[..., test.signal] > test.threshold
        return np.where(above, _decide_all(test.above, rows), _decide_all(test.below, rows))
    if isinstance(test, Weighted):
        called: NDArray[np.bool_] = rows @ np.array(test.weights) + test.bias > 0.0
        return called
    return np.full(rows.shape[:-1], test)


def _words(test: Test) -> str:
    if isinstance(test, bool):
        return "always" if test else "never"
    if isinstance(test, Weighted):
        order = sorted(range(len(FEATURES)), key=lambda index: -abs(test.weights[index]))
        return f"where a weighted sum, first of {', '.join(FEATURES[index] for index in order[:3])}, is positive"
    name, value = FEATURES[test.signal], f"{test.threshold:.4g}"
    if isinstance(test.above, bool) and isinstance(test.below, bool) and test.above != test.below:
        return f"where {name} {'>' if test.above else '<='} {value}"
    return f"where {name} > {value} {_words(test.above)}, else {_words(test.below)}"


def _test_json(test: Test) -> Any:
    if isinstance(test, bool):
        return test
    if isinstance(test, Weighted):
        return {"weights": dict(zip(FEATURES, test.weights, strict=True)), "bias": test.bias}
    return {
        "signal": FEATURES[test.signal],
        "threshold": test.threshold,
        "above": _test_json(test.above),
        "below": _test_json(test.below),
    }


def _test(entry: Any) -> Test:
    if isinstance(entry, bool):
        return entry
    if "weights" in entry:
        weights = {name: float(value) for name, value in entry["weights"].items()}
        for name in weights:
            _index(name)
        return Weighted(tuple(weights.get(name, 0.0) for name in FEATURES), float(entry["bias"]))
    above, below = _test(entry["above"]), _test(entry["below"])
    if isinstance(above, Weighted) or isinstance(below, Weighted):
        raise ValueError("a weighted sum cannot stand below a threshold")
    return Split(_index(entry["signal"]), float(entry["threshold"]), above, below)


def _index(name: str) -> int:
    if name not in FEATURES:
        raise ValueError(f"signal {name!r} is not one of {', '.join(FEATURES)}")
    return FEATURES.index(name)
