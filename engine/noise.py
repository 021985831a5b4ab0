"""The random numbers of one request: functions of its seed and the output position.

Drawn trees and verification use different purposes and so never share a number. What belongs to an output position is drawn
again by nobody, since a position is emitted once; so where the target alone decides, drafters may look at its numbers
(:mod:`drafters.race`), which the text does not notice. What a step may use for tokens beyond those it emits (draws of a tree,
accept tests from the leaves up) belongs to the step, that is to the position of its root and a depth: the next step starts
at another position and finds other numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from models.sampling import random_exponentials, random_uniform


@dataclass(frozen=True, slots=True)
class TargetNoise:
    """:class:`verify.base.Noise` for a tree whose root is followed by output position `position`.

    What is drawn at a position depends on nothing else. Under the rules that only sample from the target, neither the
    shape of a tree nor the number of tokens that earlier trees were accepted for can change the text.
    """

    seed: int  # the request's, a signed 64-bit integer
    position: int  # of the token after the root: the number of tokens written so far
    least: int = 0  # exponentials are made for so many tokens, however few are asked for: others will ask for the rest
    made: dict[int, torch.Tensor] = field(default_factory=dict, compare=False)
    """Exponentials by output position, for whoever asks again. Who keeps it from step to step drops what lies behind."""

    def uniform(self, depth: int) -> float:
        """A number in [0, 1) for output position ``position + depth``."""
        return random_uniform(self.seed, self.position + depth, "target")

    def exponentials(self, depth: int, size: int) -> torch.Tensor:
        """``[size]`` float32 standard exponentials on the CPU for output position ``position + depth``. Read only."""
        place = self.position + depth
        known = self.made.get(place)
        if known is None or len(known) < size:
            known = self.made[place] = random_exponentials(self.seed, place, "target-race", max(size, self.least))
        return known[:size]  # a token has the same number whatever the size

    def uniforms(self, depth: int, size: int) -> list[float]:
        """`size` numbers in [0, 1) for the accept tests at `depth` in the step whose root `position` follows."""
        return [random_uniform(self.seed, self.position, f"target-test {depth} {index}") for index in range(size)]


@dataclass(frozen=True, slots=True)
class DraftNoise:
    """:data:`tree.growth.Uniform` for a tree whose root is followed by output position `position`."""

    seed: int  # the request's, a signed 64-bit integer
    position: int  # of the token after the root

    def __call__(self, depth: int, index: int) -> float:
        """A number in [0, 1) for draw `index` among the children of the nodes at `depth`."""
        return random_uniform(self.seed, self.position, f"draft {depth} {index}")
