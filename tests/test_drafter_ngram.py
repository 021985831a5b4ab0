"""The n-gram drafter finds what was there, in the order of the rule, and believes it in a sane measure."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.base import DraftRequest
from drafters.ngram import MAX_N, NgramDrafter, NgramIndex
from tree.growth import Answer, Ask, Candidates
from tree.tree import TokenTree


def ids(text: str) -> list[int]:
    return [ord(c) for c in text]


def index_of(text: Sequence[int], min_n: int = 1) -> NgramIndex:
    index = NgramIndex(min_n)
    index.extend(text)
    return index


def ask(
    drafter: NgramDrafter, context: Sequence[int], tree: TokenTree, *nodes: int, width: int = 4, rescore: bool = False
) -> Answer:
    request = DraftRequest(drafter.open(), context, tree, Ask(nodes, width, rescore))
    (answer,) = drafter.propose([request])
    assert isinstance(answer, Answer)
    return answer


def root_candidates(text: str, width: int = 4, drafter: NgramDrafter | None = None) -> Candidates:
    context = ids(text)
    return ask(drafter or NgramDrafter(), context, TokenTree(context[-1]), 0, width=width).candidates[0]


def brute_force(text: Sequence[int], tail: Sequence[int], k: int, min_n: int) -> list[tuple[int, int]]:
    """(token, position) by the rule: longest n first, most recent first, until k distinct tokens."""
    found: dict[int, int] = {}
    for n in range(min(MAX_N, len(tail)), min_n - 1, -1):
        for position in range(len(text) - 1, n - 1, -1):
            if list(text[position - n : position]) == list(tail[-n:]) and len(found) < k:
                found.setdefault(text[position], position)
    return list(found.items())


@settings(max_examples=300)
@given(
    st.lists(st.integers(0, 3), max_size=60),
    st.lists(st.integers(0, 4), max_size=4),
    st.integers(1, 5),
    st.integers(1, 3),
)
def test_lookup_equals_a_search_of_the_text(text: list[int], path: list[int], k: int, min_n: int) -> None:
    """An index that misses or reorders occurrences drafts something else than the rule says."""
    tail = text + path
    found = index_of(text, min_n).candidates(tail, k)
    assert [(token, position) for token, _, position in found] == brute_force(text, tail, k, min_n)


@settings(max_examples=200)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.lists(st.integers(0, 4), max_size=4), st.integers(1, 3))
def test_probabilities_of_all_children_sum_to_less_than_one(text: list[int], path: list[int], min_n: int) -> None:
    """Scores of different drafters share one tree; probabilities that sum to more would crowd the others out."""
    index = index_of(text, min_n)
    found = index.candidates(text + path, 1000)
    assert sum(math.exp(lp) for _, lp, _ in found) < 1
    for token, lp, _ in found:
        assert lp < 0
        assert index.lp(text + path, token) == lp
    assert index.lp(text + path, 99) is None


def test_longer_matches_and_more_frequent_followers_are_believed_more() -> None:
    """The verify set is filled by score: a lucky match of one token must not displace a match of five."""
    by_length = [index_of(ids("abcdef")).lp(ids("abcde")[-n:], ord("f")) for n in range(1, 6)]
    assert all(lp is not None for lp in by_length)
    assert by_length == sorted(by_length)  # type: ignore[type-var]
    once, twice = index_of(ids("ab.")), index_of(ids("ab.ab."))
    assert once.lp(ids("a"), ord("b")) < twice.lp(ids("a"), ord("b"))  # type: ignore[operator]
    mixed = root_candidates("ab ab ab ac a")
    assert mixed.tokens == (ord("b"), ord("c"))
    assert mixed.lps[0] > mixed.lps[1]


def test_chains_are_five_long_at_the_root_and_shorten_with_depth() -> None:
    """Chains of the wrong length spend the budget on guesses far from any evidence."""
    context = ids("abcabcab")
    tree = TokenTree(context[-1])
    node, lengths = 0, []
    for token in ids("cabcab"):
        (candidate,) = ask(NgramDrafter(), context, tree, node).candidates[node].suffixes
        found = ask(NgramDrafter(), context, tree, node).candidates[node]
        assert found.tokens == (token,)
        lengths.append(1 + len(candidate))
        node = tree.add(node, token, found.lps[0], "ngram")
    assert lengths == [5, 4, 3, 2, 1, 1]


def test_chains_read_on_where_the_text_ends() -> None:
    """A text of period two would otherwise get chains of two, although its continuation is obvious."""
    assert root_candidates("ababab").tokens == (ord("a"),)
    assert [token for token, _ in root_candidates("ababab").suffixes[0]] == ids("baba")
    assert [token for token, _ in root_candidates("aa").suffixes[0]] == ids("aaaa")


def test_a_chain_follows_the_most_recent_occurrence_of_the_longest_match() -> None:
    """Text copied from the wrong place is rejected after its first token."""
    found = root_candidates("xyz1234 yz5678 yz9abc xyz", width=1)
    assert found.tokens == (ord("1"),)  # "xyz" beats the later "yz"
    assert [token for token, _ in found.suffixes[0]] == ids("234 ")
    found = root_candidates("yz5678 yz9abc yz", width=1)  # " yz" beats the "yz" at the start
    assert found.tokens == (ord("9"),)


def test_chain_tokens_carry_their_own_estimate() -> None:
    """Later growth steps rank chain nodes against other nodes by these."""
    context = ids("the cat sat. the cat")
    found = root_candidates("the cat sat. the cat")
    index = index_of(context)
    drafted = [found.tokens[0]]
    for token, lp in found.suffixes[0]:
        assert lp == index.lp(context + drafted, token) < 0  # type: ignore[operator]
        drafted.append(token)
    assert drafted == ids(" sat.")


def test_the_same_token_under_two_lengths_keeps_the_longer() -> None:
    """Twice the same child is an error of the tree, and the shorter match's chain is the worse one."""
    found = root_candidates("bc1 abc2 bc3 abc", width=4)
    assert len(set(found.tokens)) == len(found.tokens)
    assert found.tokens[0] == ord("2")


