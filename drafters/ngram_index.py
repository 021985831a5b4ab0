"""Where did these few tokens come up before? An index over a growing text that forgets its oldest part.

For each length n from one to five, a table of heads, addressed by a hash of n tokens, holds the latest position that follows
such an n-gram, and per position there is a link to the one before it in the same chain, as compressors of the LZ77 family
keep them. The text itself stays with the caller, who hands it in with each call; every occurrence is compared with it, so a
hash collision costs time and never makes a wrong match.

Bounds:
    *Memory.* 4 bytes for each of five links and ten heads: :data:`BYTES_PER_TOKEN` = 60 per token of capacity, and a few
    kilobytes. The capacity is a power of two above the text's length, at least 1024, and at most the window. Positions older
    than the window are no longer found; their links are overwritten.
    *Time.* A token is indexed in constant time, a lookup follows at most :data:`MAX_STEPS` links per length. When the text
    outgrows the capacity the index starts over in larger tables and reads the text again, in the pieces that its caller
    allows: less than one more reading in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MAX_N = 5
"""Longest n-gram."""
LOOK_BACK = 32
"""Occurrences of an n-gram that a lookup reports, the most recent ones."""
MAX_STEPS = 64
"""Links that a lookup of one n-gram follows, those of other n-grams with the same hash included."""
BYTES_PER_TOKEN = 4 * MAX_N * 3
"""Of capacity: a link and two heads for each length."""

_LEAST_CAPACITY = 1024
_FEW = 16  # up to here a loop is faster than the fixed cost of array operations
_FACTOR = 0x9E3779B97F4A7C15  # odd, bits well mixed: 2**64 divided by the golden ratio
_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Followers:
    """What followed a context: how often each token did, and where last."""

    length: int  # tokens of the context, at least 1
    total: int  # occurrences looked at, at least 1; by_token may count fewer, where some ended a document
    by_token: dict[int, tuple[int, int]]  # token -> (times, a position of it in the text), most recent first


class NgramIndex:
    """All n-grams of ``text[start:end]``, n from one to five, whose next token is in that range too.

    Every method is given the same text, which only ever grows. So the text's own end is never a match.
    """

    __slots__ = ("_head_rows", "_heads", "_link_rows", "_links", "_shift", "capacity", "end", "start", "window")

    def __init__(self, window: int) -> None:
        """An index of nothing, without memory. `window`: most tokens it covers; ValueError unless at least 1."""
        if window < 1:
            raise ValueError(f"window must be at least 1, not {window}")
        self.window = window
        self.clear()

    def __len__(self) -> int:
        """Number of tokens covered."""
        return self.end - self.start

    @property
    def num_bytes(self) -> int:
        """Memory held by the tables."""
        return self._links.nbytes + self._heads.nbytes

    def clear(self) -> None:
        """Forget everything and give the memory back."""
        self.start = self.end = 0
        self._allocate(0)

    def read(self, text: Sequence[int], limit: int) -> int:
        """Index up to `limit` more tokens of `text`, in order; returns how many were read.

        What would be forgotten before the end of the text is reached is not read at all.
        """
        assert self.end <= len(text), f"the text shrank from {self.end} to {len(text)} tokens"
        if len(text) - self.end > self.window:
            self.start = self.end = len(text) - self.window
        if self.capacity < min(len(text) - self.start, self.window):
            size = max(1 << (len(text) - self.start).bit_length(), _LEAST_CAPACITY)
            self._allocate(min(size, self.window))
            self.end = self.start
        count = min(limit, len(text) - self.end)
        if count > _FEW:
            self._insert(text, self.end, self.end + count)
        else:
            for position in range(self.end, self.end + count):
                self._push(text, position)
        self.end += count
        self.start = max(self.start, self.end - self.window)
        return count

    def followers(self, text: Sequence[int], context: Sequence[int], position: int | None = None) -> Followers | None:
        """What followed the last :data:`LOOK_BACK` occurrences of `context`, one to five tokens; None if it has none.

        `context` need not be part of the text. `position` is what `latest` says of it, where that is known.
        """
        n, sought = len(context), list(context)
        if position is None:
            position = self.latest(context)[-1]
        links = self._link_rows[n - 1]
        total, by_token = 0, dict[int, tuple[int, int]]()
        for _ in range(MAX_STEPS):
            if position - n < self.start:  # forgotten, or 0, which ends a chain: nothing precedes position 0
                break
            if list(text[position - n : position]) == sought:
                token = text[position]
                times, last = by_token.get(token, (0, position))
                by_token[token] = (times + 1, last)
                total += 1
                if total == LOOK_BACK:
                    break
            position = links[position % self.capacity]
        return Followers(n, total, by_token) if total else None

    def latest(self, context: Sequence[int]) -> list[int]:
        """By n from one up: where the search for the last n tokens of `context`, at most five, begins. 0: they are nowhere.

        Most n-grams that are sought never came up, and this says so of all lengths for less than one search.
        """
        if not self.capacity:
            return [0] * len(context)
        found, key, shift = [], 0, self._shift
        for heads, token in zip(self._head_rows, reversed(context), strict=False):
            key = (key + token + 1) * _FACTOR & _MASK
            found.append(heads[key >> shift])
        return found

    def _allocate(self, capacity: int) -> None:
        self.capacity = capacity
        num_heads = 1 << (2 * capacity).bit_length() - 1 if capacity else 0  # the largest power of two up to twice as many
        self._shift = 64 - max(num_heads.bit_length() - 1, 0)
        self._links = np.zeros((MAX_N, capacity), np.int32)
        self._heads = np.zeros((MAX_N, num_heads), np.int32)
        # Single elements are read many times faster through a memoryview than through the array.
        self._link_rows = [row.data for row in self._links]
        self._head_rows = [row.data for row in self._heads]

    def _push(self, text: Sequence[int], position: int) -> None:
        """Index the n-grams that end before `position`."""
        slot, key = position % self.capacity, 0
        for n in range(1, min(MAX_N, position - self.start) + 1):
            key = (key + text[position - n] + 1) * _FACTOR & _MASK
            heads = self._head_rows[n - 1]
            self._link_rows[n - 1][slot] = heads[key >> self._shift]
            heads[key >> self._shift] = position

    def _insert(self, text: Sequence[int], begin: int, stop: int) -> None:
        """The same for every position from `begin` to before `stop` at once."""
        first = max(self.start, begin - MAX_N)
        tokens = np.array(text[first:stop], np.uint64) + np.uint64(1)
        keys = np.zeros(stop - begin, np.uint64)
        for n in range(1, MAX_N + 1):
            least = max(begin, self.start + n)  # positions before it have fewer than n tokens in front of them
            if least >= stop:
                break
            keys = (keys[len(keys) - (stop - least) :] + tokens[least - n - first : stop - n - first]) * np.uint64(_FACTOR)
            buckets = (keys >> np.uint64(self._shift)).astype(np.int64)
            order = np.argsort(buckets, kind="stable")
            buckets, positions = buckets[order], (least + order).astype(np.int32)
            linked = self._heads[n - 1][buckets]
            same = buckets[1:] == buckets[:-1]
            linked[1:][same] = positions[:-1][same]
            self._links[n - 1][positions % self.capacity] = linked
            is_last = np.append(~same, True)
            self._heads[n - 1][buckets[is_last]] = positions[is_last]
