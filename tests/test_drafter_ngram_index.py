"""The n-gram index finds what a search of the text finds, forgets what it should, and never works without bound."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import drafters.ngram_index as ngram_index
from drafters.ngram_index import BYTES_PER_TOKEN, LOOK_BACK, MAX_N, MAX_STEPS, Followers, NgramIndex


class CountingText(list[int]):
    """A text that counts how many of its tokens are read."""

    num_read = 0

    def __getitem__(self, key):  # type: ignore[no-untyped-def]
        found = super().__getitem__(key)
        self.num_read += len(found) if isinstance(key, slice) else 1
        return found


def index_of(text: Sequence[int], window: int = 65536, piece: int = 10**9) -> NgramIndex:
    index = NgramIndex(window)
    while index.read(text, piece):
        pass
    return index


def brute_force(text: Sequence[int], context: list[int], start: int) -> Followers | None:
    """By a walk over `text` from behind; `start` is the first position remembered."""
    n, by_token, total = len(context), dict[int, tuple[int, int]](), 0
    for position in range(len(text) - 1, start + n - 1, -1):
        if list(text[position - n : position]) == context and total < LOOK_BACK:
            times, last = by_token.get(text[position], (0, position))
            by_token[text[position]] = (times + 1, last)
            total += 1
    return Followers(n, total, by_token) if total else None


@pytest.fixture
def small_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables that start at four tokens, so that short texts outgrow them several times."""
    monkeypatch.setattr(ngram_index, "_LEAST_CAPACITY", 4)


@pytest.mark.usefixtures("small_tables")
@settings(max_examples=400)
@given(
    st.lists(st.lists(st.integers(0, 3), max_size=25), max_size=4),
    st.lists(st.integers(0, 4), min_size=1, max_size=MAX_N),
    st.integers(1, 70),
    st.sampled_from([1, 3, 20, 1000]),
)
def test_lookup_equals_a_search_of_the_text(added: list[list[int]], path: list[int], window: int, piece: int) -> None:
    """An index that misses or reorders occurrences drafts something else than the rule says.

    Whatever the window, the pieces in which the text grew, and the pieces in which it was read.
    """
    index, text = NgramIndex(window), list[int]()
    for tokens in added:
        text.extend(tokens)
        while index.read(text, piece):
            pass
    assert index.end == len(text) and len(index) == min(len(text), window)
    for n in range(1, MAX_N + 1):
        for context in (path[:n], text[-n:], (text + path)[-n:]):
            if context:
                assert index.followers(text, context) == brute_force(text, context, len(text) - len(index))


def test_a_search_that_forgets_nothing_differs() -> None:
    """Negative control: the comparison above must see a window that is off by one."""
    text = [1, 2, 3, 1, 2]
    index = index_of(text, window=5)
    assert index.followers(text, [1, 2]) == brute_force(text, [1, 2], 0) is not None
    text.append(9)
    index.read(text, 10)
    assert index.followers(text, [1, 2]) == brute_force(text, [1, 2], 1) != brute_force(text, [1, 2], 0)


def test_reading_many_tokens_at_once_equals_reading_them_one_by_one() -> None:
    """Two ways to fill the tables; if they differed, what is drafted would depend on how the text arrived."""
    rng = random.Random(5)
    text = [rng.randrange(5) for _ in range(3000)]
    for window in (1, 7, 1000, 1024, 2500, 10**6):
        at_once, one_by_one = NgramIndex(window), NgramIndex(window)
        at_once.read(text[:50], 50)
        one_by_one.read(text[:50], 50)
        while at_once.read(text, 700):
            pass
        while one_by_one.read(text, 1):
            pass
        assert (at_once.start, at_once.end) == (one_by_one.start, one_by_one.end)
        assert (at_once._links == one_by_one._links).all() and (at_once._heads == one_by_one._heads).all()


@pytest.mark.parametrize("window", [1000, 4096, 5000])
def test_memory_stays_below_the_bound_however_long_the_text(window: int) -> None:
    """A server whose requests each keep everything they ever saw runs out of memory on long conversations."""
    rng = random.Random(1)
    text = [rng.randrange(50000) for _ in range(window * 8)]
    index = NgramIndex(window)
    tracemalloc.start()
    try:
        while index.read(text, 512):
            pass
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    bound = BYTES_PER_TOKEN * window
    assert index.num_bytes <= bound, f"{index.num_bytes} bytes of tables, {bound} allowed"
    assert held <= bound + 16384, f"{held} bytes held, {bound} allowed for a window of {window}"
    assert len(index) == window
    index.clear()
    assert index.num_bytes <= 64


