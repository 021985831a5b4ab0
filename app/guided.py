"""Structured output: what a body asks an answer to be, compiled into a grammar that the engine can follow.

The library is llguidance (https://github.com/guidance-ai/llguidance): JSON schemas, regular expressions and context-free
grammars, over the model's own tokens. Its parser is asked place by place; a copy of it is cheap, so each place in a text is a
parser of its own and none is ever taken back.

A schema is enforced whole or refused. The library refuses keywords that it knows and cannot enforce; what it would weaken in
silence is refused here. White space between JSON's tokens is bounded: without a bound small models go on with it for ever.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from anyio import to_thread
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark
from llguidance.hf import from_tokenizer

from app.errors import shorten
from engine.constraint import Allowed, ConstraintError
from engine.request import RequestError

MAX_GRAMMAR_CHARS = 256 * 1024
MAX_NESTING = 64  # schemas inside each other
MAX_SPACE = 32  # white space in a row between the tokens of a JSON text

_KEPT = 64  # compiled grammars remembered
_JSON_OPTIONS: Any = {
    "lenient": False,
    "coerce_one_of": False,
    "whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{MAX_SPACE}}}",
}
_CONTROLS = re.compile("[\x7f-\x9f\u2028\u2029]")
_OWN_KEY = "x-guidance"  # where a schema may weaken itself in the library's words
_DRAFTS = re.compile(r"https?://json-schema\.org/(draft-0[467]|draft/2019-09|draft/2020-12)/schema#?")
_IN_LIST, _IN_MAP = ("anyOf", "allOf", "oneOf", "prefixItems"), ("properties", "patternProperties", "$defs", "definitions")
_IN_PLACE = ("items", "additionalItems", "additionalProperties")

Kind = Literal["json", "regex", "choice", "grammar"]


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What an answer shall be."""

    kind: Kind
    text: str  # a JSON schema, a regular expression, a JSON list of texts, or a Lark or GBNF grammar
    param: str  # where the body says so


def json_spec(schema: object, param: str) -> GrammarSpec:
    """The specification of a JSON text by a schema that is a Python value."""
    try:
        return GrammarSpec("json", json.dumps(schema, ensure_ascii=False), param)
    except RecursionError:
        raise RequestError(f"{param} is nested too deeply", param=param) from None


class Place:
    """:class:`engine.constraint.Grammar` over a parser that nobody moves."""

    __slots__ = ("_allowed", "_ends", "_matcher", "_vocab_size", "is_accepting")

    def __init__(self, matcher: LLMatcher, vocab_size: int, ends: tuple[int, ...]) -> None:
        """The place where `matcher` is.

        Args:
            matcher: not touched by anybody else from now on.
            vocab_size: tokens of the model.
            ends: the model's own end tokens, by which the library says that a text may end.
        """
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._ends = ends
        self._allowed: Allowed | None = None
        self.is_accepting = matcher.is_accepting()

    def allowed(self) -> Allowed:
        """See :class:`engine.constraint.Grammar`."""
        if self._allowed is None:
            packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            allowed = np.unpackbits(packed, count=self._vocab_size, bitorder="little").view(np.bool_)
            if self._matcher.is_error():
                problem = first_line(self._matcher.get_error())
                if not problem.startswith("NoExtension"):
                    raise ConstraintError(problem)
                allowed[:] = False  # the library sets end tokens where nothing can follow
            elif self.is_accepting:  # elsewhere an end token is there only if the grammar names it
                allowed[list(self._ends)] = False
            self._allowed = allowed
        return self._allowed

    def after(self, token: int) -> Place | None:
        """See :class:`engine.constraint.Grammar`."""
        matcher = self._matcher.deep_copy()
        return Place(matcher, self._vocab_size, self._ends) if matcher.consume_token(token) else None