def test_fewer_than_width_continuations_are_terminal() -> None:
    """The rule that keeps small-only trees to one wave of chains; a covered node must be open."""
    assert root_candidates("ab ac a", width=3).terminal
    assert not root_candidates("ab ac a", width=2).terminal


def test_candidates_are_sorted_by_log_prob_then_token() -> None:
    """Trees must not depend on dictionary order."""
    rng = random.Random(3)
    for _ in range(50):
        text = [rng.randrange(4) for _ in range(40)]
        found = ask(NgramDrafter(), text, TokenTree(text[-1]), 0, width=6).candidates[0]
        pairs = list(zip(found.lps, found.tokens, strict=True))
        assert pairs == sorted(pairs, key=lambda pair: (-pair[0], pair[1]))
        assert len(found.suffixes) == len(found.tokens)


def test_no_match_proposes_nothing_unless_asked_to() -> None:
    """A step without a match should cost what plain decoding costs; the release's guess is an option."""
    assert root_candidates("abcd") == Candidates(terminal=True)
    guess = root_candidates("aabcd", drafter=NgramDrafter(fallback="frequent"))
    assert guess.tokens == (ord("a"),)
    assert guess.lps[0] == pytest.approx(math.log(2 / 5))
    assert guess.terminal


def test_the_guess_is_for_the_root_only() -> None:
    """Deeper down it would be a guess upon a guess."""
    context = ids("aabcd")
    tree = TokenTree(context[-1])
    node = tree.add(0, ord("z"), -1.0, "small")
    assert ask(NgramDrafter(fallback="frequent"), context, tree, node).candidates[node].tokens == ()