def test_a_short_text_takes_little() -> None:
    """Sizing every sequence for the window would cost 4 MB for a prompt of ten tokens."""
    assert NgramIndex(65536).num_bytes <= 64
    assert index_of(list(range(10))).num_bytes == BYTES_PER_TOKEN * 1024
    assert index_of(list(range(5000))).num_bytes == BYTES_PER_TOKEN * 8192


def test_the_oldest_part_is_forgotten_first() -> None:
    """What is found must be what the window holds: to the token."""
    text = [1, 2, 3, *range(100, 110)]
    for more in range(0, 30):
        grown = text + list(range(200, 200 + more))
        index = index_of(grown, window=20)
        known = index.followers(grown, [1, 2]) is not None
        assert known == (len(grown) <= 20), f"after {len(grown)} tokens with a window of 20"


def test_what_would_be_forgotten_at_once_is_not_read() -> None:
    """A prompt of many windows would keep the reader busy with nothing."""
    text = CountingText(range(100_000))
    index = index_of(text, window=1000)
    assert (index.start, index.end) == (99_000, 100_000)
    assert text.num_read <= 1000 + MAX_N


def test_a_read_is_no_longer_than_allowed() -> None:
    """One long prompt in one go holds up the answers of everyone else."""
    text = CountingText([7] * 100_000)
    index = NgramIndex(10**6)
    for _ in range(10):
        before = text.num_read
        assert index.read(text, 1000) == 1000
        assert text.num_read - before <= 1000 + MAX_N


def test_growing_reads_the_text_less_than_twice_more() -> None:
    """An index that starts over too often is not linear any more."""
    text = CountingText()
    index = NgramIndex(10**6)
    for token in range(20_000):
        text.append(token)
        while index.read(text, 4096):
            pass
    once = MAX_N * 20_000  # token by token, each is looked at by five n-grams
    assert text.num_read < 2 * once, f"{text.num_read} reads for {len(text)} tokens"


@pytest.mark.parametrize(
    "text",
    [
        pytest.param([3] * 100_000, id="one token"),
        pytest.param(list(range(100_000)), id="all distinct"),
        pytest.param([3, 4] * 50_000, id="two in turn"),
    ],
)
def test_a_lookup_is_bounded_whatever_the_text_repeats(text: list[int]) -> None:
    """A frequent token has thousands of occurrences; walking over them would make drafting slower than decoding."""
    counting = CountingText(text)
    index = index_of(counting, window=10**6)
    for n in range(1, MAX_N + 1):
        for context in (text[-n:], text[:n], [99_999_999] * n):
            counting.num_read = 0
            found = index.followers(counting, context)
            assert counting.num_read <= MAX_STEPS * (n + 1)
            assert found is None or found.total <= LOOK_BACK


def test_tokens_chosen_to_collide_do_not_make_lookups_longer() -> None:
    """Whoever writes the prompt can choose tokens with the same hash; that may spoil their drafts and nothing else."""
    probe = index_of([1])
    shift, factor, mask = probe._shift, ngram_index._FACTOR, 2**64 - 1
    same = [token for token in range(2_000_000) if (token + 1) * factor % (mask + 1) >> shift == 0]
    assert len(same) > 500
    text = CountingText(token for token in same[:500] for _ in range(2))
    index = index_of(text)
    assert index._shift == shift, "the tokens were chosen for a table of another size"
    text.num_read = 0
    assert index.followers(text, [same[499]]) is not None, "the latest of them is still found"
    index.followers(text, [same[0]])
    assert text.num_read <= 2 * 2 * MAX_STEPS


def test_texts_that_make_no_sense_are_refused() -> None:
    """A text that shrank belongs to another sequence; matches in it would be nonsense."""
    index = index_of([1, 2, 3])
    with pytest.raises(AssertionError, match="shrank from 3 to 2"):
        index.read([1, 2], 10)
    with pytest.raises(ValueError, match="window must be at least 1, not 0"):
        NgramIndex(0)
