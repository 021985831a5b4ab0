"""Prices that follow the machine: a cost profile, and how far the clock has moved away from it since.

A profile is measured once; later other programs take cores, the processor gets warm, and what was measured on a busy machine
was wrong in the first place. The correction is a sum of terms in log(measured / predicted):

    machine     of all models alike
    model       of one model
    load        of one model with so many sequences, told apart by powers of two
    shape       of one model over so many rows, straight between powers of two

Every forward is compared with what is believed of it, and each of its four terms takes a share of the difference; all together
follow it as one exponential mean would. Because the common terms take most of it, what is learned of one size of forward
holds for those that nobody asks for at the moment; because the others take some, a profile with a wrong shape is put right
where it is used.

Traps: A forward that is believed to be dear is not asked for, and so never measured again. A model's own term therefore fades
while other models are measured, back to the profile and the machine's common term, and a size that was never seen is
corrected like the next smaller one that was. A single pause is cut before it enters, and the whole correction stays within
bounds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from scheduler.cost import CostProfile

_SHARES = {"machine": 0.3, "model": 0.35, "load": 0.2, "shape": 0.15}
"""Of a difference between clock and belief, by term; they sum to 1."""
_KNOTS = 12  # of a shape: 1, 2, 4, … rows; beyond the last it is level
_HEARSAY = 4.0  # forwards that the next smaller size speaks for a size


@dataclass(frozen=True, slots=True)
class DriftRule:
    """How fast and how far corrections go."""

    half_life: float = 32.0  # forwards after which a measurement counts half
    cut: float = 3.0  # factor to what is believed that a single measurement is cut to
    limit: float = 16.0  # factor that a correction is cut to
    fading: float = 512.0  # forwards of other models after which a model's own term counts half

    def __post_init__(self) -> None:
        for name in ("half_life", "fading"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("cut", "limit"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 1):
                raise ValueError(f"{name} must be a factor of at least 1, got {getattr(self, name)}")


class _Shape:
    """A term over the number of rows. A size of which little was seen believes the next smaller one."""

    def __init__(self) -> None:
        self._seen = [0.0] * _KNOTS  # forwards, each shared by the two knots beside it
        self._own = [0.0] * _KNOTS
        self.level = [0.0] * _KNOTS

    def at(self, rows: int) -> float:
        """The term for `rows` rows."""
        below, share = _place(rows)
        return (1 - share) * self.level[below] + share * self.level[min(below + 1, _KNOTS - 1)]

    def move(self, rows: int, difference: float) -> None:
        """Take in `difference` where `rows` are."""
        below, share = _place(rows)
        for knot, weight in ((below, 1 - share), (min(below + 1, _KNOTS - 1), share)):
            self._seen[knot] += weight
            # So that the term at `rows`, a mean of both, moves by the whole difference.
            self._own[knot] += difference * weight / ((1 - share) ** 2 + share**2)
        level, below_seen = 0.0, 0.0
        for knot, (seen, own) in enumerate(zip(self._seen, self._own, strict=True)):
            heard = min(_HEARSAY, below_seen)
            if seen or heard:
                level = (seen * own + heard * level) / (seen + heard)
            self.level[knot] = level
            below_seen += seen


class LiveCosts:
    """A profile with corrections. One owner writes; what it remembers is a few numbers per model and load."""

    def __init__(self, profile: CostProfile, rule: DriftRule | None = None) -> None:
        self.profile = profile
        self.rule = rule or DriftRule()
        self._gain = 1 - 0.5 ** (1 / self.rule.half_life)
        self._fade = 0.5 ** (1 / self.rule.fading)
        self._cut, self._limit = math.log(self.rule.cut), math.log(self.rule.limit)
        self._machine = 0.0
        self._model = dict.fromkeys(profile.models, 0.0)
        self._load: defaultdict[tuple[str, int], float] = defaultdict(float)
        self._shape = {model: _Shape() for model in profile.models}
        self._latest = dict.fromkeys(profile.models, 0.0)
        # Prices asked for since the last forward: a step asks for few, often. A look from another thread may leave one that is
        # a step old.
        self._asked: dict[tuple[str, int, int, int], float] = {}

    def observe(self, model: str, rows: int, sequences: int, context: int, ms: float) -> None:
        """A forward took `ms`. What no clock can mean (NaN, infinite, not positive) is passed over.

        KeyError for a model that is not in the profile.
        """
        predicted = self.profile.ms(model, rows, sequences=sequences, context=context)
        self.compare(model, predicted, ms, rows=rows, sequences=sequences)

    def compare(self, model: str, predicted: float, ms: float, *, rows: int, sequences: int) -> None:
        """As `observe`, for work that the profile itself, without correction, puts at `predicted` milliseconds."""
        if not (math.isfinite(ms) and ms > 0):
            return
        difference = math.log(ms) - math.log(predicted) - self._log_factor(model, rows, sequences)
        step = self._gain * min(max(difference, -self._cut), self._cut)
        self._machine += _SHARES["machine"] * step
        for other in self._model:
            self._model[other] *= 1.0 if other == model else self._fade
        self._model[model] += _SHARES["model"] * step
        self._load[model, sequences.bit_length()] += _SHARES["load"] * step
        self._shape[model].move(rows, _SHARES["shape"] * step)
        # Terms do not go on growing behind the bounds of their sum, or they would take as long to come back.
        total = self._common(model, sequences) + self._shape[model].at(rows)
        self._latest[model] = self._within(total)
        self._model[model] += self._latest[model] - total
        self._asked.clear()

    def drift(self, model: str) -> float:
        """Measured over predicted, as of the model's last forward: 1 is as profiled, 2 twice as slow."""
        return math.exp(self._latest[model])

    def ms(self, model: str, rows: int, *, sequences: int = 1, context: int = 0) -> float:
        """Milliseconds of a forward, corrected."""
        key = (model, rows, sequences, context)
        known = self._asked.get(key)
        if known is None:
            factor = math.exp(self._log_factor(model, rows, sequences))
            known = self._asked[key] = factor * self.profile.ms(model, rows, sequences=sequences, context=context)
        return known

    def curve(self, model: str, rows: Iterable[int], *, sequences: int = 1, context: int = 0) -> list[float]:
        """Milliseconds of each of `rows`, ascending, corrected; never falling, which `ms` alone does not promise."""
        return list(accumulate((self.ms(model, count, sequences=sequences, context=context) for count in rows), max))

    def _common(self, model: str, sequences: int) -> float:
        """The terms that do not depend on the rows."""
        return self._machine + self._model[model] + self._load.get((model, sequences.bit_length()), 0.0)

    def _log_factor(self, model: str, rows: int, sequences: int) -> float:
        return self._within(self._common(model, sequences) + self._shape[model].at(rows))

    def _within(self, total: float) -> float:
        return min(max(total, -self._limit), self._limit)


def _place(rows: int) -> tuple[int, float]:
    """The knot below `rows`, and how far on the way to the next one they are."""
    exact = min(math.log2(rows), _KNOTS - 1)
    below = int(exact)
    return below, exact - below
