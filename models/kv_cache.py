"""Keys and values of one model as a pool of rows, one row per token, and the list of rows that a sequence owns.

A row holds the keys and values of one token in every layer. Rows are handed out when a token is forwarded; committing a step
keeps the rows of the accepted path in the sequence's list and gives the others back. Nothing is ever moved: attention gathers
by index, so the order of rows in memory means nothing, and sharing a prefix is sharing row numbers: a row counts its owners
and is free again when the last of them has given it back (:mod:`models.prefix_cache`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch

_INITIAL_CAPACITY = 256


class OutOfRows(RuntimeError):
    """The pool has fewer free rows than asked for."""


class Reserve(Protocol):
    """Who owns rows that nobody is using, and gives them up when they are needed."""

    @property
    def num_unused(self) -> int:
        """Rows that `evict` would free."""

    def evict(self, count: int) -> None:
        """Give `count` of them back to the pool."""


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
        self._owners = np.zeros(num_rows, dtype=np.int32)
        self._highest = -1  # row that was ever handed out; the lower ones were before it
        self.reserve: Reserve | None = None

    @property
    def num_free(self) -> int:
        """Rows nobody owns."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Rows owned by some sequence or by the reserve."""
        return self.num_rows - len(self._free)

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows that have been used so far, which is what a pool on a CPU takes of memory by now."""
        return 2 * (self._highest + 1) * self.keys[:, 0].numel() * self.keys.element_size()

    @property
    def num_available(self) -> int:
        """Rows that can be taken: the free ones, and those that the reserve would give up."""
        return len(self._free) + (self.reserve.num_unused if self.reserve is not None else 0)

    def allocate(self, count: int) -> list[int]:
        """Take `count` rows, of the reserve only what is missing; raises `OutOfRows`, and takes none, if there are too few."""
        assert count >= 0, f"{count} rows wanted"
        if count > self.num_available:
            raise OutOfRows(f"{count} rows wanted, {self.num_available} of {self.num_rows} free or unused")
        if count == 0:
            return []
        if count > len(self._free):
            assert self.reserve is not None, "counted as available"
            self.reserve.evict(count - len(self._free))
        rows = self._free[-count:][::-1]
        del self._free[-count:]
        self._owners[rows] = 1
        self._highest = max(self._highest, max(rows))
        return rows

    def share(self, rows: Sequence[int] | np.ndarray) -> None:
        """Count one owner more of each of these rows, which have owners; no row twice in one call."""
        index = np.asarray(rows, dtype=np.int64)
        assert bool((self._owners[index] > 0).all()), "a free row cannot be shared"
        self._owners[index] += 1

    def owners(self) -> np.ndarray:
        """How many owners each row has, int32 `[num_rows]`; a copy."""
        return self._owners.copy()

    def num_sound(self, rows: Sequence[int]) -> int:
        """How many of these rows, from the first on, hold finite numbers only."""
        if not rows:
            return 0
        index = torch.tensor(rows, dtype=torch.int64, device=self.keys.device)
        total = torch.zeros(len(rows), dtype=torch.float32, device=self.keys.device)
        for layer in range(len(self.keys)):
            for part in (self.keys, self.values):  # a sum is NaN or infinite if one of its numbers is
                total += part[layer].index_select(0, index).sum(dim=(1, 2), dtype=torch.float32)
        broken = total.isfinite().logical_not().nonzero()
        return int(broken[0]) if len(broken) else len(rows)

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
        """Give rows back, each by one of its owners. Giving back a row that nobody owns is a fault of ours and raises."""
        owners = self._owners
        for row in rows:
            left = owners[row] - 1
            assert left >= 0, f"row {row} released twice"
            owners[row] = left
            if left == 0:
                self._free.append(row)

    def check(self) -> None:
        """Assert that the free list and the books agree."""
        assert len(set(self._free)) == len(self._free), "a row is free twice"
        assert int((self._owners > 0).sum()) == self.num_used, "rows lost"
        assert int(self._owners.min()) >= 0, "a row was given back too often"
        assert not self._owners[self._free].any() if self._free else True, "a free row has an owner"


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

    def replace(self, start: int, rows: Sequence[int]) -> list[int]:
        """Put other rows of the same tokens in the place of those from position `start` on, and return these."""
        part = self._rows[start : min(start + len(rows), self._length)]
        assert len(part) == len(rows), f"{len(rows)} rows at {start} of {self._length}"
        replaced: list[int] = part.tolist()
        part[:] = rows
        return replaced

    def truncate(self, length: int) -> list[int]:
        """Drop every row from position `length` on and return the dropped ones."""
        assert length >= 0, f"cannot keep {length} rows"
        dropped: list[int] = self._rows[length : self._length].tolist()
        self._length = min(length, self._length)
        return dropped

    def view(self) -> np.ndarray:
        """The rows as an int64 array, a view that is valid until the next `extend`."""
        return self._rows[: self._length]
