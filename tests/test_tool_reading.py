"""Calls found in text: in any pieces the same, without half a tag in what is shown, and nothing lost."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.tool_formats import HERMES, LLAMA
from app.tool_reading import CallPiece, DemandedReader, Reader, TaggedReader, WholeReader

NAMES = ("f", "get_weather")


def read(reader: Reader, pieces: Sequence[str]) -> tuple[list[str], str, list[tuple[str, str]]]:
    """What was shown after each piece, all that was shown, and the calls."""
    shown: list[str] = []
    calls: list[tuple[str, str]] = []
    ids: set[str] = set()
    for piece in (*map(reader.push, pieces), reader.finish()):
        shown.append(piece.content)
        for call in piece.calls:
            if call.id is not None:
                assert call.index == len(calls) and call.name and call.id not in ids
                ids.add(call.id)
                calls.append((call.name, call.arguments))
            else:
                assert call.index == len(calls) - 1, "a piece of a call that did not begin"
                calls[-1] = (calls[-1][0], calls[-1][1] + call.arguments)
    return shown, "".join(shown), calls


def call(name: str, arguments: object, key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


def tagged(inner: str) -> str:
    return f"<tool_call>\n{inner}\n</tool_call>"


ONE, TWO = call("f", {"a": 1}), call("get_weather", {"city": "Köln </tool_call> \"x\" {"})
TAGGED: list[tuple[str, str, list[str]]] = [
    ("plain text", "plain text", []),
    ("", "", []),
    ("  \n", "  \n", []),
    (" a < b <tool> ", " a < b <tool> ", []),
    (tagged(ONE), "", [ONE]),
    ("\n\n" + tagged(ONE) + "\n", "", [ONE]),
    (tagged(ONE) + "\n" + tagged(TWO), "", [ONE, TWO]),
    ("Let me see.\n" + tagged(TWO) + " Done.", "Let me see.\nDone.", [TWO]),
    ("<tool_call>" + ONE + "</tool_call>", "", [ONE]),
    (tagged("{broken"), tagged("{broken"), []),
    (tagged("{broken") + tagged(ONE), tagged("{broken"), [ONE]),
    (tagged(call("unknown", {})), tagged(call("unknown", {})), []),
    (tagged(call("f", [1])), tagged(call("f", [1])), []),
    (tagged("[1]"), tagged("[1]"), []),
    ("x<tool_call>\n" + ONE, "x<tool_call>\n" + ONE, []),
    ("x<tool_ca", "x<tool_ca", []),
]


@given(st.sampled_from(TAGGED), st.lists(st.integers(0, 200), max_size=12))
def test_tagged_calls_in_any_pieces(case: tuple[str, str, list[str]], cuts: list[int]) -> None:
    """How a step groups tokens must not show: not in the content, not in the calls."""
    text, content, calls = case
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces = [text[a:b] for a, b in zip(places, places[1:], strict=False)]
    shown, whole, found = read(TaggedReader(HERMES, NAMES), pieces)
    assert whole == content
    assert [json.loads(arguments) for _, arguments in found] == [json.loads(one)["arguments"] for one in calls]
    assert [name for name, _ in found] == [json.loads(one)["name"] for one in calls]
    if calls:
        assert "<tool" not in "".join(shown[:-1]).replace(content, "")


def test_half_a_tag_is_never_shown() -> None:
    """Character by character: what is shown never ends with the beginning of a tag that then becomes one."""
    reader = TaggedReader(HERMES, NAMES)
    shown = "".join(reader.push(char).content for char in "a <b" + tagged(ONE))
    assert shown == "a <b"


def test_text_is_shown_as_soon_as_it_is_no_tag() -> None:
    """A stream that holds everything back is no stream."""
    reader = TaggedReader(HERMES, NAMES)
    assert reader.push("Hello").content == "Hello"
    assert reader.push(" <").content == " "
    assert reader.push("b>").content == "<b>"
    assert reader.push("<tool_").content == ""
    assert reader.push("box>").content == "<tool_box>"


def test_long_arguments_are_read_once() -> None:
    """Reading the buffer again for every piece would make a long call quadratic."""
    reader = TaggedReader(HERMES, NAMES)
    text = tagged(call("f", {"a": "x" * 200_000}))
    pieces = [text[i : i + 4] for i in range(0, len(text), 4)]
    assert len(read(reader, pieces)[2]) == 1


WHOLE: list[tuple[str, str, list[str]]] = [
    ("plain {text}", "plain {text}", []),
    (" \n", " \n", []),
    (call("f", {"a": 1}, "parameters"), "", ["f"]),
    (" " + call("f", {}, "parameters") + "\n", "", ["f"]),
    (call("f", {}, "parameters") + "; " + call("get_weather", {}, "parameters"), "", ["f", "get_weather"]),
    ('{"a": 1}', '{"a": 1}', []),
    ("{broken", "{broken", []),
    (call("f", {}, "parameters") + " and more", call("f", {}, "parameters") + " and more", []),
]


@given(st.sampled_from(WHOLE), st.integers(1, 7))
def test_whole_calls_in_any_pieces(case: tuple[str, str, list[str]], size: int) -> None:
    """Llama's form: an answer is text or calls, and shows which with its first character."""
    text, content, names = case
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    _, whole, found = read(WholeReader(LLAMA, NAMES), pieces)
    assert (whole, [name for name, _ in found]) == (content, names)


@pytest.mark.parametrize("form", [HERMES, LLAMA], ids=lambda form: form.name)
@given(size=st.integers(1, 9), cut=st.integers(0, 400))
def test_demanded_calls_come_as_they_are_written(form: object, size: int, cut: int) -> None:
    """Arguments stream; an answer that is cut gives what there was, and a whole one exactly its arguments."""
    assert form in (HERMES, LLAMA)
    used = HERMES if form is HERMES else LLAMA
    arguments = ['{"a": "}\\"{", "b": [{}, {"c": 1}]}', "{ }"]
    calls = [used.head + "f" + used.middle + one + used.tail for one in arguments[: 2 if used.opening else 1]]
    text = "\n".join(calls)
    cut = min(cut, len(text))
    pieces = [text[i : min(i + size, cut)] for i in range(0, cut, size)]
    _, content, found = read(DemandedReader(used), pieces)
    assert content == ""
    if cut == len(text):
        assert [one for _, one in found] == arguments[: len(calls)]
    for (name, got), wanted in zip(found, arguments, strict=False):
        assert name == "f" and wanted.startswith(got)


def test_the_first_piece_of_a_call_names_it() -> None:
    """Clients put calls together by index, and take id and name from the first piece only."""
    reader = DemandedReader(HERMES)
    pieces = [*reader.push(HERMES.head + "f" + HERMES.middle + '{"a"').calls, *reader.push(": 1}").calls]
    said = [(piece.index, piece.name, piece.arguments) for piece in pieces]
    assert said == [(0, "f", ""), (0, None, '{"a"'), (0, None, ": 1}")]
    assert pieces[0].id is not None and isinstance(pieces[1], CallPiece) and pieces[1].id is None
