"""Specifications into grammars: what is enforced, what is refused, and that nothing is weakened in silence."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.guided import MAX_GRAMMAR_CHARS, MAX_SPACE, Grammars, GrammarSpec, Kind, Place, json_spec
from engine.constraint import Constraint
from engine.request import RequestError
from models import toy

TOKENIZER = toy.byte_tokenizer()
VOCAB = len(TOKENIZER)
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
GRAMMARS = Grammars(TOKENIZER, vocab_size=VOCAB, stop_tokens=frozenset({END, TOKENIZER.eos_token_id}))


def compiled(kind: Kind, text: str) -> Place:
    return asyncio.run(GRAMMARS.compile(GrammarSpec(kind, text, "p")))


def by_schema(schema: Any) -> Place:
    return asyncio.run(GRAMMARS.compile(json_spec(schema, "p")))


def takes(place: Place, text: str) -> bool:
    """Whether the text is one of the grammar."""
    here: Place | None = place
    for byte in text.encode():
        if here is None or not here.allowed()[byte]:
            return False
        here = here.after(byte)
    return here is not None and here.is_accepting


def written(place: Place, seed: int, most: int = 400) -> str | None:
    """A random text of the grammar; None if it did not end in time."""
    rng = np.random.default_rng(seed)
    constraint = Constraint(place, [END])
    out = bytearray()
    while len(out) < most:
        row = constraint.row(())
        assert row is not None
        # Ends and what closes JSON more often than the rest, or random texts grow for ever.
        weights = np.where(row, 1.0, 0.0)
        weights[[END, *b'"}]']] *= 30
        token = int(rng.choice(VOCAB, p=weights / weights.sum()))
        if token == END:
            return out.decode()
        out.append(token)
        constraint.advance(token)
        if constraint.is_complete:
            return out.decode()
    return None


def _numbers(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    low, size = st.integers(-50, 50), st.integers(0, 40)
    bounds = st.builds(lambda a, b: {"minimum": a, "maximum": a + b}, low, size)
    return st.builds(lambda more: {"type": kind, **more}, st.one_of(st.just({}), bounds))


LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    _numbers("integer"),
    _numbers("number"),
    st.builds(lambda a, b: {"type": "string", "minLength": a, "maxLength": a + b}, st.integers(0, 3), st.integers(0, 5)),
    st.just({"type": "string", "pattern": "^[a-c]{2,4}$"}),
    st.lists(st.sampled_from(["a", "b", 1, 2.5, None, True, "ä\"\\"]), min_size=1, max_size=3).map(lambda v: {"enum": v}),
    st.sampled_from(["x", 3, None, [1, "a"], {"k": 1}]).map(lambda v: {"const": v}),
)


def _inner(parts: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    keys = ["a", "b c", "ü"]
    objects = st.builds(
        lambda props, required, more: {
            "type": "object",
            "properties": props,
            "required": [key for key in props if required & (1 << keys.index(key))],
            "additionalProperties": more,
        },
        st.dictionaries(st.sampled_from(keys), parts, max_size=3),
        st.integers(0, 7),
        st.one_of(st.just(False), parts),
    )
    arrays = st.builds(
        lambda items, a, b: {"type": "array", "items": items, "minItems": a, "maxItems": a + b},
        parts,
        st.integers(0, 2),
        st.integers(0, 2),
    )
    tuples = st.lists(parts, min_size=1, max_size=2).map(
        lambda items: {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    )
    return st.one_of(objects, arrays, tuples, st.lists(parts, min_size=1, max_size=2).map(lambda options: {"anyOf": options}))


SCHEMAS = st.recursive(LEAVES, _inner, max_leaves=6)


@settings(max_examples=120)
@given(SCHEMAS, st.integers(0, 2**31))
def test_whatever_ends_fulfills_its_schema(schema: dict[str, Any], seed: int) -> None:
    """The promise of the field, for random texts of random schemas; the judge is another library."""
    place = by_schema(schema)
    for offset in range(3):
        text = written(place, seed + offset)
        if text is not None:
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))


@settings(max_examples=60)
@given(SCHEMAS, SCHEMAS, st.integers(0, 2**31))
def test_what_does_not_fulfill_a_schema_is_not_a_text_of_it(wanted: dict[str, Any], other: dict[str, Any], seed: int) -> None:
    """Texts of another schema: taken only where they are valid."""
    text = written(by_schema(other), seed)
    if text is not None and not jsonschema.Draft202012Validator(wanted).is_valid(json.loads(text)):
        assert not takes(by_schema(wanted), text)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": True},
        {"not": {"type": "string"}},
        {"if": {"type": "string"}, "then": {"minLength": 1}},
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"type": "object", "propertyNames": {"pattern": "^a"}},
        {"contains": {"type": "string"}},
        {"type": "object", "dependentRequired": {"a": ["b"]}},
        {"type": "object", "unevaluatedProperties": False},
        {"type": "string", "format": "no-such-format"},
        {"type": "string", "pattern": "(?=a)b"},
        {"$ref": "https://example.com/schema"},
        {"$ref": "#/$defs/missing"},
        {"$dynamicRef": "#x"},
        {"type": "strin"},
        {"enum": []},
        {"type": "array", "minItems": 3, "maxItems": 2},
        {"allOf": [{"type": "integer"}, {"type": "string"}]},
        False,
        # What the library would let pass:
        {"type": "object", "minProperties": 2, "additionalProperties": {"type": "null"}},
        {"properties": {"deep": {"items": {"minProperties": 3, "required": ["a"]}}}},
        {"x-guidance": {"lenient": True}, "not": {}},
        {"x-guidance": {"item_separator": ";"}, "type": "array"},
        {"$schema": "http://json-schema.org/draft-03/schema#", "extends": {"type": "string"}},
    ],
    ids=lambda schema: json.dumps(schema)[:40],
)
def test_what_cannot_be_enforced_is_refused(schema: Any) -> None:
    """An ignored keyword is a promise broken in silence."""
    with pytest.raises(RequestError) as error:
        by_schema(schema)
    assert error.value.param == "p"
    assert str(error.value).startswith("p: ") and len(str(error.value)) < 300, str(error.value)


def test_a_property_may_be_called_like_a_keyword() -> None:
    """Only schemas are looked through, not the names of properties, nor values."""
    by_schema({"properties": {"minProperties": {"type": "integer"}, "x-guidance": {}}})
    by_schema({"const": {"minProperties": 5}})
    by_schema({"type": "object", "minProperties": 2, "required": ["a"]})
    by_schema({"type": "object", "title": "t", "description": "d", "default": 1, "examples": [1], "deprecated": True})


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("regex", "(a", "unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", "[a&&b]", "no answer"),
        ("regex", "", "only the empty answer"),
        ("grammar", "start: nowhere", "nowhere"),
        ("choice", '[""]', "only the empty answer"),
        ("grammar", "start: start", "no answer"),
        ("grammar", "root ::= missing", "missing"),
        ("grammar", "any words", "neither Lark"),
        ("grammar", 'root ::= "a', "GBNF"),
    ],
)
def test_errors_are_the_librarys_own_words(kind: Kind, text: str, said: str) -> None:
    """Whoever wrote the grammar needs them; where the error is comes with the message."""
    with pytest.raises(RequestError, match=said) as error:
        compiled(kind, text)
    assert "\n" not in str(error.value)


@settings(max_examples=60)
@given(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=6))
def test_choices_are_taken_literally(choices: list[str]) -> None:
    """Quotes, backslashes, line ends and the syntax of grammars in them mean nothing."""
    place = compiled("choice", json.dumps(choices))
    for text in choices:
        assert takes(place, text), text
        for wrong in (text + "x", "x" + text, text[1:]):
            assert takes(place, wrong) == (wrong in choices), (choices, wrong)


def test_both_notations_of_grammars() -> None:
    """vLLM's users bring GBNF, llguidance's bring Lark."""
    for text in ('start: "a" ("," "a")*', 'root ::= "a" ("," "a")*'):
        place = compiled("grammar", text)
        assert takes(place, "a,a") and not takes(place, "a,") and not takes(place, "b")


def test_ends_are_no_part_of_a_text() -> None:
    """End tokens are the engine's business; other special tokens have no text and never follow."""
    place = compiled("regex", "(?s:.)*")
    assert place.is_accepting
    assert not place.allowed()[256:].any()
    named = compiled("grammar", 'start: "a" <|im_end|>').after(97)
    assert named is not None and not named.is_accepting
    assert np.flatnonzero(named.allowed()).tolist() == [END], "a grammar may ask for the end token itself"


