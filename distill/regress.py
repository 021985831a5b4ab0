"""Ridge regression over more rows than fit into memory."""

from __future__ import annotations

import torch

_RIDGE = 1e-3  # of the mean square of each input


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
