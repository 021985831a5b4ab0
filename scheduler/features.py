"""What a tree in the making says about whether the medium drafter is worth its call, as a fixed row of numbers.

Signals of TreeGraft's released scheduler (2608.26112) and some of ours, before drafting step k + 1 of at most D. *Current* is
the frontier that the small drafter would expand next, *would-be* the one the medium would, by the scores as they are: nothing
is computed for it. Probabilities are path probabilities as the drafters see them.

Left out on purpose: milliseconds, since a rule should outlive the machine that it was fitted on; only their ratio is there.
What matched how long in a lookup is not known here; the probability of the best first token carries most of it, since the
n-gram drafter's scores are made of match lengths.

    row = features(growth.tree, current, would_be, Moment(context=800, step=1, steps=5))
    row[FEATURES.index("top_probability")]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tree.tree import TokenTree

Row = tuple[float, ...]
"""One number per name in `FEATURES`, all finite."""

FEATURES: tuple[str, ...] = (
    "log_context",  # log(1 + tokens of the text)
    "log_cost_ratio",  # log(price of a medium call / price of a target forward)
    "step_share",  # k / D
    "calls_share",  # medium calls so far / D
    "steps_since_call",  # drafting steps since the medium was asked last; k + 1 if it was not
    "accepted_mean",  # exponential mean of accepted drafted tokens per step
    "num_nodes",  # log of the nodes, root included
    "mean_depth",  # of the current frontier
    "leaf_share",  # of the current frontier that has no children
    "collapse_debt",  # mean depth of the current minus that of the would-be frontier, at least 0
    "earlier_share",  # of the would-be frontier that lies above the newest layer
    "overlap",  # of the would-be frontier that is in the current one
    "mean_log_score",  # of the would-be frontier, log-probabilities of at least -20
    "top_probability",  # of the likeliest node of the current frontier
    "top_gap",  # how much likelier than the second it is
    "entropy",  # of the current frontier's probabilities, normalized, nats
    "current_mass",  # their sum
    "expected_tokens",  # sum of the path probabilities of all drafted nodes
    "first_probability",  # of the likeliest first token; 0: nothing drafted
)
"""Names in the order of a row. Append only: rule files name their signals."""

_LEAST_SCORE = -20.0  # a node that was never scored has -inf


@dataclass(frozen=True, slots=True)
class Moment:
    """What is known beside the tree."""

    context: int  # tokens of the verified text
    step: int  # k, drafting steps done in this decoding step
    steps: int  # D, drafting steps there may be
    calls: Sequence[int] = ()  # drafting steps, from 0, that were the medium's
    accepted_mean: float = 0.0  # see `FEATURES`; starts at 0
    cost_ratio: float = 1.0  # price of a medium call / price of a target forward

    def __post_init__(self) -> None:
        if self.context < 0 or not 0 <= self.step <= self.steps or self.steps < 1:
            raise ValueError(f"{self}: needs context >= 0, steps >= 1 and step within them")
        if not (math.isfinite(self.cost_ratio) and self.cost_ratio > 0):
            raise ValueError(f"cost_ratio must be positive and finite, got {self.cost_ratio}")


def features(tree: TokenTree, current: Sequence[int], would_be: Sequence[int], moment: Moment) -> Row:
    """The row of one moment. `current` and `would_be` are nodes; either may be empty."""
    score, depth = tree.score, tree.depth
    num_current, num_wanted = len(current), len(would_be)
    probabilities = sorted((math.exp(score[node]) for node in current), reverse=True)
    mass = sum(probabilities)
    top = probabilities[0] if probabilities else 0.0
    second = probabilities[1] if num_current > 1 else 0.0
    entropy = -sum(p / mass * math.log(p / mass) for p in probabilities if p > 0.0) if mass > 0.0 else 0.0
    current_depth = sum(depth[node] for node in current) / num_current if current else 0.0
    wanted_depth = sum(depth[node] for node in would_be) / num_wanted if would_be else current_depth
    inside = set(current)
    newest = max((depth[node] for node in current), default=0)
    last_call = moment.calls[-1] if moment.calls else -1
    return (
        math.log1p(moment.context),
        math.log(moment.cost_ratio),
        moment.step / moment.steps,
        len(moment.calls) / moment.steps,
        float(moment.step - last_call),
        moment.accepted_mean,
        math.log(len(tree)),
        current_depth,
        sum(not tree.children[node] for node in current) / num_current if current else 0.0,
        max(current_depth - wanted_depth, 0.0),
        sum(depth[node] < newest for node in would_be) / num_wanted if would_be else 0.0,
        sum(node in inside for node in would_be) / num_wanted if would_be else 0.0,
        sum(max(score[node], _LEAST_SCORE) for node in would_be) / num_wanted if would_be else _LEAST_SCORE,
        top,
        top - second,
        entropy,
        mass,
        sum(map(math.exp, score)) - 1.0,
        max((math.exp(score[node]) for node in tree.children[0].values()), default=0.0),
    )


def moving_mean(before: float, accepted: int, weight: float = 0.3) -> float:
    """`accepted_mean` after a step that accepted so many drafted tokens."""
    return (1.0 - weight) * before + weight * accepted
