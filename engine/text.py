"""From token ids to text as it becomes certain, and the stop strings in it.

A :class:`TextStream` gives out exactly the text that decoding all ids at once would give, in pieces and without looking
back further than a short window, whatever the ids are. Three things make text of a prefix of ids uncertain:

* *Byte-level tokenizers* decode the joined bytes, replacing invalid stretches by U+FFFD. More bytes can change the last
  character only, and only if it is U+FFFD (an unfinished character); so such an end is held back. At most three bytes
  into any window, decoding agrees with decoding from the start, however the window's first token splits a character: a
  UTF-8 reader is back in step at the next byte that is not a continuation byte, and a character has no more than three
  of those.
* *SentencePiece tokenizers* drop a space at the very start of what they decode. A window may start anywhere as long as
  the characters concerned have been given out already.
* *Byte fallback* turns a run of byte tokens into text if the **whole** run is valid UTF-8, and otherwise into one
  U+FFFD per byte: a run's text is certain only when another token ends it. These ids must be named
  (:func:`byte_fallback_ids`), for a byte token cannot be told from a letter by decoding it.

Stop strings are looked for in certain text, so what stops a request does not depend on how ids were grouped. Text that
may be the beginning of a stop string is held back until it is known not to be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

_UNSURE = "\ufffd"
_UNFINISHED = 3  # most bytes of an unfinished character
_KEEP = 6  # tokens a window starts again with; enough in ordinary text to hold a few characters
_PATIENCE = 64  # tokens to wait for when text given out seems to have changed


@dataclass(frozen=True, slots=True)
class PushResult:
    """What one token adds."""

    text: str  # newly certain text
    stopped: bool  # a stop string was completed; nothing follows


class TextStream:
    """The text of one answer, token by token. The pieces' concatenation, :attr:`text`, never has to be taken back."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop: Sequence[str] = (),
        *,
        byte_ids: Set[int] = frozenset(),
        num_deaf: int = 0,
    ) -> None:
        """Start with no text.

        Args:
            decode: all ids to all text. It must not tidy spaces up afterwards (``clean_up_tokenization_spaces=False``).
            stop: strings that end the text, and are left out of it. ValueError for an empty one.
            byte_ids: the ids of byte-fallback tokens, see :func:`byte_fallback_ids`.
            num_deaf: tokens at the beginning that complete no stop string. One that begins there may be completed later.
        """
        self._window = _Window(decode, byte_ids)
        self._stop = _StopScan(stop)
        self._pieces: list[str] = []
        self._num_deaf = num_deaf
        self._num_chars = 0

    @property
    def num_chars(self) -> int:
        """Characters that are certain, those held back as a possible stop string included."""
        return self._num_chars

    @property
    def text(self) -> str:
        """All text given out so far."""
        return "".join(self._pieces)

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._stop.found

    def push(self, token_id: int) -> PushResult:
        """Add one token."""
        assert not self.stopped, "no token may follow a stop string"
        is_deaf = self._num_deaf > 0
        self._num_deaf -= is_deaf
        return PushResult(self._give(self._read(self._window.push(token_id), is_deaf)), self.stopped)

    def finish(self) -> str:
        """The rest of the text, now that no token follows. A stop string completed only here is cut off as well."""
        if self.stopped:
            return ""
        text = self._read(self._window.finish(), self._num_deaf > 0)
        return self._give(text + self._stop.finish())

    def _read(self, text: str, is_deaf: bool) -> str:
        self._num_chars += len(text)
        return self._stop.push(text, is_deaf=is_deaf)

    def _give(self, text: str) -> str:
        if text:
            self._pieces.append(text)
        return text


def byte_fallback_ids(vocab: Mapping[str, int]) -> frozenset[int]:
    """Ids of the tokens <0x00> to <0xFF> in a vocabulary (token to id); empty unless all of them are there."""
    ids = [vocab.get(f"<0x{byte:02X}>") for byte in range(256)]
    present = [i for i in ids if i is not None]
    return frozenset(present) if len(present) == 256 else frozenset()


