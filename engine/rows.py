"""The target's distributions at the nodes of a tree, each made when a rule looks at it.

A rule that walks down looks at one node more than it accepts, a handful of 64, and turning the other rows of a large
vocabulary into probabilities would cost a CPU more than everything else that is decided. On an accelerator all rows at once
are as fast as one.
"""

from __future__ import annotations

import torch

from models.sampling import SamplingParams, probabilities
from verify.base import Rows


class ProbabilityRows:
    """:func:`models.sampling.probabilities` of logits ``[nodes, vocab]``, row by row; see :class:`verify.base.Rows`."""

    def __init__(self, logits: torch.Tensor, params: SamplingParams) -> None:
        """Nothing is computed yet."""
        self._logits = logits
        self._params = params
        self.shape = logits.shape
        self.ndim = logits.ndim
        self.device = logits.device

    def __getitem__(self, index: int, /) -> torch.Tensor:
        """``[vocab]``: the distribution at one node."""
        return probabilities(self._logits[index, None], self._params)[0]


def probability_rows(logits: torch.Tensor, params: SamplingParams) -> Rows:
    """``[nodes, vocab]`` distributions, in the way that suits the device."""
    return ProbabilityRows(logits, params) if logits.device.type == "cpu" else probabilities(logits, params)
