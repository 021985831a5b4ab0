"""Bandit mode: weights that follow what was seen, by Thompson sampling.

Each arm's mean log tokens per second has a normal-inverse-gamma posterior, whose prior is worth one observation at the mean of
all arms. An arm's weight is the chance that it is the best one, found by drawing, over a floor that keeps every arm observed.
Weights are renewed every few requests rather than drawn per request, so that a key keeps its arm as long as it can.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from app.experiments.experiment import Experiment
from app.experiments.tally import ArmTally

RENEW_EVERY = 20  # requests with a rate
_DRAWS = 4000


def thompson_weights(experiment: Experiment, tallies: Mapping[str, ArmTally], seed: int) -> dict[str, float]:
    """New weights of the arms in play, summing to 1; the others' are not among them."""
    names = [arm.name for arm in experiment.in_play]
    known = [tallies[name].log_rate.estimate for name in names]
    counts = np.array([0.0 if one is None else one.count for one in known])
    means = np.array([0.0 if one is None else one.mean for one in known])
    variances = np.array([0.0 if one is None else one.variance * one.count for one in known])
    total = max(counts.sum(), 1.0)
    centre = float(counts @ means / total)
    # Normal-inverse-gamma with prior (centre, 1, 1, pooled variance), after `counts` observations.
    strength, shape = 1 + counts, 1 + counts / 2
    scale = max(float(counts @ variances / total), 1e-6) + counts * variances / 2
    scale = scale + counts * (means - centre) ** 2 / (2 * strength)
    middle = (centre + counts * means) / strength
    noise = np.random.default_rng(seed).standard_t(2 * shape, size=(_DRAWS, len(names)))
    draws = middle + noise * np.sqrt(scale / (shape * strength))
    chances = np.bincount(draws.argmax(axis=1), minlength=len(names)) / _DRAWS
    weights = experiment.floor + (1 - experiment.floor * len(names)) * chances
    return {name: float(weight) for name, weight in zip(names, weights, strict=True)}
