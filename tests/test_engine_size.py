"""Who pays for what in a step that several sequences share."""

from __future__ import annotations

from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.sequence import Sequence
from engine.size import Given, divide

NOBODY = cast(Sequence, None)  # who it was does not matter to the sum


def gave(nodes: int, own_ms: float = 0.0) -> Given:
    return Given(NOBODY, 1, nodes, own_ms)


def test_golden_shares() -> None:
    """By hand: rows of 14 ms for each, 16 ms more for eight nodes, 5 ms of drafting. Halves would be 24.5 each."""
    assert divide([gave(0), gave(8, 5.0)], 49.0, 14.0) == pytest.approx([14.0, 35.0])
    assert divide([gave(0), gave(6, 5.0), gave(2)], 63.0, 14.0) == pytest.approx([14.0, 31.0, 18.0])


def test_a_large_tree_does_not_make_its_neighbors_look_slow() -> None:
    """One asks for 48 nodes whatever they cost; the other's two nodes brought it a token for 22 ms, plain decoding takes 20."""
    small, large = divide([gave(2), gave(48)], 90.0, 20.0)
    assert small == pytest.approx(22.0) and large == pytest.approx(68.0)


def test_a_step_that_was_faster_than_plain_decoding_should_be_is_shared_alike() -> None:
    """Prices lag behind the clock; nobody's share is negative then."""
    assert divide([gave(0), gave(4)], 18.0, 14.0) == pytest.approx([9.0, 9.0])


@given(
    st.lists(st.tuples(st.integers(0, 64), st.floats(0, 50)), min_size=1, max_size=9), st.floats(0.1, 500), st.floats(0.1, 100)
)
def test_shares_are_the_whole(parts: list[tuple[int, float]], common: float, plain_ms: float) -> None:
    """What nobody pays for would make every schedule look faster than the server is."""
    everyone = [gave(nodes, own) for nodes, own in parts]
    ms = common + sum(own for _, own in parts)
    shares = divide(everyone, ms, plain_ms)
    assert sum(shares) == pytest.approx(ms)
    assert all(share >= one.own_ms for one, share in zip(everyone, shares, strict=True))


@given(st.integers(1, 9), st.integers(0, 20), st.floats(1, 500), st.floats(0.1, 100))
def test_who_did_the_same_pays_the_same(count: int, nodes: int, ms: float, plain_ms: float) -> None:
    """As before, where all decode with one schedule."""
    assert divide([gave(nodes)] * count, ms, plain_ms) == pytest.approx([ms / count] * count)