class Grammars:
    """Compiles grammars for one tokenizer, in a thread, and remembers the last ones."""

    def __init__(self, tokenizer: Any, *, vocab_size: int, stop_tokens: frozenset[int]) -> None:
        """Nothing is done yet: reading a vocabulary takes about a second, and most servers are never asked.

        Args:
            tokenizer: the model's, a fast one.
            vocab_size: tokens of the model.
            stop_tokens: the model's own end tokens.
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._ends = tuple(sorted(token for token in stop_tokens if token < vocab_size))
        self._compiled: OrderedDict[tuple[Kind, str], Place] = OrderedDict()
        self._vocabulary: LLTokenizer | None = None
        self._turn = asyncio.Lock()  # compiling takes a core; one is enough
        self._limits = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)

    async def compile(self, spec: GrammarSpec) -> Place:
        """The beginning of every text of the grammar. RequestError names the parameter that cannot be used."""
        if len(spec.text) > MAX_GRAMMAR_CHARS:
            message = f"{spec.param} is longer than {MAX_GRAMMAR_CHARS} characters"
            raise RequestError(message, param=spec.param)
        async with self._turn:  # here, not in the thread, where those who wait would take threads from others
            return await to_thread.run_sync(self._compile, spec)

    def _compile(self, spec: GrammarSpec) -> Place:
        key = spec.kind, spec.text
        found = self._compiled.get(key)
        if found is None:
            try:
                found = self._compiled[key] = self._start(spec)
            except (ValueError, ConstraintError, RecursionError) as error:
                message = f"{spec.param}: {shorten(first_line(str(error)))}"
                raise RequestError(message, param=spec.param) from error
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        return found

    def _start(self, spec: GrammarSpec) -> Place:
        """The beginning; ValueError or ConstraintError says why there is none."""
        if self._vocabulary is None:
            ends: Any = list(self._ends) or None
            self._vocabulary = from_tokenizer(self._tokenizer, n_vocab=self._vocab_size, eos_token=ends)
        grammar = library_grammar(spec)
        is_wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar, self._vocabulary, limits=self._limits)
        if is_wrong or messages:  # a warning says what would not be enforced
            raise ValueError(messages[0])
        place = Place(LLMatcher(self._vocabulary, grammar, log_level=0, limits=self._limits), self._vocab_size, self._ends)
        if not place.allowed().any():
            only = "only the empty answer" if place.is_accepting else "no answer"
            raise ValueError(f"allows {only} with this model's tokens")
        return place


def library_grammar(spec: GrammarSpec) -> str:
    """The specification in the library's words. ValueError for what is wrong with it, as far as it is seen here."""
    match spec.kind:
        case "json":
            schema = json.loads(spec.text)
            check_schema(schema)
            return LLMatcher.grammar_from_json_schema(spec.text, overrides=_JSON_OPTIONS)
        case "regex":
            return LLMatcher.grammar_from_regex(spec.text)
        case "choice":
            return "start: " + " | ".join(map(lark_text, json.loads(spec.text)))
        case "grammar":
            try:
                return any_to_lark(spec.text)
            except Exception as error:  # its only class for what it does not understand
                raise ValueError(f"neither Lark (which has a rule named start) nor GBNF: {error}") from error


def lark_text(text: str) -> str:
    """A text as Lark spells it, which is JSON's way but for control characters."""
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(text, ensure_ascii=False))


def json_with_options(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema to be written into a Lark grammar, with the options that all schemas get here."""
    return {_OWN_KEY: _JSON_OPTIONS, **schema}


def check_schema(schema: Any) -> None:
    """Refuse, by ValueError, what the library would accept and not enforce."""
    if isinstance(schema, dict):
        if _OWN_KEY in schema:
            raise ValueError(f"the key {_OWN_KEY} is not accepted")
        draft = schema.get("$schema")
        if isinstance(draft, str) and not _DRAFTS.fullmatch(draft):
            raise ValueError(f"$schema {draft!r} is not known; drafts 4, 6, 7, 2019-09 and 2020-12 are")
    for part in schemas_in(schema):
        # Keys beyond the listed properties may repeat in the text, and are one property to its reader.
        least, required = part.get("minProperties"), part.get("required")
        known = len(set(required)) if isinstance(required, list) and all(isinstance(key, str) for key in required) else 0
        if isinstance(least, int) and least > known + 1:
            raise ValueError(f"minProperties = {least} can only be enforced up to one more than the required properties")


def schemas_in(schema: Any) -> Iterator[dict[str, Any]]:
    """The schema and all those inside of it that are objects. ValueError if they are nested too deeply."""
    layer = [schema]
    for _ in range(MAX_NESTING):
        layer = [part for part in layer if isinstance(part, dict)]
        yield from layer
        layer = [inner for part in layer for inner in _parts(part)]
        if not layer:
            return
    raise ValueError(f"schemas are nested more than {MAX_NESTING} deep")


def _parts(schema: dict[str, Any]) -> Iterator[Any]:
    for key in _IN_PLACE:
        value = schema.get(key)
        yield from value if isinstance(value, list) else [value]
    for key in _IN_LIST:
        value = schema.get(key)
        yield from value if isinstance(value, list) else ()
    for key in _IN_MAP:
        value = schema.get(key)
        yield from value.values() if isinstance(value, dict) else ()


def first_line(message: str) -> str:
    """What the library says, without the excerpt and the parser's state that may follow, in one line."""
    lines = [line.strip() for line in message.split("<state>")[0].replace("<non-verbose/>", "").splitlines()]
    return " ".join(line for line in lines if line)
