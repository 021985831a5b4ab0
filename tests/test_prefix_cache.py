"""The cache of beginnings by itself: whose rows they are, who may give them up, and that no text ever gets another one's."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from models import prefix_cache
from models.kv_cache import OutOfRows, RowList, RowPool
from models.prefix_cache import Lease, PrefixCache, common_length

TOKENS = st.integers(0, 2)  # few, so that texts share beginnings and part ways everywhere
NUM_ROWS = 24


@dataclass
class Text:
    """A text in flight."""

    tokens: list[int]
    lease: Lease
    rows: RowList = field(default_factory=RowList)


class Books(RuleBasedStateMachine):
    """Texts that begin, grow, share and end in any order, over a pool that is often full."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = RowPool(1, NUM_ROWS, 1, 1)
        self.cache = PrefixCache(self.pool)
        self.texts: list[Text] = []
        self.written: dict[int, tuple[int, ...]] = {}  # row -> the beginning whose last token it was made for

    @rule(tokens=st.lists(TOKENS, min_size=1, max_size=12))
    def begin(self, tokens: list[int]) -> None:
        text = Text(tokens, self.cache.begin())
        found, num_unused = self.cache.match(tokens, len(tokens) - 1)
        before = self.cache.num_unused
        text.rows.extend(self.cache.take(text.lease, tokens, len(tokens) - 1))
        assert len(text.rows) == text.lease.length == found, "less than all tokens, and as many as were foretold"
        assert before - self.cache.num_unused == num_unused
        self.texts.append(text)

    @precondition(lambda self: self.texts)
    @rule(which=st.integers(0), count=st.integers(1, 6), more=st.lists(TOKENS, max_size=4))
    def feed(self, which: int, count: int, more: list[int]) -> None:
        text = self.texts[which % len(self.texts)]
        text.tokens += more
        start = len(text.rows)
        count = min(count, len(text.tokens) - start)
        available, unused = self.pool.num_available, self.cache.num_unused
        try:
            rows = self.pool.allocate(count)
        except OutOfRows:
            assert count > available == self.pool.num_available, "refused although there was room, or took some"
            return
        assert unused - self.cache.num_unused == max(count - (available - unused), 0), "evicted more than was needed"
        text.rows.extend(rows)
        self.written.update((row, tuple(text.tokens[: start + i + 1])) for i, row in enumerate(rows))

    @precondition(lambda self: self.texts)
    @rule(which=st.integers(0), share=st.floats(0, 1))
    def share(self, which: int, share: float) -> None:
        text = self.texts[which % len(self.texts)]
        length = max(int(share * len(text.rows)), text.lease.length)
        self.cache.share(text.lease, text.tokens, text.rows, length)
        assert text.lease.length == length

    @precondition(lambda self: self.texts)
    @rule(which=st.integers(0), keep=st.booleans())
    def end(self, which: int, keep: bool) -> None:
        text = self.texts.pop(which % len(self.texts))
        if keep:
            self.cache.share(text.lease, text.tokens, text.rows, len(text.rows))
        self.cache.end(text.lease)
        self.cache.end(text.lease)  # twice is once
        self.pool.release(text.rows.truncate(0))

    @rule(share=st.floats(0, 1))
    def evict(self, share: float) -> None:
        count = int(share * self.cache.num_unused)
        free = self.pool.num_free
        self.cache.evict(count)
        assert self.pool.num_free == free + count

    @invariant()
    def every_row_has_its_owners_and_its_text(self) -> None:
        self.pool.check()
        self.cache.check([text.lease for text in self.texts])
        owners = [0] * NUM_ROWS
        for row in self.cache.rows():
            owners[row] += 1
        for text in self.texts:
            for position, row in enumerate(text.rows.view().tolist()):
                owners[row] += 1
                assert self.written[row] == tuple(text.tokens[: position + 1]), "a row of another text"
        assert owners == self.pool.owners().tolist()

    def teardown(self) -> None:
        while self.texts:
            self.end(0, True)
        self.cache.clear()
        assert self.pool.num_used == self.cache.num_rows == 0
        self.pool.check()


Books.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestTheBooksAreExactWhateverHappens = Books.TestCase


