"""Choosing a schedule's parameters while serving: a bandit over a small grid, rewarded with tokens over time.

Meant for TALON's budget N and gate mu (2601.07353), whose best values depend on the model pair, the machine and the traffic.
An *arm* is one point of the grid. It is played for a block of steps; its reward is the block's tokens per millisecond, over
what plain decoding would have made, so that long contexts and other load do not look like bad parameters.

The rule is UCB with forgetting (discounted UCB, 0805.3415): a reward's weight halves every `half_life` blocks, so an arm that
was best for code does not stay best for prose for ever. What is uncertain is tried: an arm's index is its mean plus `explore *
scale * sqrt(log(total weight) / weight)`, the scale being the spread of all rewards seen. Before the index counts, all arms are
played once in an order that `seed` decides. Without rewards that differ nothing is explored beyond that.

Bounds. A few numbers per arm are kept, however long the server runs. Forgetting has a price: since an arm's weight fades, it is
played again about every time its bonus has grown to its distance from the best, for ever.

    tuner = Tuner(talon_grid(budget=60))
    arm = tuner.arm                                      # parameters for the next step
    tuner.observe(tokens=4, seconds=0.05, plain_s=0.02)  # of a step with them
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tree.policies.talon import Talon


@dataclass(frozen=True, slots=True)
class Arm:
    """One point of the grid."""

    budget: int  # N, nodes verified per step, root included
    mu: float  # gate

    def __post_init__(self) -> None:
        if self.budget < 2 or not 0.0 < self.mu <= 1.0:
            raise ValueError(f"an arm needs budget >= 2 and mu in (0, 1], got {self}")

    def applied(self, policy: Talon) -> Talon:
        """The policy with these parameters; the first layer never takes more than a quarter of the budget."""
        return replace(policy, budget=self.budget, mu=self.mu, first_width=min(policy.first_width, max(self.budget // 4, 1)))


@dataclass(frozen=True, slots=True)
class TuningRule:
    """How an arm is chosen."""

    block: int = 32  # steps per play
    half_life: float = 64.0  # plays after which a reward counts half
    explore: float = 0.7
    seed: int = 0

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ValueError(f"block must be at least 1, got {self.block}")
        if not (math.isfinite(self.half_life) and self.half_life > 0):
            raise ValueError(f"half_life must be positive, got {self.half_life}")
        if not (math.isfinite(self.explore) and self.explore >= 0):
            raise ValueError(f"explore must not be negative, got {self.explore}")


@dataclass(frozen=True, slots=True)
class ArmState:
    """What is known of one arm."""

    arm: Arm
    plays: int  # in all
    weight: float  # of its rewards, forgetting included
    speed: float | None  # mean reward: tokens over time, relative to plain decoding; None: not played yet


class Tuner:
    """One bandit, of one server. One owner writes; the same rewards and seed give the same choices."""

    def __init__(self, arms: Sequence[Arm], rule: TuningRule | None = None) -> None:
        """ValueError for no arms, or for one that is there twice."""
        if not arms or len(set(arms)) != len(arms):
            raise ValueError(f"arms must be distinct, and at least one, got {tuple(arms)}")
        self.arms = tuple(arms)
        self.rule = rule or TuningRule()
        self._keep = 0.5 ** (1.0 / self.rule.half_life)
        self._plays = [0] * len(arms)
        self._weight = [0.0] * len(arms)
        self._sum = [0.0] * len(arms)
        self._squares = 0.0  # of all rewards, forgetting included
        self._untried = list(range(len(arms)))
        random.Random(self.rule.seed).shuffle(self._untried)
        self._at = self._untried.pop()
        self._steps = 0
        self._plain_s = self._own_s = 0.0

    @property
    def arm(self) -> Arm:
        """The parameters of the next step."""
        return self.arms[self._at]

    @property
    def best(self) -> Arm:
        """The arm with the largest mean reward so far; the current one before any."""
        played = [index for index, weight in enumerate(self._weight) if weight > 0.0]
        return self.arms[max(played, key=self._mean)] if played else self.arm

    @property
    def states(self) -> list[ArmState]:
        """Every arm as of now, in the order of the grid; for metrics."""
        return [
            ArmState(arm, plays, weight, self._mean(index) if plays else None)
            for index, (arm, plays, weight) in enumerate(zip(self.arms, self._plays, self._weight, strict=True))
        ]

    def export(self) -> dict[str, float]:
        """Flat numbers by name, for a scrape: ``budget=16,mu=0.03 speed`` and so on; arms not played yet have no speed."""
        numbers: dict[str, float] = {}
        for state in self.states:
            name = f"budget={state.arm.budget},mu={state.arm.mu:g}"
            numbers[f"{name} plays"] = float(state.plays)
            if state.speed is not None:
                numbers[f"{name} speed"] = state.speed
        return numbers

    def observe(self, tokens: float, seconds: float, plain_s: float) -> bool:
        """One step of the current arm is over; whether the arm of the next step was chosen anew.

        Args:
            tokens: emitted by the step, the target's own one included.
            seconds: that it took, drafting included.
            plain_s: seconds that plain decoding takes per token now.

        What no clock can mean (NaN, infinite, not positive) is passed over.
        """
        if not all(math.isfinite(value) and value > 0 for value in (tokens, seconds, plain_s)):
            return False
        self._plain_s += tokens * plain_s
        self._own_s += seconds
        self._steps += 1
        if self._steps < self.rule.block:
            return False
        self._reward(self._plain_s / self._own_s)
        self._steps, self._plain_s, self._own_s = 0, 0.0, 0.0
        self._at = self._untried.pop() if self._untried else self._choose()
        return True

    def _reward(self, reward: float) -> None:
        for index in range(len(self.arms)):
            self._weight[index] *= self._keep
            self._sum[index] *= self._keep
        self._squares = self._keep * self._squares + reward * reward
        self._plays[self._at] += 1
        self._weight[self._at] += 1.0
        self._sum[self._at] += reward

    def _mean(self, index: int) -> float:
        return self._sum[index] / self._weight[index]

    def _choose(self) -> int:
        total = sum(self._weight)
        mean = sum(self._sum) / total
        scale = math.sqrt(max(self._squares / total - mean * mean, 0.0))
        bonus = self.rule.explore * scale * math.sqrt(max(math.log(total), 0.0))
        # max takes the first of equals; the current arm stands first, so that ties, rounding aside, move nothing.
        order = [self._at, *(index for index in range(len(self.arms)) if index != self._at)]
        return max(order, key=lambda index: round((self._mean(index) + bonus / math.sqrt(self._weight[index])) / mean, 6))


def talon_grid(budget: int, *, gates: Sequence[float] = (0.01, 0.03, 0.1, 0.3)) -> tuple[Arm, ...]:
    """All pairs of a gate and a quarter, half, three quarters or all of `budget`, the largest that is allowed."""
    if budget < 2:
        raise ValueError(f"budget must be at least 2 (the root and a node), got {budget}")
    sizes = sorted({max(budget * quarters // 4, 2) for quarters in (1, 2, 3, 4)})
    return tuple(Arm(size, gate) for size in sizes for gate in gates)
