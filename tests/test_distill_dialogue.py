"""A target in conversation with itself: every token has the right author, and nobody's turn is forgotten."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill import dialogue
from distill.dialogue import Dialogue, Kind, Turns
from distill.topics import opening
from models.toy import byte_tokenizer
from tests.distill_world import TOKENIZER

OPENING = (50, 51)
TURNS = Turns(begin=(1, 2), answer=(3, 4, 5), user=(6, 7), stops=frozenset({3, 9}))


def a_dialogue(turns: Turns = TURNS, seed: int = 0) -> Dialogue:
    return Dialogue(turns, lambda text: OPENING, random.Random(seed))


def feed(one: Dialogue, drawn: Sequence[int]) -> list[tuple[int, Kind, float]]:
    """Token, author, and temperature after it, for each drawn token."""
    return [(one.push(token), one.kinds[-1], one.next_temperature()) for token in drawn]


def test_two_turns_token_by_token() -> None:
    """Golden: given tokens replace what was drawn, and are no drafter's lesson."""
    one = a_dialogue()
    assert one.next_temperature() == 0.0
    begin = feed(one, [0, 0, 0, 0])
    assert begin == [(1, Kind.GIVEN, 0.0), (2, Kind.GIVEN, 0.0), (50, Kind.GIVEN, 0.0), (51, Kind.GIVEN, 1.0)]
    assert feed(one, [30, 31]) == [(30, Kind.USER, 1.0), (31, Kind.USER, 1.0)]
    # The stop is the template's own next token: the user's choice.
    assert feed(one, [3]) == [(3, Kind.USER, 0.0)]
    assert one.messages == [(50, 51, 30, 31)]
    to_answer = feed(one, [0, 0])
    assert [entry[:2] for entry in to_answer] == [(4, Kind.GIVEN), (5, Kind.GIVEN)]
    assert to_answer[0][2] == 0.0 and to_answer[1][2] in (0.0, 0.7)
    temperature = to_answer[1][2]
    assert feed(one, [40, 41]) == [(40, Kind.ANSWER, temperature), (41, Kind.ANSWER, temperature)]
    # This stop is not what the template goes on with: the template's token takes its place and is given.
    assert feed(one, [9, 0]) == [(6, Kind.GIVEN, 0.0), (7, Kind.GIVEN, 0.0)]
    assert feed(one, [0, 0, 33]) == [(50, Kind.GIVEN, 0.0), (51, Kind.GIVEN, 1.0), (33, Kind.USER, 1.0)]
    assert one.tokens == [1, 2, 50, 51, 30, 31, 3, 4, 5, 40, 41, 6, 7, 50, 51, 33]


def test_the_end_of_an_answer_is_the_answers_if_the_target_chose_it() -> None:
    """A drafter that never learned to foresee the end would always be wrong there."""
    turns = Turns(begin=(1,), answer=(3,), user=(6, 7), stops=frozenset({3, 6}))
    one = a_dialogue(turns)
    feed(one, [0, 0, 0, 3])
    assert feed(one, [40, 6])[1][:2] == (6, Kind.ANSWER)


@pytest.mark.parametrize("who", ["user", "answer"])
def test_a_turn_that_does_not_end_is_ended(who: str) -> None:
    """One endless message would fill the text with what no drafter learns from."""
    one = a_dialogue()
    feed(one, [0] * 4)
    if who == "answer":
        feed(one, [3, 0, 0])
    limit = dialogue._LONGEST_MESSAGE if who == "user" else dialogue._LONGEST_ANSWER
    kind = Kind.USER if who == "user" else Kind.ANSWER
    assert all(entry[:2] == (30, kind) for entry in feed(one, [30] * limit))
    token, author, _ = feed(one, [30])[0]
    assert (token, author) == ((3, Kind.GIVEN) if who == "user" else (6, Kind.GIVEN))


