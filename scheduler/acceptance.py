"""From what a drafter thinks of an edge to how often the target takes it: calibration per drafter and depth.

Tree policies multiply a drafter's probabilities as if 0.8 meant 0.8. Drafters are over-confident, more so deep in the tree,
so the product overstates deep nodes. Logged samples (score, depth, accepted) tell what 0.8 means; a non-decreasing curve
through them corrects it.

A sample belongs to an *edge*: the drafter's log-probability of a child that was verified, and whether the child was accepted,
counted only where its parent was. Probabilities of paths are products of edges then, each by the curve of the drafter that
scored it, and so they never rise along a path. Siblings exclude each other; where their calibrated edges sum to more than 1
all are scaled down, so that the children of a node sum to at most the node itself, as `scheduler.sizing` needs.

Traps: samples exist of verified edges only, so what is never verified is never corrected; the curve is therefore drawn
towards what was believed before (identity at first) by a few pseudo-samples, and no edge is ever quite 0 or 1 for lack of
luck. Few samples of a depth fall back to all depths of the drafter, few of the drafter to what was believed before.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Self

import numpy as np
from numpy.typing import NDArray

from scheduler.isotonic import non_decreasing
from tree.tree import TokenTree

Floats = NDArray[np.float64]

FORMAT = "graftserve-acceptance"
VERSION = 1
ALL_DEPTHS = 0
"""The key of a drafter's curve over all depths."""
_SUREST = 0.98  # probability of an edge at most, once a text's own record speaks for it


