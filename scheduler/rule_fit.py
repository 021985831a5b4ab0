"""Fitting the rule that says when to call the medium drafter, and saying what it is good for.

Candidates, simplest first: never, always, a threshold on one signal, two levels of thresholds, the sign of the value model (a
ridge regression of the margin). Thresholds are chosen for the total realized margin, not for being right: an error where
nothing is at stake costs nothing. Among all pairs of thresholds the best two-level rule is found exactly, by a matrix product.

Which candidate is used is decided on prompts that it was not fitted to, by the value it realizes there: tokens - rate * ms at
one rate for all, that of the better end point. A candidate replaces a simpler one only if it gains more than two standard
errors of the gain, taken over prompts; else every fit would end as complicated as it may.

Each fit is iterated: the margins depend on how the scheduler goes on after the decision, and on the rate; both come from the
rule of the round before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler.features import FEATURES
from scheduler.rule import Rule, Split, Test, Weighted
from scheduler.value import (
    Calls,
    Floats,
    Steps,
    Totals,
    always,
    fit_value,
    folds,
    limited,
    margins,
    oracle,
    outcomes,
    plain,
    reached,
    totals,
)


@dataclass(frozen=True, slots=True)
class RuleFit:
    """How a rule is fitted."""

    max_calls: int = 5  # per decoding step
    folds: int = 5  # of prompts
    thresholds: int = 16  # per signal
    least_share: float = 0.02  # of the decisions, on either side of a threshold
    rounds: int = 3
    ridge: float = 10.0
    seed: int = 0  # of the permutations

    def __post_init__(self) -> None:
        for name, least in (("max_calls", 0), ("folds", 2), ("thresholds", 1), ("rounds", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not (0 <= self.least_share < 0.5 and self.ridge > 0):
            raise ValueError(f"least_share must be in [0, 0.5) and ridge positive, got {self.least_share}, {self.ridge}")


def fit_rule(steps: Steps, options: RuleFit | None = None) -> Rule:
    """The rule, with its report. ValueError for steps of fewer than two prompts: nothing could be held out."""
    options = options or RuleFit()
    if len(np.unique(steps.groups)) < 2:
        raise ValueError("a rule is chosen on prompts that it was not fitted to, and there is only one prompt")
    if steps.rows.shape[2] != len(FEATURES):
        raise ValueError(f"rows must have {len(FEATURES)} signals, got {steps.rows.shape[2]}")
    ends = (always(steps, "S"), always(steps, "M"))
    rate = max(end.rate for end in ends)
    chosen, words = _choose(steps, rate, options)
    held_out = {name: totals(steps, own) for name, own in words.items()}
    test = _fit(steps, _FAMILIES[chosen], options)
    report = {
        "steps": len(steps),
        "prompts": len(np.unique(steps.groups)),
        "tokens_per_ms": rate,
        "chosen": chosen,
        "held_out": {name: _numbers(total, rate) for name, total in held_out.items()},
        "end_points": {name: _numbers(end, rate) for name, end in zip(("small", "medium"), ends, strict=True)},
        "plain": _numbers(plain(steps), rate),
        "oracle": _numbers(oracle(steps), rate),
        "value_model": _value_report(steps, rate, options),
        "single_signal": _single_signals(steps, rate, options),
        "permutation_importance": _importance(steps, test, rate, options),
    }
    return Rule(test, options.max_calls, steps.depth, report)


def cross_fitted(steps: Steps, options: RuleFit | None = None) -> Totals:
    """What rules make of steps when every prompt is decided by a rule that was fitted, and chosen, on the others."""
    options = options or RuleFit()
    words = np.zeros(len(steps), dtype=np.intp)
    for held in folds(steps.groups, options.folds):
        rest = steps.take(~held)
        family = "threshold"
        if len(np.unique(rest.groups)) > 1:
            family, _ = _choose(rest, max(always(rest, "S").rate, always(rest, "M").rate), options)
        test = _fit(rest, _FAMILIES[family], options)
        words[held] = outcomes(limited(Rule(test).decide_all(steps.rows[held]), options.max_calls))
    return totals(steps, words)


# ---- candidates -----------------------------------------------------------------------------------------------------

Fit = Callable[[Floats, Floats, RuleFit], Test]
"""(rows `[n, signals]`, margins `[n]`, options) -> test."""


def _stump(rows: Floats, margin: Floats, options: RuleFit) -> Test:
    """The best threshold on one signal, or none."""
    signals, thresholds, above = _thresholds(rows, options)
    if not len(signals):
        return bool(margin.sum() > 0)
    over = margin @ above
    under = margin.sum() - over
    best = int(np.argmax(np.maximum(over, 0.0) + np.maximum(under, 0.0)))
    return _split(signals[best], thresholds[best], bool(over[best] > 0), bool(under[best] > 0))


def _tree(rows: Floats, margin: Floats, options: RuleFit) -> Test:
    """The best two levels: for every first threshold the best second one on either side of it, all at once."""
    signals, thresholds, above = _thresholds(rows, options)
    if not len(signals):
        return bool(margin.sum() > 0)
    least = max(options.least_share * len(rows), 1.0)
    over, num_over, total = margin @ above, above.sum(axis=0), margin.sum()
    both, num_both = (above * margin[:, None]).T @ above, above.T @ above  # [first, second]

    def gain(high: Floats, num_high: Floats, low: Floats, num_low: Floats) -> Floats:
        """Of a second threshold with so much above and below it; -inf where a side would be nearly empty."""
        found = np.maximum(high, 0.0) + np.maximum(low, 0.0)
        return np.where((num_high >= least) & (num_low >= least), found, -np.inf)

    num_total = float(len(rows))
    inside = gain(both, num_both, over[:, None] - both, num_over[:, None] - num_both)
    rest_over, num_rest_over = over[None, :] - both, num_over[None, :] - num_both
    rest_under = total - over[:, None] - over[None, :] + both
    num_rest_under = num_total - num_over[:, None] - num_over[None, :] + num_both
    outside = gain(rest_over, num_rest_over, rest_under, num_rest_under)
    # A side need not be split.
    inside_best = np.maximum(inside.max(axis=1), np.maximum(over, 0.0))
    outside_best = np.maximum(outside.max(axis=1), np.maximum(total - over, 0.0))
    first = int(np.argmax(inside_best + outside_best))

    def side(gains: Floats, whole: float, high: Floats, low: Floats) -> bool | Split:
        second = int(np.argmax(gains))
        if not gains[second] > max(whole, 0.0) + 1e-9:
            return bool(whole > 0)
        return _split(signals[second], thresholds[second], bool(high[second] > 0), bool(low[second] > 0))

    upper = side(inside[first], float(over[first]), both[first], over[first] - both[first])
    lower = side(outside[first], float(total - over[first]), rest_over[first], rest_under[first])
    return _split(signals[first], thresholds[first], upper, lower)


def _weighted(rows: Floats, margin: Floats, options: RuleFit) -> Test:
    """The sign of the value model."""
    model = fit_value(rows, margin, options.ridge)
    weights = model.weights / model.scale
    return Weighted(tuple(weights.tolist()), float(model.mean - model.center @ weights))


_FAMILIES: dict[str, Fit] = {
    "never": lambda rows, margin, options: False,
    "always": lambda rows, margin, options: True,
    "threshold": _stump,
    "two thresholds": _tree,
    "value model": _weighted,
}


def _split(signal: int, threshold: float, above: bool | Split, below: bool | Split) -> bool | Split:
    return above if above == below and isinstance(above, bool) else Split(int(signal), float(threshold), above, below)


def _thresholds(rows: Floats, options: RuleFit) -> tuple[list[int], list[float], Floats]:
    """Signals and thresholds to try, and `[n, thresholds]` whether each row is above each, as 0 or 1."""
    signals: list[int] = []
    thresholds: list[float] = []
    least = options.least_share * len(rows)
    for signal in range(rows.shape[1]):
        values = np.unique(rows[:, signal])
        middles = (values[1:] + values[:-1]) / 2
        if len(middles) > options.thresholds:
            ordered = np.sort(rows[:, signal])
            places = np.arange(1, options.thresholds + 1) * len(ordered) // (options.thresholds + 1)
            middles = np.unique((ordered[places] + ordered[np.maximum(places - 1, 0)]) / 2)
        for middle in middles.tolist():
            count = int((rows[:, signal] > middle).sum())
            if least <= count <= len(rows) - least and 0 < count < len(rows):
                signals.append(signal)
                thresholds.append(middle)
    above = rows[:, signals] > np.array(thresholds)
    return signals, thresholds, above.astype(np.float64)


# ---- fitting and judging --------------------------------------------------------------------------------------------


def _fit(steps: Steps, family: Fit, options: RuleFit) -> Test:
    """The best test of a family over a few rounds of margins and rate."""
    end = max("SM", key=lambda letter: always(steps, letter).rate)
    calls: Calls = np.full(steps.rows.shape[:2], end == "M")
    rate = always(steps, end).rate
    best: tuple[float, Test] | None = None
    test: Test | None = None
    for _ in range(options.rounds):
        calls = limited(calls, options.max_calls)
        seen = reached(calls)
        before, test = test, family(steps.rows[seen], margins(steps, calls, rate)[seen], options)
        if test == before:
            break
        calls = limited(Rule(test).decide_all(steps.rows), options.max_calls)
        found = totals(steps, outcomes(calls)).rate
        if best is None or found > best[0]:
            best = (found, test)
        rate = max(rate, found)
    assert best is not None
    return best[1]


def _held_out(steps: Steps, family: Fit, options: RuleFit) -> NDArray[np.intp]:
    """`[steps]`: the words that a family leads to on prompts that it was not fitted to, over all folds."""
    words = np.zeros(len(steps), dtype=np.intp)
    for held in folds(steps.groups, options.folds):
        test = _fit(steps.take(~held), family, options)
        words[held] = outcomes(limited(Rule(test).decide_all(steps.rows[held]), options.max_calls))
    return words


def _choose(steps: Steps, rate: float, options: RuleFit) -> tuple[str, dict[str, NDArray[np.intp]]]:
    """The family to use, and what each leads to on held-out prompts."""
    each = np.arange(len(steps))
    value = steps.tokens - rate * steps.ms
    words = {name: _held_out(steps, family, options) for name, family in _FAMILIES.items()}
    _, group = np.unique(steps.groups, return_inverse=True)
    chosen = next(iter(words))
    for name, own in words.items():
        gain = np.bincount(group, value[each, own] - value[each, words[chosen]])
        if gain.sum() > 2 * np.sqrt(len(gain)) * gain.std(ddof=1) + 1e-9:
            chosen = name
    return chosen, words


def _end_margins(steps: Steps, rate: float) -> tuple[Floats, Floats, NDArray[np.intp]]:
    """Rows `[n, signals]`, margins `[n]` and steps `[n]` of the decisions around the better end point."""
    calls = np.full(steps.rows.shape[:2], always(steps, "M").rate > always(steps, "S").rate)
    seen = reached(calls)
    return steps.rows[seen], margins(steps, calls, rate)[seen], np.nonzero(seen)[0]


def _value_report(steps: Steps, rate: float, options: RuleFit) -> dict[str, float]:
    """How much of the margins' variance the value model explains on held-out prompts; below 0: less than their mean."""
    rows, margin, owner = _end_margins(steps, rate)
    error = spread = 0.0
    for held in folds(steps.groups, options.folds):
        mask = held[owner]
        model = fit_value(rows[~mask], margin[~mask], options.ridge)
        error += float(((margin[mask] - model.predict(rows[mask])) ** 2).sum())
        spread += float(((margin[mask] - margin[~mask].mean()) ** 2).sum())
    return {
        "explained": 1.0 - error / spread if spread > 0 else 0.0,
        "mean_margin": float(margin.mean()),
        "share_worth_a_call": float((margin > 0).mean()),
    }