class _Window:
    """The last few ids, and how much of their text is certain and given out.

    Invariants: the text of all ids ends with ``decode(ids)[sent:]``, and does so whatever ids follow; every character
    before the one at ``sent`` has been given out.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], byte_ids: Set[int]) -> None:
        self._decode = decode
        self._byte_ids = byte_ids
        self._ids: list[int] = []
        self._text = ""  # decode(ids), except while a run of byte tokens is open
        self._sent = 0
        self._trim_at = 2 * _KEEP

    def push(self, token_id: int) -> str:
        run_open = bool(self._ids) and self._ids[-1] in self._byte_ids
        if run_open and self._is_invisible(token_id):
            return ""  # left out before byte tokens are joined, so it does not end their run
        self._ids.append(token_id)
        if token_id in self._byte_ids:
            return ""  # an open run; also, not decoding it again and again keeps long runs cheap
        text = self._decode(self._ids)
        if text == self._text and not run_open and self._is_invisible(token_id):
            self._ids.pop()  # or a thousand of them would make the window as long
            return ""
        if not text.startswith(self._text[: self._sent]) and len(self._ids) < _PATIENCE:
            return ""  # only if byte ids exist and were not named: a run is unfinished again, so wait for its end
        self._text = text
        certain = len(text)
        # Three are held back, not one: unnamed byte tokens show an unfinished character as one U+FFFD per byte.
        while certain > max(self._sent, len(text) - _UNFINISHED) and text[certain - 1] == _UNSURE:
            certain -= 1
        piece = text[self._sent : certain]
        self._sent = max(self._sent, certain)
        if len(self._ids) >= self._trim_at:
            self._trim()
        return piece

    def finish(self) -> str:
        text = self._decode(self._ids) if self._ids else ""
        piece = text[self._sent :]
        self._sent = len(text)
        return piece

    def _is_invisible(self, token_id: int) -> bool:
        """Whether decoding leaves the token out, as special ones; asked of two: a space at the start is lost too."""
        return self._decode([token_id, token_id]) == ""

    def _trim(self) -> None:
        """Drop ids from the front, keeping enough of them to read the text after ``sent`` the same way for ever."""
        rest = self._text[self._sent :]
        keep = _KEEP
        while keep < len(self._ids):
            text = self._decode(self._ids[-keep:])
            sent = len(text) - len(rest)
            # More than _UNFINISHED characters given out: the reader of bytes is in step, a dropped space behind.
            if sent > _UNFINISHED and text[sent:] == rest:
                del self._ids[:-keep]
                self._text, self._sent = text, sent
                break
            keep *= 2
        self._trim_at = max(2 * len(self._ids), 2 * _KEEP)


class _StopScan:
    """Finds the stop string that is completed first; of several completed by the same character, the longest.

    One Knuth-Morris-Pratt automaton per stop string: ``matched[i]`` is the length of the longest beginning of
    ``stop[i]`` that the text read so far ends with. The longest of these is held back; its start never moves back, so
    nothing given out can turn out to belong to a stop string. Work is proportional to the text, however alike text and
    stop strings are.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        if any(not s for s in stop):
            raise ValueError("a stop string must not be empty")
        self._stop = tuple(dict.fromkeys(stop))
        self._borders = [_borders(s) for s in self._stop]
        self._matched = [0] * len(self._stop)
        self._held = ""
        self.found = False

    def push(self, text: str, *, is_deaf: bool = False) -> str:
        """Read on; returns text that is certainly in front of every stop string. A deaf reader finds none, but remembers."""
        if not self._stop or not text:
            return text
        buffer = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            longest = 0
            for i, stop in enumerate(self._stop):
                k = self._matched[i]
                while k and stop[k] != char:
                    k = self._borders[i][k - 1]
                k += stop[k] == char
                if k == len(stop):
                    if is_deaf:
                        k = self._borders[i][k - 1]
                    else:
                        longest = max(longest, k)
                self._matched[i] = k
            if longest:
                self.found = True
                self._held = ""
                return buffer[: end - longest]
        given = len(buffer) - max(self._matched)
        self._held = buffer[given:]
        return buffer[:given]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


def _borders(s: str) -> list[int]:
    """For each beginning of `s`, the length of its longest proper beginning that it also ends with."""
    borders = [0] * len(s)
    k = 0
    for i in range(1, len(s)):
        while k and s[k] != s[i]:
            k = borders[k - 1]
        k += s[k] == s[i]
        borders[i] = k
    return borders
