"""The text and the bytes of single tokens, for people who look at log-probabilities.

A token is decoded behind another one, since tokenizers of the SentencePiece kind drop the space in front of a text. Tokens
that are no whole characters have bytes but no text; they are shown as the OpenAI API shows them, ``bytes:\\xe6\\xbc``, so
that different ones stay different. The bytes of an answer's tokens, joined, are the bytes of its text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Protocol

_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))  # bytes that byte-level vocabularies keep


class Decoder(Protocol):
    """What is needed of a ``transformers`` tokenizer."""

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, ids: Any, /, **options: Any) -> str: ...
    def convert_ids_to_tokens(self, ids: list[int], /) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class TokenText:
    """One token as it is shown."""

    text: str
    bytes: list[int] | None  # None: not known


class TokenTexts:
    """Looks tokens up, and remembers them: at most one entry per token of the vocabulary."""

    def __init__(self, tokenizer: Decoder) -> None:
        """The tokenizer is asked nothing yet."""
        self._tokenizer = tokenizer
        self._known: dict[int, TokenText] = {}
        self._letters: dict[str, int] = {}

    def __call__(self, token_id: int) -> TokenText:
        """Text and bytes of a token; special ones have their names."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._look_up(token_id)
        return found

    def _look_up(self, token_id: int) -> TokenText:
        before = self._tokenizer.encode("a", add_special_tokens=False)[-1:]
        text, start = self._decode([*before, token_id]), self._decode(before)
        text = text[len(start) :] if text.startswith(start) else self._decode([token_id])
        if "\ufffd" not in text:
            return TokenText(text, list(text.encode("utf-8", "replace")))
        raw = self._raw(token_id)
        if raw is None or raw.decode("utf-8", "replace") != text:
            return TokenText(text, None)
        is_whole = "\ufffd" in raw.decode("utf-8", "ignore")  # the replacement character itself is a character too
        return TokenText(text if is_whole else "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), list(raw))

    def _raw(self, token_id: int) -> bytes | None:
        """The bytes behind the vocabulary's spelling, if it is one of bytes."""
        if not self._letters:
            self._letters = byte_letters()
        piece = self._tokenizer.convert_ids_to_tokens([token_id])[0]
        if named := _BYTE_TOKEN.fullmatch(piece):
            return bytes([int(named[1], 16)])
        if all(letter in self._letters for letter in piece):
            return bytes(self._letters[letter] for letter in piece)
        return None

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def byte_letters() -> dict[str, int]:
    """The letter that byte-level vocabularies write for each byte: itself if printable, else the next one from U+0100 on."""
    letters = {chr(byte): byte for byte in _PRINTABLE}
    others = [byte for byte in range(256) if byte not in _PRINTABLE]
    return letters | {chr(256 + place): byte for place, byte in enumerate(others)}