@given(st.lists(st.integers(0, 20), max_size=700), st.integers(0, 5))
def test_whatever_is_drawn_the_text_is_turns_and_nothing_else(drawn: list[int], seed: int) -> None:
    """Parsed again from the outside: template, opening, message, template, answer, template, ..."""
    one = a_dialogue(seed=seed)
    temperatures = []
    for token in drawn:
        temperatures.append(one.next_temperature())
        one.push(token)
    assert len(one.tokens) == len(one.kinds) == len(drawn)
    at, turn = 0, 0

    def expect(given_tokens: Sequence[int], first_may_be_chosen: bool) -> None:
        nonlocal at
        for index, token in enumerate(given_tokens):
            if at < len(one.tokens):
                assert one.tokens[at] == token
                assert one.kinds[at] is Kind.GIVEN or (index == 0 and first_may_be_chosen and drawn[at] == token)
                assert index == 0 or temperatures[at] == 0.0
            at += 1

    expect((*TURNS.begin, *OPENING), False)
    while at < len(one.tokens):
        kind = Kind.USER if turn % 2 == 0 else Kind.ANSWER
        start = at
        while at < len(one.tokens) and one.kinds[at] is kind and one.tokens[at] not in TURNS.stops:
            assert one.tokens[at] == drawn[at]
            assert temperatures[at] == (1.0 if kind is Kind.USER else temperatures[start])
            assert kind is Kind.USER or temperatures[at] in (0.0, 0.7)
            at += 1
        expect(TURNS.answer if kind is Kind.USER else (*TURNS.user, *OPENING), True)
        turn += 1


def test_about_half_of_the_answers_are_greedy() -> None:
    """Served at temperature 0 and above, a drafter needs both. 400 fair coins: off by more than 60 in one of 10^8 cases."""
    greedy = 0
    for seed in range(400):
        one = a_dialogue(seed=seed)
        greedy += feed(one, [0, 0, 0, 0, 3, 0, 0])[-1][2] == 0.0
    assert 140 <= greedy <= 260


def test_the_template_is_taken_apart_without_a_rest() -> None:
    """Text that is not in the target's own format would be a language that nobody speaks to it."""
    turns = Turns.of(TOKENIZER, frozenset({7}))
    first, second, third = "one?", "two.", "three?"
    parts = (turns.begin, first.encode(), turns.answer, second.encode(), turns.user, third.encode())
    whole = [token for part in parts for token in part]
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": content} for role, content in zip(roles, (first, second, third), strict=True)]
    text = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
    assert TOKENIZER.encode(text, add_special_tokens=False)[: len(whole)] == whole
    asked = TOKENIZER.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert TOKENIZER.encode(asked, add_special_tokens=False) == whole[: len(turns.begin) + 4 + len(turns.answer)]
    assert turns.stops == {7, TOKENIZER.convert_tokens_to_ids("<|im_end|>")}


@pytest.mark.parametrize(
    ("template", "named"),
    [
        (None, "no chat template"),
        ("{{ messages[0]['content'] }} {{ messages[1]['content'] }}", "every message once"),
        ("{% for m in messages %}[{{ m['content'] }}{{ m['content'] }}]{% endfor %}", "every message once"),
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", "nothing between its messages"),
    ],
)
def test_a_target_that_cannot_converse_is_refused_with_a_way_out(template: str | None, named: str) -> None:
    """The first is every base model; without the hint its user would not know that texts can be given."""
    with pytest.raises(ValueError, match=named) as caught:
        Turns.of(byte_tokenizer(chat_template=template), frozenset())
    assert "--text" in str(caught.value)


def test_openings_are_a_function_of_the_seed_and_differ() -> None:
    """The same few beginnings would be dropped as duplicates."""
    many = [opening(random.Random(seed)) for seed in range(300)]
    assert many == [opening(random.Random(seed)) for seed in range(300)]
    assert len(set(many)) > 150 and not any("{" in text for text in many)