@dataclass(frozen=True, slots=True)
class FitRule:
    """How curves are fitted, and how much is remembered for it."""

    min_samples: int = 64  # below it a curve is not fitted
    deepest: int = 4  # deeper edges count as of this depth
    num_bins: int = 16  # most knots of a curve
    prior: float = 4.0  # pseudo-samples per knot at what was believed before
    window: int = 2048  # newest samples per drafter and depth that count
    refit_every: int = 256  # new samples of a drafter after which its curves are fitted again

    def __post_init__(self) -> None:
        for name in ("min_samples", "deepest", "num_bins", "window", "refit_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not (math.isfinite(self.prior) and self.prior > 0):
            raise ValueError(f"prior must be positive, got {self.prior}")


@dataclass(frozen=True, slots=True)
class Curve:
    """Drafter probability to acceptance: straight between knots, from (0, 0) to the first, level behind the last."""

    score: tuple[float, ...]  # rising, 0 to 1: probabilities, not their logarithms
    accepted: tuple[float, ...]  # non-decreasing, 0 to 1

    def __post_init__(self) -> None:
        if not self.score or len(self.score) != len(self.accepted):
            raise ValueError(f"score and accepted must pair up, got {len(self.score)} and {len(self.accepted)}")
        if not (0 <= self.score[0] and self.score[-1] <= 1 and all(a < b for a, b in pairwise(self.score))):
            raise ValueError(f"score must rise within 0 to 1, got {self.score}")
        if not (0 <= self.accepted[0] and self.accepted[-1] <= 1 and all(a <= b for a, b in pairwise(self.accepted))):
            raise ValueError(f"accepted must not fall and stay within 0 to 1, got {self.accepted}")

    def __call__(self, probability: Floats) -> Floats:
        """Acceptance at each drafter probability, same shape."""
        score, accepted = self.score, self.accepted
        if score[0] > 0:
            score, accepted = (0.0, *score), (0.0, *accepted)
        return np.interp(probability, score, accepted)

    def at(self, probability: float) -> float:
        """The same for one number; arrays of one cost more than what is computed."""
        score, accepted = self.score, self.accepted
        right = bisect_right(score, probability)
        if right == len(score):
            return accepted[-1]
        below, least = (score[right - 1], accepted[right - 1]) if right else (0.0, 0.0)
        return least + (accepted[right] - least) * (probability - below) / (score[right] - below)


IDENTITY = Curve((0.0, 1.0), (0.0, 1.0))


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Curves by drafter and depth (`ALL_DEPTHS`: any); identity where there is none."""

    curves: Mapping[str, Mapping[int, Curve]] = field(default_factory=dict)
    deepest: int = 4

    def curve(self, drafter: str, depth: int) -> Curve:
        """Of an edge that leads to `depth`, 1 below the root: its own, or the drafter's, or identity."""
        own = self.curves.get(drafter, {})
        return own.get(min(depth, self.deepest), own.get(ALL_DEPTHS, IDENTITY))

    def edge(self, drafter: str, depth: int, log_prob: float) -> float:
        """Probability that an edge is taken if the node above it was; 0 to 1, non-decreasing in `log_prob` (<= 0)."""
        return self.curve(drafter, depth).at(math.exp(min(log_prob, 0.0)))

    def paths(self, tree: TokenTree, record: TextRecord | None = None) -> list[float]:
        """`[nodes]`: probability that each node of `tree` is accepted, in creation order; 1 for the root.

        The children of a node sum to at most the node's own. `record` is how drafters have fared on this very text.
        """
        # Plain Python: trees have tens of nodes, for which a dozen array operations take three times as long.
        parent = tree.parent
        path, total = [1.0] * len(tree), [0.0] * len(tree)
        factors: dict[str, float] = {}
        for node in range(1, len(tree)):
            drafter = tree.scorer[node]
            edge = self.edge(drafter, tree.depth[node], tree.lp[node])
            if record is not None:
                if drafter not in factors:
                    factors[drafter] = record.factor(drafter)
                edge = min(edge * factors[drafter], _SUREST)
            path[node] = edge
            total[parent[node]] += edge
        for node in range(1, len(tree)):  # parents come first
            path[node] *= path[parent[node]] / max(total[parent[node]], 1.0)
        return path

    def to_json(self) -> str:
        """A document that people can read and `from_json` takes."""
        drafters = {
            name: {str(depth): [list(curve.score), list(curve.accepted)] for depth, curve in own.items()}
            for name, own in self.curves.items()
        }
        document = {"format": FORMAT, "version": VERSION, "deepest": self.deepest, "drafters": drafters}
        return json.dumps(document, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The curves of a document. ValueError that says what is wrong with it."""
        try:
            document = json.loads(text)
            if document["format"] != FORMAT or document["version"] != VERSION:
                raise ValueError(f"expected {FORMAT}, version {VERSION}")
            curves = {
                name: {int(depth): Curve(*(tuple(map(float, side)) for side in pair)) for depth, pair in own.items()}
                for name, own in document["drafters"].items()
            }
            return cls(curves, int(document["deepest"]))
        except KeyError as error:
            raise ValueError(f"not a table of acceptance: {error.args[0]!r} is missing") from error
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"not a table of acceptance: {error}") from error


def fit_curve(probability: Floats, accepted: Floats, rule: FitRule, before: Curve = IDENTITY) -> Curve:
    """The calibration curve of samples `[n]`: drafter probabilities, and 0 or 1 each; `before` with too few of them.

    Samples go into bins of about equal counts, each with `rule.prior` pseudo-samples at what `before` says of it.
    """
    if len(probability) < rule.min_samples:
        return before
    order = np.argsort(probability, kind="stable")
    probability, accepted = probability[order], accepted[order]
    # Equal scores stay together: a bin begins where the score changes.
    starts = np.searchsorted(probability, probability[np.arange(rule.num_bins) * len(probability) // rule.num_bins])
    starts = np.unique(starts)
    ends = np.append(starts[1:], len(probability))
    counts = (ends - starts).astype(np.float64)
    # Within its bin whatever rounding says, so scores rise from knot to knot.
    score = np.clip(np.add.reduceat(probability, starts) / counts, probability[starts], probability[ends - 1])
    taken = np.add.reduceat(accepted, starts) + rule.prior * before(score)
    weights = counts + rule.prior
    level = non_decreasing((taken / weights).tolist(), weights.tolist())
    return Curve(tuple(score.tolist()), tuple(level))


class TextRecord:
    """How much better or worse than usual each drafter is on one text: what was accepted of it over what was expected.

    Drafters differ more between texts than between scores: prompt lookup is right twice out of three times in code and once in
    ten in free prose, at the same score. So each text starts from the common curves and soon goes its own way.
    """

    def __init__(self, *, prior: float = 3.0, half_life: float = 40.0, most: float = 2.0) -> None:
        self._prior = prior  # expected acceptances that count beforehand
        self._keep = 0.5 ** (1 / half_life)
        self._most = most
        self._sums: dict[str, tuple[float, float]] = {}  # drafter -> expected and observed acceptances, fading

    def observe(self, drafter: str, expected: float, accepted: bool) -> None:
        """One verified edge below an accepted node; `expected` is what the common curves say of it."""
        guess, seen = self._sums.get(drafter, (0.0, 0.0))
        self._sums[drafter] = (self._keep * guess + expected, self._keep * seen + accepted)

    def factor(self, drafter: str) -> float:
        """What to multiply this drafter's edges with on this text; 1 before anything is known."""
        guess, seen = self._sums.get(drafter, (0.0, 0.0))
        return min((seen + self._prior) / (guess + self._prior), self._most)


class LiveAcceptance:
    """Calibration that learns from what is verified: a bounded window of samples per drafter and depth. One owner writes."""

    def __init__(self, rule: FitRule | None = None, start: Acceptance | None = None) -> None:
        self.start = start or Acceptance(deepest=(rule or FitRule()).deepest)
        self.rule = rule or FitRule(deepest=self.start.deepest)
        if self.start.deepest != self.rule.deepest:
            raise ValueError(f"deepest = {self.rule.deepest}, but the curves to start from end at {self.start.deepest}")
        self.acceptance = self.start
        """The curves as of now; replaced, never changed."""
        self._samples: dict[str, dict[int, deque[tuple[float, bool]]]] = {}
        self._fresh: dict[str, int] = {}

    def observe(self, drafter: str, depth: int, log_prob: float, accepted: bool) -> None:
        """One verified edge below an accepted node. A NaN is passed over."""
        if math.isnan(log_prob):
            return
        depth = min(max(depth, 1), self.rule.deepest)
        own = self._samples.setdefault(drafter, {})
        own.setdefault(depth, deque(maxlen=self.rule.window)).append((math.exp(min(log_prob, 0.0)), accepted))
        self._fresh[drafter] = self._fresh.get(drafter, 0) + 1
        if self._fresh[drafter] >= self.rule.refit_every:
            self.refit(drafter)

    def observe_tree(
        self, tree: TokenTree, verified: Iterable[int], path: Sequence[int], record: TextRecord | None = None
    ) -> None:
        """All samples of one step: `verified` nodes of `tree`, and the accepted `path`, both without need of the root."""
        taken = {0, *path}
        for node in verified:
            if node and tree.parent[node] in taken:
                drafter, depth, log_prob = tree.scorer[node], tree.depth[node], tree.lp[node]
                if record is not None and not math.isnan(log_prob):
                    record.observe(drafter, self.acceptance.edge(drafter, depth, log_prob), node in taken)
                self.observe(drafter, depth, log_prob, node in taken)

    def refit(self, drafter: str) -> None:
        """Fit the curves of `drafter` to the window now."""
        own = self._samples.get(drafter, {})
        everything = [sample for samples in own.values() for sample in samples]
        curves = dict(self.start.curves.get(drafter, {}))
        overall = self._fit(everything, self.start.curve(drafter, ALL_DEPTHS))
        if len(everything) >= self.rule.min_samples:
            curves[ALL_DEPTHS] = overall
        for depth, samples in own.items():
            if len(samples) >= self.rule.min_samples:
                curves[depth] = self._fit(samples, curves.get(depth, overall))
        self._fresh[drafter] = 0
        self.acceptance = Acceptance({**self.acceptance.curves, drafter: curves}, self.rule.deepest)

    def num_samples(self, drafter: str) -> int:
        """Samples of `drafter` in the window."""
        return sum(map(len, self._samples.get(drafter, {}).values()))

    def _fit(self, samples: Iterable[tuple[float, bool]], before: Curve) -> Curve:
        pairs = np.array(list(samples), dtype=np.float64).reshape(-1, 2)
        return fit_curve(pairs[:, 0], pairs[:, 1], self.rule, before)
