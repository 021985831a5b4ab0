"""One choice of an answer as it arrives: text, log-probabilities that keep step with it, and how it ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from app.errors import RequestFailed
from app.tool_reading import CallPiece, Reader, ReadPiece
from engine.request import Delta, EngineStopped, FinishReason, RequestStats, TokenLogprob


@dataclass(frozen=True, slots=True)
class Piece:
    """What one delta adds to a choice."""

    text: str
    logprobs: list[TokenLogprob]  # of the tokens whose text begins inside the text so far; at the end of all that are left
    calls: tuple[CallPiece, ...] = ()


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that its answers begin with."""

    text: str
    tokens: tuple[int, ...] = ()  # if log-probabilities are wanted
    offsets: tuple[int, ...] = ()  # where each token begins in `text`

    def rated(self, of_others: Sequence[TokenLogprob]) -> list[TokenLogprob]:
        """One entry per token; `of_others` are those of all but the first one."""
        if not self.tokens:
            return []
        entries = [TokenLogprob(self.tokens[0], None, (), 0), *of_others]
        return [replace(one, text_offset=offset) for one, offset in zip(entries, self.offsets, strict=True)]


@dataclass(slots=True)
class Choice:
    """What has arrived of one choice.

    A token's log-probability waits until text from its place on is given out. So a stream and a whole answer tell the same,
    and a place in the text is never behind the end of the text, even if a stop string cuts it.
    """

    token_text: Callable[[int], str]
    echo: Echo | None = None  # to be given out first
    reader: Reader | None = None  # finds calls of functions in the text; None: there are none
    num_output_tokens: int = 0
    num_chars: int = 0  # of the answer, without the echo
    reason: str = ""
    stats: RequestStats | None = None
    has_calls: bool = False
    sum_logprobs: float = 0.0
    _held: list[TokenLogprob] = field(default_factory=list)  # due, but what they belong to is still being read
    _waiting: list[TokenLogprob] = field(default_factory=list)
    _first: int | None = None  # the first token
    _prompt_logprobs: tuple[TokenLogprob, ...] = ()
    _shift: int = 0  # characters in front of the answer

    def take(self, delta: Delta) -> Piece:
        """Book a delta. Raises EngineStopped or RequestFailed if it ends the request without an answer."""
        self.num_output_tokens += len(delta.token_ids)
        if delta.finish_reason is FinishReason.ABORT:
            raise EngineStopped("The server stopped before the answer was complete.")
        if delta.finish_reason is FinishReason.ERROR:
            raise RequestFailed(delta.error or "The engine failed on this request.")
        self._waiting.extend(delta.logprobs)
        self.sum_logprobs += sum(one.logprob or 0.0 for one in delta.logprobs)
        self._prompt_logprobs = self._prompt_logprobs or delta.prompt_logprobs
        self.num_chars += len(delta.text)
        if self._first is None and delta.token_ids:
            self._first = delta.token_ids[0]
        is_over = delta.finish_reason is not None
        if delta.finish_reason is not None:
            self.reason = delta.finish_reason.value
            self.stats = delta.stats
        read = self._read(delta.text, is_over)
        self.has_calls = self.has_calls or bool(read.calls)
        if self.has_calls and delta.finish_reason is FinishReason.STOP:
            self.reason = "tool_calls"
        due = [*self._held, *self._due(is_over)]
        is_shown = is_over or read.content or read.calls
        self._held = [] if is_shown else due
        if not is_shown:
            return Piece(read.content, [], read.calls)
        text, before = self._with_echo(read.content)
        return Piece(text, before + [replace(one, text_offset=one.text_offset + self._shift) for one in due], read.calls)

    @property
    def mean_logprob(self) -> float:
        """Per token, if log-probabilities were asked for."""
        return self.sum_logprobs / max(self.num_output_tokens, 1)

    def _read(self, text: str, is_over: bool) -> ReadPiece:
        if self.reader is None:
            return ReadPiece(text)
        read = self.reader.push(text)
        if not is_over:
            return read
        rest = self.reader.finish()
        return ReadPiece(read.content + rest.content, read.calls + rest.calls)

    def _due(self, is_over: bool) -> list[TokenLogprob]:
        count = len(self._waiting)
        if not is_over:
            count = next((i for i, one in enumerate(self._waiting) if one.text_offset >= self.num_chars), count)
        due, self._waiting = self._waiting[:count], self._waiting[count:]
        return [replace(one, text_offset=min(one.text_offset, self.num_chars)) for one in due]

    def _with_echo(self, text: str) -> tuple[str, list[TokenLogprob]]:
        """The prompt in front of the first text, and between them what decoding the answer alone has dropped."""
        if self.echo is None:
            return text, []
        echo, self.echo = self.echo, None
        between = "" if self._first is None or not text else missing_space(self.token_text(self._first), text)
        self._shift = len(echo.text) + len(between)
        return echo.text + between + text, echo.rated(self._prompt_logprobs)


def missing_space(first: str, text: str) -> str:
    """The spaces in front of `first`, the first token's text, that `text` lacks.

    Tokenizers of the SentencePiece kind drop one or all of them at the start of whatever they decode.
    """
    num_spaces = len(first) - len(first.lstrip(" "))
    return next((first[:count] for count in range(num_spaces + 1) if text.startswith(first[count:])), "")
