"""A head's first weights in closed form: what can be said linearly about the target's next hidden state.

Its layers begin as the target's last ones. What they need as input is the hidden state that the target would have in the layer
below them at the *next* token; given the target's hidden states at this token and the embedding of the next, ridge regression
finds the best linear guess. With it, a head agrees with its target before the first training step about as well as after a
hundred thousand tokens of training from a random beginning (figures in docs/experiments.md).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

_RIDGE = 1e-3  # of the mean square of each input
_SKIPPED = 4  # tokens at the beginning of a text, where models keep hidden states of an extraordinary size


class Regression:
    """Normal equations of `outputs = inputs @ weights`, summed up over batches."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        self._gram = torch.zeros(num_inputs, num_inputs)
        self._cross = torch.zeros(num_inputs, num_outputs)
        self._count = 0

    def add(self, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        """Rows `[n, num_inputs]` and `[n, num_outputs]`, float32."""
        self._gram.addmm_(inputs.T, inputs)
        self._cross.addmm_(inputs.T, outputs)
        self._count += len(inputs)

    def solve(self) -> torch.Tensor:
        """The weights `[num_inputs, num_outputs]`. ValueError without rows."""
        if not self._count:
            raise ValueError("a regression needs at least one row")
        ridge = _RIDGE * self._gram.diagonal() + 1e-6 * self._count
        return torch.linalg.solve(self._gram + torch.diag(ridge), self._cross)


def skip_beginning(texts: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors `[texts, length, …]` without their first positions."""
    return [text[:, _SKIPPED:] for text in texts]