def test_white_space_ends_some_time() -> None:
    """Small models like to go on with line ends for ever."""
    place = by_schema({"type": "object"})
    assert takes(place, '{\n    "a" : [1, 2]\n}')
    assert takes(place, "{" + " " * MAX_SPACE + "}")
    assert not takes(place, "{" + " " * (MAX_SPACE + 1) + "}")


def test_places_do_not_move() -> None:
    """Trees and answers share them: going on from one, rightly or wrongly, must leave it where it is."""
    place = compiled("regex", "ab|ac")
    there = place.after(97)
    assert there is not None
    assert place.after(98) is None and there.after(97) is None
    assert there.after(98) is not None and there.after(99) is not None
    assert np.flatnonzero(place.allowed()).tolist() == [97]
    assert np.flatnonzero(there.allowed()).tolist() == [98, 99]


def test_grammars_are_remembered_and_forgotten() -> None:
    """Compiled once per text, and not kept for ever."""
    grammars = Grammars(TOKENIZER, vocab_size=VOCAB, stop_tokens=frozenset({END}))

    async def many() -> None:
        first = await grammars.compile(GrammarSpec("regex", "a0", "p"))
        assert await grammars.compile(GrammarSpec("regex", "a0", "q")) is first
        for number in range(200):
            await grammars.compile(GrammarSpec("regex", f"a{number}", "p"))
        assert await grammars.compile(GrammarSpec("regex", "a0", "p")) is not first
        assert len(grammars._compiled) < 100

    asyncio.run(many())


def test_size_and_depth_are_bounded() -> None:
    """A body of eight megabytes must not become a grammar of a gigabyte, nor end the interpreter's stack."""
    with pytest.raises(RequestError, match="longer than"):
        compiled("regex", "a" * (MAX_GRAMMAR_CHARS + 1))
    deep: Any = {"type": "null"}
    for _ in range(200):
        deep = {"type": "array", "items": deep}
    with pytest.raises(RequestError, match="deep"):
        by_schema(deep)
    for _ in range(100_000):
        deep = {"type": "array", "items": deep}
    with pytest.raises(RequestError, match="deep"):
        by_schema(deep)


