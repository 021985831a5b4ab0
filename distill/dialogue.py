"""One text that the target writes in a conversation with itself: whose token comes next, and at which temperature.

The conversation is begun with the chat template's own words for a user's turn. The user's message is sampled at temperature 1
until the target ends it, the answer greedily or at 0.7, then the next user's turn begins, up to the length of the text.
Without a chat template there are no turns: all of the text is an answer.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from distill.topics import opening

_LONGEST_MESSAGE, _LONGEST_ANSWER = 200, 256  # tokens; after them the turn is ended for the target
_GREEDY_SHARE = 0.5


class Kind(IntEnum):
    """Who wrote a token."""

    GIVEN = 0  # the template and the opening of the user's message
    USER = 1
    ANSWER = 2


@dataclass(frozen=True, slots=True)
class Turns:
    """The chat template, taken apart around its messages. Token ids."""

    begin: tuple[int, ...]  # before the first user's message
    answer: tuple[int, ...]  # between a user's message and the answer
    user: tuple[int, ...]  # between an answer and the next user's message
    stops: frozenset[int]  # tokens that end a turn

    @staticmethod
    def of(tokenizer: Any, stops: frozenset[int]) -> Turns:
        """Read them off the tokenizer's chat template. ValueError if the template hides a message or there is none."""
        marks = ("@@one@@", "@@two@@", "@@three@@")
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError("the target's tokenizer has no chat template; give texts of your own with --text")
        roles = ("user", "assistant", "user")
        messages = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
        whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
        if any(whole.count(mark) != 1 for mark in marks):
            raise ValueError("the chat template does not show every message once; give texts of your own with --text")
        begin, rest = whole.split(marks[0])
        answer, rest = rest.split(marks[1])
        user, end = rest.split(marks[2])
        if not answer or not user:
            raise ValueError("the chat template has nothing between its messages; give texts of your own with --text")

        def encode(text: str) -> tuple[int, ...]:
            return tuple(tokenizer.encode(text, add_special_tokens=False))

        # A template's own marks may be special without being the tokenizer's end of text.
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = {*tokenizer.all_special_ids, *(token_id for token_id, token in added.items() if token.special)}
        ends = {ids[0] for text in (answer, user, end) if (ids := encode(text)) and ids[0] in special}
        return Turns(encode(begin), encode(answer), encode(user), stops | ends)


class Dialogue:
    """Decides the next token of one text; `kinds` says who wrote each token so far."""

    def __init__(self, turns: Turns, encode: Callable[[str], Sequence[int]], rng: random.Random) -> None:
        self._turns, self._encode, self._rng = turns, encode, rng
        self._given: deque[int] = deque()
        self._message: list[int] = []
        self._count = 0
        self.kind = Kind.USER
        self.temperature = 1.0
        self.tokens: list[int] = []
        self.kinds: list[Kind] = []
        self.messages: list[tuple[int, ...]] = []
        self._begin_message(turns.begin)

    def next_temperature(self) -> float:
        """Temperature to draw the next token at; 0 for the likeliest one, whatever it then makes of it."""
        return 0.0 if self._given else self.temperature

    def push(self, drawn: int) -> int:
        """The next token: `drawn`, unless the template prescribes another. It has become part of the text."""
        if self._given:
            self.tokens.append(self._given.popleft())
            self.kinds.append(Kind.GIVEN)
            return self.tokens[-1]
        self._count += 1
        limit = _LONGEST_MESSAGE if self.kind is Kind.USER else _LONGEST_ANSWER
        if drawn in self._turns.stops or self._count > limit:
            return self._end_turn(drawn)
        if self.kind is Kind.USER:
            self._message.append(drawn)
        self.tokens.append(drawn)
        self.kinds.append(self.kind)
        return drawn

    def _end_turn(self, drawn: int) -> int:
        was = self.kind
        if was is Kind.USER:
            self.messages.append(tuple(self._message))
            self._given.extend(self._turns.answer)
            self.kind, self._count = Kind.ANSWER, 0
            self.temperature = 0.0 if self._rng.random() < _GREEDY_SHARE else 0.7
        else:
            self._begin_message(self._turns.user)
        token = self._given.popleft()
        self.tokens.append(token)
        # The end of an answer is something that a drafter has to foresee, if the target chose it.
        self.kinds.append(was if token == drawn else Kind.GIVEN)
        return token

    def _begin_message(self, before: Sequence[int]) -> None:
        start = list(self._encode(opening(self._rng)))
        self._given.extend((*before, *start))
        self._message = start
        self.kind, self.temperature, self._count = Kind.USER, 1.0, 0