def test_the_path_below_the_root_is_part_of_the_match() -> None:
    """A node must be continued by what followed its own path, not by what followed the root."""
    context = ids("abx acy a")
    tree = TokenTree(context[-1])
    b, c = (tree.add(0, ord(t), -1.0, "small") for t in "bc")
    answer = ask(NgramDrafter(), context, tree, b, c)
    assert answer.candidates[b].tokens[0] == ord("x")
    assert answer.candidates[c].tokens[0] == ord("y")


def test_short_matches_can_be_left_out() -> None:
    """One token's worth of evidence is little; with min_n = 2 it proposes nothing."""
    assert root_candidates("ab ca", drafter=NgramDrafter(min_n=1)).tokens == (ord("b"),)
    assert root_candidates("ab ca", drafter=NgramDrafter(min_n=2)).tokens == ()
    assert root_candidates(" ab ca", drafter=NgramDrafter(min_n=2)).tokens == ()
    assert root_candidates(" ab a", drafter=NgramDrafter(min_n=2)).tokens == (ord("b"),)


def test_the_index_catches_up_with_the_text_and_never_holds_drafted_tokens() -> None:
    """Rejected drafts in the index would be proposed again as if the target had written them."""
    drafter = NgramDrafter()
    state = drafter.open()
    text = ids("the cat sat on the ")
    for size in range(1, len(text) + 1):
        tree = TokenTree(text[size - 1])
        (answer,) = drafter.propose([DraftRequest(state, text[:size], tree, Ask((0,), 3))])
        assert isinstance(answer, Answer)
        node = tree.add(0, 0, -1.0, "small")
        drafter.propose([DraftRequest(state, text[:size], tree, Ask((node,), 3))])
        drafter.commit(state, text[:size], tree, [])
        assert state.tokens == text[:size]
        assert answer == ask(NgramDrafter(), text[:size], TokenTree(text[size - 1]), 0, width=3)
    drafter.close(state)
    drafter.close(state)
    assert len(state) == 0


def test_sequences_do_not_mix() -> None:
    """One request's text must never show up in another's."""
    drafter = NgramDrafter()
    texts = ids("abcab"), ids("abxab")
    requests = [DraftRequest(drafter.open(), text, TokenTree(text[-1]), Ask((0,), 4)) for text in texts]
    first, second = drafter.propose(requests)
    assert isinstance(first, Answer) and isinstance(second, Answer)
    assert first.candidates[0].tokens == (ord("c"),)
    assert second.candidates[0].tokens == (ord("x"),)


def test_rescoring_covers_the_nodes_whose_token_was_seen() -> None:
    """A node it knows nothing about must keep the other drafter's score."""
    context = ids("abcab")
    tree = TokenTree(context[-1])
    c = tree.add(0, ord("c"), -1.0, "small")
    tree.add(0, ord("z"), -1.0, "small")
    answer = ask(NgramDrafter(), context, tree, 0, rescore=True)
    assert answer.rescored == {c: answer.candidates[0].lps[0]}
    assert ask(NgramDrafter(), context, tree, 0).rescored == {}


@pytest.mark.parametrize("options", [{"min_n": 0}, {"min_n": 6}, {"fallback": "always"}])
def test_impossible_options_are_refused(options: dict[str, object]) -> None:
    """At construction, not with the first request."""
    with pytest.raises(ValueError, match="min_n|fallback"):
        NgramDrafter(**options)  # type: ignore[arg-type]


def test_a_lookup_costs_the_same_whatever_the_text_repeats() -> None:
    """A frequent token has thousands of occurrences; walking over them would make drafting slower than decoding.

    Counted in followers looked at: distinct ones, not occurrences.
    """
    index = index_of([1, 2] * 1000 + [1])
    followers = index._followers[(1,)]
    assert not isinstance(followers, int)
    assert followers.total == 1000
    assert list(followers.by_token) == [2]
    assert len(index._followers) < 2 * MAX_N + 10
