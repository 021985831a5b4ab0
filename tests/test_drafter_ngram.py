"""The n-gram drafter finds what was there, in the order of the rule, and believes it in a sane measure."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.base import DraftRequest
from drafters.ngram import READ_AT_LEAST, READ_AT_ONCE, Lookup, Memory, NgramDrafter
from drafters.ngram_index import LOOK_BACK, MAX_N, MAX_STEPS, NgramIndex
from tree.graft import TreeGraft
from tree.growth import Answer, Ask, Candidates
from tree.tree import TokenTree


def ids(text: str) -> list[int]:
    return [ord(c) for c in text]


class CountingText(list[int]):
    """A text that counts how many of its tokens are read."""

    num_read = 0

    def __getitem__(self, key):  # type: ignore[no-untyped-def]
        found = super().__getitem__(key)
        self.num_read += len(found) if isinstance(key, slice) else 1
        return found


def lookup_of(text: Sequence[int], min_n: int = 1) -> Lookup:
    memory = Memory(NgramIndex(65536))
    memory.index.read(text, len(text))
    return Lookup(memory, text, None, min_n)


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
        places = [p for p in range(len(text) - 1, n - 1, -1) if list(text[p - n : p]) == list(tail[-n:])]
        for position in places[:LOOK_BACK]:
            if len(found) < k:
                found.setdefault(text[position], position)
    return list(found.items())


@settings(max_examples=300)
@given(
    st.lists(st.integers(0, 3), max_size=60),
    st.lists(st.integers(0, 4), max_size=4),
    st.integers(1, 5),
    st.integers(1, 3),
)
def test_candidates_equal_a_search_of_the_text(text: list[int], path: list[int], k: int, min_n: int) -> None:
    """Another order drafts something else than the rule says."""
    found = lookup_of(text, min_n).candidates(path, k)
    assert [(proposal.token, proposal.position) for proposal in found] == brute_force(text, text + path, k, min_n)


@settings(max_examples=200)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.lists(st.integers(0, 4), max_size=4), st.integers(1, 3))
def test_probabilities_of_all_children_sum_to_less_than_one(text: list[int], path: list[int], min_n: int) -> None:
    """Scores of different drafters share one tree; probabilities that sum to more would crowd the others out."""
    lookup = lookup_of(text, min_n)
    found = lookup.candidates(path, 1000)
    assert sum(math.exp(proposal.lp) for proposal in found) < 1
    for proposal in found:
        assert proposal.lp < 0
        assert lookup.lp(path, proposal.token) == proposal.lp
    assert lookup.lp(path, 99) is None


def test_longer_matches_and_more_frequent_followers_are_believed_more() -> None:
    """The verify set is filled by score: a lucky match of one token must not displace a match of five."""
    lookup = lookup_of(ids("abcdef"))
    by_length = [lookup.lp([0, *ids("abcde")[-n:]], ord("f")) for n in range(1, 6)]
    assert all(lp is not None for lp in by_length)
    assert by_length == sorted(by_length)  # type: ignore[type-var]
    once, twice = lookup_of(ids("ab.")), lookup_of(ids("ab.ab."))
    assert once.lp(ids("a"), ord("b")) < twice.lp(ids("a"), ord("b"))  # type: ignore[operator]
    mixed = root_candidates("ab ab ab ac a")
    assert mixed.tokens == (ord("b"), ord("c"))
    assert mixed.lps[0] > mixed.lps[1]


def test_a_single_occurrence_is_believed_as_measured() -> None:
    """These five numbers decide which nodes are worth a row of the target."""
    lookup = lookup_of(ids("abcdef"))
    believed = [math.exp(lookup.lp([0, *ids("abcde")[-n:]], ord("f")) or 0) for n in range(1, 6)]
    assert believed == pytest.approx([0.18, 0.42, 0.5, 0.56, 0.83], abs=0.005)


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
    lookup = lookup_of(context)
    drafted = [found.tokens[0]]
    for token, lp in found.suffixes[0]:
        assert lp == lookup.lp(drafted, token) < 0  # type: ignore[operator]
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
        assert (state.index.start, state.index.end) == (0, size)
        assert answer == ask(NgramDrafter(), text[:size], TokenTree(text[size - 1]), 0, width=3)
    drafter.close(state)
    drafter.close(state)
    assert len(state.index) == 0 and not state.known


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


@pytest.mark.parametrize("options", [{"min_n": 0}, {"min_n": 6}, {"fallback": "always"}, {"window": 0}])
def test_impossible_options_are_refused(options: dict[str, object]) -> None:
    """At construction, not with the first request."""
    with pytest.raises(ValueError, match="min_n|fallback|window"):
        NgramDrafter(**options)  # type: ignore[arg-type]


# Long texts


def read_until_done(drafter: NgramDrafter, state: Memory, context: Sequence[int], calls: int = 100) -> list[Candidates]:
    """Answers about the root, call after call, until the text is read."""
    answers: list[Candidates] = []
    while state.index.end < len(context):
        (answer,) = drafter.propose([DraftRequest(state, context, TokenTree(context[-1]), Ask((0,), 4))])
        assert isinstance(answer, Answer)
        answers.append(answer.candidates[0])
        assert len(answers) <= calls, f"{state.index.end} of {len(context)} tokens read after {calls} calls"
    return answers


def test_a_long_prompt_is_read_in_pieces_and_drafted_from_meanwhile() -> None:
    """Read in one go it holds up everyone; not drafted from, its own first steps are slow."""
    needle, filler = [1, 2, 3, 4, 5], range(100, 100 + 3 * READ_AT_ONCE)
    context = CountingText([*needle, 6, *filler, *needle, 7, 9, *needle])
    drafter = NgramDrafter()
    answers = read_until_done(drafter, drafter.open(), context)
    assert len(answers) == 4
    assert [answer.tokens for answer in answers[:-1]] == [(6,)] * 3, "the part read so far was not used"
    assert answers[-1].tokens == (7, 6) or answers[-1].tokens == (6, 7)
    whole = lookup_of(context).candidates([], 4)
    assert {(p.token, p.lp) for p in whole} == set(zip(answers[-1].tokens, answers[-1].lps, strict=True))
    before = context.num_read
    drafter.propose([DraftRequest(drafter.open(), context, TokenTree(context[-1]), Ask((0,), 4))])
    assert context.num_read - before < READ_AT_ONCE + 1000, "tokens read in one call"


def test_a_chain_that_reaches_the_unread_part_goes_on_there() -> None:
    """The text behind the part read so far is known, though not indexed; the draft must not take its place."""
    context = [1, 2, 70, *range(100, 95 + READ_AT_ONCE), 1, 2, 70, 71, *range(30_000, 31_000), 1]
    drafter = NgramDrafter()
    (answer,) = drafter.propose([DraftRequest(drafter.open(), context, TokenTree(1), Ask((0,), 4))])
    assert isinstance(answer, Answer)
    assert context[READ_AT_ONCE - 1] == 2, "the last token read in the first call"
    assert answer.candidates[0].tokens == (2,)
    # How likely 71 is nobody knows yet, so the chain ends before it.
    assert [token for token, _ in answer.candidates[0].suffixes[0]] == [70]


def test_many_long_prompts_share_what_is_read_in_one_call() -> None:
    """Ten long prompts that arrive together must not take ten times as long; and no sequence may starve."""
    drafter = NgramDrafter()
    texts = [list(range(k, k + 30_000)) for k in range(10)]
    requests = [DraftRequest(drafter.open(), text, TokenTree(text[-1]), Ask((0,), 4)) for text in texts]
    for call in range(1, 60):
        before = [request.state.index.end for request in requests]
        drafter.propose(requests)
        read = [request.state.index.end - end for request, end in zip(requests, before, strict=True)]
        assert sum(read) <= READ_AT_ONCE + READ_AT_LEAST * len(requests), f"call {call} read {read}"
        left = [len(text) - end for text, end in zip(texts, before, strict=True)]
        assert all(done >= min(READ_AT_LEAST, missing) for done, missing in zip(read, left, strict=True)), f"{call}: {read}"
    assert all(request.state.index.end == 30_000 for request in requests)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param([3] * 100_000, id="one token"),
        pytest.param(list(range(100_000)), id="all distinct"),
        pytest.param([3, 4, 3, 5] * 25_000, id="period of four"),
    ],
)
def test_a_question_takes_bounded_work_on_any_text(text: list[int]) -> None:
    """Drafting must stay far cheaper than a forward, whatever somebody sends.

    Counted in tokens of the text that are looked at: per lookup at most 64 places of at most five tokens, for each length.
    """
    context, width = CountingText(text), 4
    drafter = NgramDrafter()
    state = drafter.open()
    tree = TokenTree(text[-1])
    read_until_done(drafter, state, context)
    while len(tree) < 10:
        tree.add(len(tree) - 1, text[len(tree)], -0.1, "ngram")
    lookups = len(tree) * (1 + width * (MAX_N - 1))  # candidates of every node, and every token of their chains
    context.num_read = 0
    drafter.propose([DraftRequest(state, context, tree, Ask(tuple(range(len(tree))), width))])
    assert context.num_read <= lookups * (MAX_STEPS * (sum(range(1, MAX_N + 1)) + MAX_N) + 20)
    context.num_read = 0
    state.index.clear()
    state.forget_lookups()
    drafter.propose([DraftRequest(state, context, TokenTree(text[-1]), Ask((0,), width))])
    assert context.num_read <= READ_AT_ONCE + (1 + width * (MAX_N - 1)) * MAX_STEPS * 20


def test_the_memory_of_lookups_does_not_grow_with_the_answer() -> None:
    """It is for one step; kept, it would outgrow the index."""
    drafter, rng = NgramDrafter(), random.Random(4)
    state, text, most = drafter.open(), [1], 0
    for _ in range(1500):
        text.append(rng.randrange(3))
        drafter.propose([DraftRequest(state, text, TokenTree(text[-1]), Ask((0,), 4))])
        most = max(most, len(state.known))
    assert most <= MAX_N * (1 + 4 * (MAX_N - 1))


# Conversations


def tokens_per_step(prompt: list[int], answer: list[int], window: int = 65536) -> float:
    """Of a target that writes `answer` after `prompt`, drafted for by the n-gram drafter alone on a budget of 8."""
    drafter = NgramDrafter(window=window)
    policy, state = TreeGraft(frontier=4, width=4, budget=8, small="ngram"), drafter.open()
    text, steps = list(prompt), 0
    end = len(prompt) + len(answer)
    while len(text) < end:
        growth = policy.begin(text[-1], vocab_size=256)
        while (question := growth.ask("ngram")) is not None:
            before = len(growth.tree)
            (reply,) = drafter.propose([DraftRequest(state, text, growth.tree, question)])
            assert isinstance(reply, Answer)
            growth.attach("ngram", reply)
            if len(growth.tree) == before:
                break
        verified, node, path = set(growth.verify_nodes()), 0, list[int]()
        for token in answer[len(text) - len(prompt) :]:
            child = growth.tree.children[node].get(token)
            if child not in verified:
                path.append(token)  # the target's own
                break
            assert child is not None
            node = child
            path.append(token)
        drafter.commit(state, text, growth.tree, [])
        text.extend(path)
        steps += 1
    return len(answer) / steps


QUESTION = "<user>Write a function that adds two numbers.<assistant>"
CODE = "def add(left, right):\n    return left + right\n"
FOLLOW_UP = "<user>Now with a docstring.<assistant>"
CHANGED = 'def add(left, right):\n    """The sum."""\n    return left + right\n'


def test_a_later_turn_is_drafted_from_the_earlier_ones() -> None:
    """The second answer of a conversation often repeats the first; its prompt holds it, in a sequence of its own."""
    conversation = ids(QUESTION + CODE + FOLLOW_UP)
    assert tokens_per_step(conversation, ids(CODE)) > 3
    assert tokens_per_step(conversation, ids(CHANGED)) > 2.5


def test_without_the_earlier_turn_there_is_nothing_to_draft_from() -> None:
    """Negative control: what is gained above must come from the first turn and not from the second answer itself."""
    for alone in (tokens_per_step(ids(FOLLOW_UP), ids(CODE)), tokens_per_step(ids("x"), ids(CHANGED))):
        assert alone < 2
    forgotten = ids(QUESTION + CODE) + list(range(128, 256)) + ids(FOLLOW_UP)
    assert tokens_per_step(forgotten, ids(CODE), window=100) < 2
    assert tokens_per_step(forgotten, ids(CODE)) > 3
