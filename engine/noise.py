"""The random numbers that verification draws for one request: a function of its seed and the output position."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from models.sampling import random_exponentials, random_uniform


@dataclass(frozen=True, slots=True)
class TargetNoise:
    """:class:`verify.base.Noise` for a tree whose root is followed by output position `position`.

    What is drawn at a position depends on nothing else, so neither the shape of a tree nor the number of tokens that
    earlier trees were accepted for can change the text.
    """

    seed: int  # the request's, a signed 64-bit integer
    position: int  # of the token after the root: the number of tokens written so far

    def uniform(self, depth: int) -> float:
        """A number in [0, 1) for output position ``position + depth``."""
        return random_uniform(self.seed, self.position + depth, "target")

    def exponentials(self, depth: int, size: int) -> torch.Tensor:
        """``[size]`` float32 standard exponentials on the CPU for output position ``position + depth``."""
        return random_exponentials(self.seed, self.position + depth, "target-race", size)