def kept(cache: PrefixCache, pool: RowPool, tokens: str) -> list[int]:
    """A text that has come and gone; its rows."""
    keys, lease, rows = list(tokens), cache.begin(), RowList()
    rows.extend(cache.take(lease, keys, len(keys)))
    rows.extend(pool.allocate(len(keys) - len(rows)))
    cache.share(lease, keys, rows, len(keys))
    mine: list[int] = rows.view().tolist()
    cache.end(lease)
    pool.release(rows.truncate(0))
    return mine


def test_the_least_recently_used_end_goes_first_and_only_as_far_as_needed() -> None:
    """A cache that forgets the system prompt, which all use, before an old answer serves nobody."""
    pool = RowPool(1, 20, 1, 1)
    cache = PrefixCache(pool)
    old = kept(cache, pool, "system:old")
    new = kept(cache, pool, "system:new")
    assert old[:7] == new[:7] and pool.num_used == 13
    taken = pool.allocate(9)  # seven are free: two of the older answer go, from its end
    assert cache.match(list("system:old"), 10) == (8, 8) and cache.match(list("system:new"), 10) == (10, 10)
    assert set(old[8:]) <= set(taken)
    kept(cache, pool, "system:o")  # used again, so the other one is older now
    pool.release(taken)
    pool.allocate(12)
    assert cache.match(list("system:new"), 10) == (7, 7) and cache.match(list("system:old"), 10) == (8, 8)
    cache.clear()
    assert cache.num_rows == 0


def test_rows_in_use_stay_whatever_is_asked_for() -> None:
    """A row given away under a text in flight is overwritten by another text, without an error."""
    pool = RowPool(1, 8, 1, 1)
    cache = PrefixCache(pool)
    mine = kept(cache, pool, "abcdef")
    lease = cache.begin()
    assert cache.take(lease, list("abcd"), 4) == mine[:4]
    assert pool.num_available == 4
    with pytest.raises(OutOfRows):
        pool.allocate(5)
    assert set(pool.allocate(4)).isdisjoint(mine[:4])
    assert cache.match(list("abcdef"), 6) == (4, 0)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("part", ["keys", "values"])
def test_a_broken_row_and_all_behind_it_stay_out(number: float, part: str) -> None:
    """One NaN in a kept row would break every later answer to a prompt that begins like it."""
    pool = RowPool(3, 12, 2, 4, dtype=torch.float16)
    cache, rows = PrefixCache(pool), RowList()
    lease = cache.begin()
    rows.extend(pool.allocate(8))
    getattr(pool, part)[1, rows.view()[5], 1, 2] = number
    cache.share(lease, list("abcdefgh"), rows, 8)
    assert lease.length == cache.num_rows == 5
    cache.end(lease)
    pool.release(rows.truncate(0))
    assert pool.num_used == 5 and cache.match(list("abcdefgh"), 8) == (5, 5)


def test_a_text_that_was_overtaken_changes_over_to_the_rows_that_are_there() -> None:
    """Two copies of one beginning would take twice the memory as long as both are read."""
    pool = RowPool(1, 20, 1, 1)
    cache = PrefixCache(pool)
    slow, rows = cache.begin(), RowList()
    rows.extend(pool.allocate(6))
    quick = kept(cache, pool, "abcd")
    cache.share(slow, list("abcdxy"), rows, 6)
    assert rows.view()[:4].tolist() == quick
    assert pool.num_used == 6 == slow.length


@pytest.mark.parametrize("length", [0, 1, 2, 3, 7, 64, 1000])
def test_the_common_beginning_is_found_wherever_texts_part(length: int) -> None:
    """One token too many is another text's row; one too few is work done twice."""
    run = list(range(length))
    for parts in {0, 1, length // 2, length - 1, length} - {-1}:
        keys = [*"??", *run[:parts], *["x"] * 5]
        assert common_length(run, keys, 2, len(keys)) == min(parts, length)
        assert common_length(run, keys, 2, 2 + parts // 2) == parts // 2


def test_the_books_notice_a_cache_that_gives_one_row_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the state machine: matches that ignore the last token's value."""


    def careless(run: list[int], keys: list[int], start: int, limit: int) -> int:
        return min(common_length(run, keys, start, limit) + 1, len(run), limit - start)

    monkeypatch.setattr(prefix_cache, "common_length", careless)
    machine = Books()
    machine.begin([0, 1, 2, 0, 1])
    machine.feed(0, 5, [])
    machine.end(0, True)
    machine.begin([0, 1, 0, 0, 1])
    with pytest.raises(AssertionError, match="a row of another text"):
        machine.every_row_has_its_owners_and_its_text()
