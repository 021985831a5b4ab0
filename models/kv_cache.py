"""Keys and values of one model as a pool of rows, one row per token, and the list of rows that a sequence owns.

A row holds the keys and values of one token in every layer. Rows are handed out when a token is forwarded; committing a step
keeps the rows of the accepted path in the sequence's list and gives the others back. Nothing is ever moved: attention gathers
by index, so the order of rows in memory means nothing, and sharing a prefix would be sharing row numbers.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

_INITIAL_CAPACITY = 256


class OutOfRows(RuntimeError):
    """The pool has fewer free rows than asked for."""


class RowPool:
    """`num_rows` rows of keys and values, `[layers, rows, kv_heads, head_dim]` each, and the books of who has which.

    On a CPU the operating system provides the memory as rows are first used: rows that never were cost nothing.
    """

    def __init__(
        self,
        num_layers: int,
        num_rows: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if num_rows < 1:
            raise ValueError(f"num_rows must be at least 1, got {num_rows}")
        shape = (num_layers, num_rows, num_kv_heads, head_dim)
        self.keys = _zeros(shape, dtype, torch.device(device))
        self.values = _zeros(shape, dtype, torch.device(device))
        self.num_rows = num_rows
        # A stack: the rows freed last are still warm in the processor's cache and are handed out first.
        self._free = list(range(num_rows - 1, -1, -1))
        self._taken = np.zeros(num_rows, dtype=bool)

    @property
    def num_free(self) -> int:
        """Rows nobody owns."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Rows owned by some sequence."""
        return self.num_rows - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` rows; raises `OutOfRows`, and takes none, if there are not enough."""
        assert count >= 0, f"{count} rows wanted"
        if count > len(self._free):
            raise OutOfRows(f"{count} rows wanted, {len(self._free)} of {self.num_rows} free")
        if count == 0:
            return []
        rows = self._free[-count:][::-1]
        del self._free[-count:]
        self._taken[rows] = True
        return rows

    @contextlib.contextmanager
    def taking(self, counts: Iterable[int]) -> Iterator[list[list[int]]]:
        """One list of rows per count, for a forward that fills them: if it raises, nobody knows of them and all go back."""
        taken: list[list[int]] = []
        try:
            for count in counts:
                taken.append(self.allocate(count))
            yield taken
        except BaseException:
            for rows in taken:
                self.release(rows)
            raise

    def release(self, rows: Iterable[int]) -> None:
        """Give rows back. Giving back a row that is not taken is a fault of ours and raises."""
        for row in rows:
            assert self._taken[row], f"row {row} released twice"
            self._taken[row] = False
            self._free.append(row)

    def check(self) -> None:
        """Assert that the free list and the books agree."""
        assert len(set(self._free)) == len(self._free), "a row is free twice"
        assert int(self._taken.sum()) == self.num_used, "rows lost"
        assert not self._taken[self._free].any() if self._free else True, "a free row is marked as taken"


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros whose pages are not touched yet; torch's own zeros write them all, gigabytes of them at start."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)


class RowList:
    """Rows of one sequence in position order: entry `i` holds the token at position `i`."""

    def __init__(self) -> None:
        self._rows = np.empty(_INITIAL_CAPACITY, dtype=np.int64)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def extend(self, rows: Sequence[int]) -> None:
        """Append rows for the next positions."""
        end = self._length + len(rows)
        if end > len(self._rows):
            grown = np.empty(max(end, 2 * len(self._rows)), dtype=np.int64)
            grown[: self._length] = self._rows[: self._length]
            self._rows = grown
        self._rows[self._length : end] = rows
        self._length = end

    def truncate(self, length: int) -> list[int]:
        """Drop every row from position `length` on and return the dropped ones."""
        assert length >= 0, f"cannot keep {length} rows"
        dropped: list[int] = self._rows[length : self._length].tolist()
        self._length = min(length, self._length)
        return dropped

    def view(self) -> np.ndarray:
        """The rows as an int64 array, a view that is valid until the next `extend`."""
        return self._rows[: self._length]
