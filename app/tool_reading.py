"""Calls in the text of an answer, found while it is written; a stream and a whole answer are read by the same code.

Each reader takes the text in pieces and gives out what is certain: content for the user, and calls. What may still become the
beginning of a call is held back, so that nobody sees half a tag. What turns out to be no call is content, as it was written.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

from app.tool_formats import CallFormat


@dataclass(frozen=True, slots=True)
class CallPiece:
    """What is added to a call. The first piece of a call has its id and the function's name."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class ReadPiece:
    """What has become certain."""

    content: str = ""
    calls: tuple[CallPiece, ...] = ()


class Reader(Protocol):
    """Reads one answer."""

    def push(self, text: str) -> ReadPiece:
        """Read on."""

    def finish(self) -> ReadPiece:
        """The rest, now that no text follows."""


class DemandedReader:
    """Reads answers that are calls and nothing else, held to that by a grammar; arguments come out as they are written."""

    def __init__(self, form: CallFormat) -> None:
        """At the beginning of an answer."""
        self._head = re.compile(rf"\s*{re.escape(form.head)}([^\"]+){re.escape(form.middle)}")
        self._tail = form.tail
        self._buffer = ""
        self._value: _ObjectEnd | None = None  # inside of arguments
        self._rest = 0  # characters of the tail that are still to come
        self._count = 0

    def push(self, text: str) -> ReadPiece:
        """See :class:`Reader`."""
        self._buffer += text
        calls: list[CallPiece] = []
        while self._buffer:
            if self._rest:
                skipped = min(self._rest, len(self._buffer))
                self._buffer = self._buffer[skipped:]
                self._rest -= skipped
            elif self._value is None:
                found = self._head.match(self._buffer)
                if found is None:
                    break
                self._buffer = self._buffer[found.end() :]
                self._value = _ObjectEnd()
                calls.append(CallPiece(self._count, "", _new_id(), found[1]))
            else:
                end = self._value.find(self._buffer)
                calls.append(CallPiece(self._count, self._buffer[:end]))
                self._buffer = self._buffer[len(self._buffer) if end is None else end :]
                if end is not None:
                    self._value, self._rest = None, len(self._tail)
                    self._count += 1
        return ReadPiece(calls=tuple(calls))

    def finish(self) -> ReadPiece:
        """See :class:`Reader`; a call whose name was not complete has not begun."""
        return ReadPiece()


class TaggedReader:
    """Reads any text with calls between tags, each of which is given out when it is complete."""

    def __init__(self, form: CallFormat, names: Collection[str]) -> None:
        """Only functions of these names are calls."""
        self._opening, self._closing = form.opening.strip(), form.closing.strip()
        self._key, self._names = form.key, names
        self._buffer = ""
        self._tried = 0  # closing tags in front of it were no end of a call
        self._is_inside = False
        self._space = ""  # white space at the beginning, or behind a call: it belongs to a text, or to nothing
        self._at_edge = True
        self._count = 0

    def push(self, text: str) -> ReadPiece:
        """See :class:`Reader`."""
        self._buffer += text
        content: list[str] = []
        calls: list[CallPiece] = []
        while True:
            if not self._is_inside:
                start = self._buffer.find(self._opening)
                if start < 0:
                    kept = _overlap(self._buffer, self._opening)
                    cut = len(self._buffer) - kept
                    content.append(self._text(self._buffer[:cut]))
                    self._buffer = self._buffer[cut:]
                    break
                content.append(self._text(self._buffer[:start]))
                self._buffer, self._is_inside, self._tried = self._buffer[start:], True, 0
            end = self._buffer.find(self._closing, self._tried)
            if end < 0:
                # A tag that is there in part only may be completed.
                self._tried = max(self._tried, len(self._buffer) - len(self._closing) + 1)
                break
            inner = self._buffer[len(self._opening) : end]
            end += len(self._closing)
            if (call := self._call(inner)) is not None:
                calls.append(call)
                self._buffer, self._is_inside = self._buffer[end:], False
                self._at_edge, self._space = True, ""
            elif _is_open_string(inner):
                self._tried = end  # the tag is part of an argument
            else:
                content.append(self._text(self._buffer[:end]))
                self._buffer, self._is_inside = self._buffer[end:], False
        return ReadPiece("".join(content), tuple(calls))

    def finish(self) -> ReadPiece:
        """See :class:`Reader`."""
        content = self._text(self._buffer)
        if self._count == 0:  # an answer of white space alone
            content += self._space
        self._buffer = self._space = ""
        return ReadPiece(content)

    def _text(self, text: str) -> str:
        if not self._at_edge or not text:
            return text
        self._space += text
        if self._space.isspace():
            return ""
        text, self._space, self._at_edge = self._space, "", False
        return text if self._count == 0 else text.lstrip()

    def _call(self, inner: str) -> CallPiece | None:
        call = read_call(inner, self._key, self._names, self._count)
        self._count += call is not None
        return call


class WholeReader:
    """Reads answers that are either text or calls from the first character on."""

    def __init__(self, form: CallFormat, names: Collection[str]) -> None:
        """Only functions of these names are calls."""
        self._key, self._names = form.key, names
        self._buffer = ""
        self._is_text = False

    def push(self, text: str) -> ReadPiece:
        """See :class:`Reader`."""
        self._buffer += text
        start = self._buffer.lstrip()[:1]
        self._is_text = self._is_text or start not in ("", "{")
        if not self._is_text:
            return ReadPiece()
        content, self._buffer = self._buffer, ""
        return ReadPiece(content)

    def finish(self) -> ReadPiece:
        """See :class:`Reader`."""
        calls: list[CallPiece] = []
        rest = self._buffer.strip()
        while rest:
            try:
                end = json.JSONDecoder().raw_decode(rest)[1]
            except (ValueError, RecursionError):
                return ReadPiece(self._buffer)
            call = read_call(rest[:end], self._key, self._names, len(calls))
            if call is None:
                return ReadPiece(self._buffer)
            calls.append(call)
            rest = rest[end:].lstrip(" \t\r\n;")
        return ReadPiece(calls=tuple(calls)) if calls else ReadPiece(self._buffer)


def read_call(text: str, key: str, names: Collection[str], index: int) -> CallPiece | None:
    """The call that a JSON text stands for; None if it stands for none."""
    try:
        found: Any = json.loads(text)
        if not isinstance(found, dict) or found.get("name") not in names or not isinstance(found.get(key, {}), dict):
            return None
        arguments = json.dumps(found.get(key, {}), ensure_ascii=False)
    except (ValueError, TypeError, RecursionError):
        return None
    return CallPiece(index, arguments, _new_id(), found["name"])


class _ObjectEnd:
    """Finds the end of a JSON object that comes in pieces; its text is known to be right."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = False

    def find(self, text: str) -> int | None:
        """How many characters of `text` still belong to the object, if it ends in there."""
        for place, char in enumerate(text):
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif char == "\\":
                    self._is_escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return place + 1
        return None


def _is_open_string(text: str) -> bool:
    """Whether a JSON text breaks off inside of a string."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string")
    except RecursionError:
        return False
    return False


def _overlap(text: str, tag: str) -> int:
    """How many characters at the end of `text` may be the beginning of `tag`."""
    return next((size for size in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:size])), 0)


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
