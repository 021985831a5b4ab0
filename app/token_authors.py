"""Who drafted which part of a text.

Text becomes certain later than tokens do: a character may be split over tokens of different drafters. The text is the
engine's; decoding once more on this side only finds where one token's text ends. A piece that several tokens share counts
as the last one's, which completed it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence, Set

from engine.request import Delta
from engine.text import TextStream


class TokenAuthors:
    """Splits the text of one answer's deltas, in order, by token. The pieces joined are the deltas' texts joined."""

    def __init__(self, decode: Callable[[Sequence[int]], str], byte_ids: Set[int] = frozenset()) -> None:
        """`decode` and `byte_ids` as the engine has them."""
        self._stream = TextStream(decode, byte_ids=byte_ids)
        self._owed: deque[tuple[int, int]] = deque()  # characters that are still to come from the engine, by token
        self._creators: list[str] = []

    def creator(self, index: int) -> str:
        """Who drafted the token at that place of the answer; "target" before the first one."""
        return self._creators[index] if self._creators else "target"

    def split(self, delta: Delta) -> list[tuple[str, str]]:
        """(text, author) pieces of one delta, none of them empty."""
        return [(text, self.creator(index)) for text, index in self.split_by_token(delta)]

    def split_by_token(self, delta: Delta) -> list[tuple[str, int]]:
        """(text, place in the answer of the token that completed it), no text empty.

        A token without text of its own is not among them; one whose end the engine holds back comes twice.
        """
        for token, creator in zip(delta.token_ids, delta.creators, strict=True):
            self._creators.append(creator)
            self._owe(self._stream.push(token).text)
        if delta.finish_reason is not None:
            self._owe(self._stream.finish())
        pieces: list[tuple[str, int]] = []
        text = delta.text
        while text:
            length, index = self._owed.popleft() if self._owed else (len(text), self._last)
            pieces.append((text[:length], index))
            if length > len(text):
                self._owed.appendleft((length - len(text), index))
            text = text[length:]
        return pieces

    @property
    def _last(self) -> int:
        return max(len(self._creators) - 1, 0)

    def _owe(self, text: str) -> None:
        if text:
            self._owed.append((len(text), self._last))