def _single_signals(steps: Steps, rate: float, options: RuleFit) -> dict[str, float]:
    """Held-out value per 1,000 steps of the best threshold on one signal alone, over the better end point; best first."""
    base = max(always(steps, "S").value(rate), always(steps, "M").value(rate))
    found = {}
    for index, name in enumerate(FEATURES):

        def alone(rows: Floats, margin: Floats, options: RuleFit, index: int = index) -> Test:
            masked = np.zeros_like(rows)  # a signal that never changes has no threshold
            masked[:, index] = rows[:, index]
            return _stump(masked, margin, options)

        value = totals(steps, _held_out(steps, alone, options)).value(rate)
        found[name] = 1000 * (value - base) / len(steps)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _importance(steps: Steps, test: Test, rate: float, options: RuleFit) -> dict[str, float]:
    """Value per 1,000 steps that the rule loses when one of its signals is shuffled between steps; signals it uses only."""
    generator = np.random.default_rng(options.seed)
    rule = Rule(test)

    def value(rows: Floats) -> float:
        return totals(steps, outcomes(limited(rule.decide_all(rows), options.max_calls))).value(rate)

    intact, lost = value(steps.rows), {}
    for index in sorted(_used(test)):
        shuffled = steps.rows.copy()
        shuffled[:, :, index] = steps.rows[generator.permutation(len(steps)), :, index]
        lost[FEATURES[index]] = 1000 * (intact - value(shuffled)) / len(steps)
    return dict(sorted(lost.items(), key=lambda item: -item[1]))


def _used(test: Test) -> set[int]:
    if isinstance(test, Split):
        return {test.signal} | _used(test.above) | _used(test.below)
    return {index for index, weight in enumerate(test.weights) if weight} if isinstance(test, Weighted) else set()


def _numbers(total: Totals, rate: float) -> dict[str, Any]:
    return {
        "tokens_per_step": total.tokens / total.steps,
        "ms_per_step": total.ms / total.steps,
        "tokens_per_ms": total.rate,
        "calls_per_step": total.calls / total.steps,
        "value_per_1000_steps": 1000 * total.value(rate) / total.steps,
    }
