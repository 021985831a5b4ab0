"""The forms of calls: found in templates, and as grammars."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from app.guided import Grammars, GrammarSpec, Place
from app.protocol_tools import FunctionDefinition
from app.tool_formats import HERMES, LLAMA, CallFormat, ToolForms, demanded_spec, free_spec
from engine.request import RequestError
from models import toy
from tests.tool_world import HERMES_TEMPLATE, LLAMA_TEMPLATE, TIME, UNKNOWN_TEMPLATE, WEATHER

TOKENIZER = toy.byte_tokenizer()
GRAMMARS = Grammars(TOKENIZER, vocab_size=len(TOKENIZER), stop_tokens=frozenset({256, 258}))
FUNCTIONS = [FunctionDefinition.model_validate(tool["function"]) for tool in (WEATHER, TIME)]


def takes(spec: GrammarSpec, text: str) -> bool:
    here: Place | None = asyncio.run(GRAMMARS.compile(spec))
    for byte in text.encode():
        here = here.after(byte) if here is not None and here.allowed()[byte] else None
    return here is not None and here.is_accepting


def call(form: CallFormat, name: str, arguments: Any) -> str:
    return form.head + name + form.middle + json.dumps(arguments, ensure_ascii=False) + form.tail


GOOD, BAD, NOW = {"city": "Köln", "days": 3}, {"city": "Rome", "days": 3}, {}


@pytest.mark.parametrize("form", [HERMES, LLAMA], ids=lambda form: form.name)
def test_a_demanded_call_is_a_call_and_right(form: CallFormat) -> None:
    """Nothing around it, a known function, arguments of its schema; a function without parameters gets none."""
    spec = demanded_spec(form, FUNCTIONS, several=False)
    good = call(form, "get_weather", GOOD)
    assert takes(spec, good) and takes(spec, call(form, "time.now", NOW))
    wrong = [call(form, "get_weather", BAD), call(form, "time.now", GOOD), call(form, "other", NOW), "text", "", good + "\n"]
    assert not any(takes(spec, text) for text in wrong)
    assert not takes(spec, f"{good}\n{good}")
    assert takes(demanded_spec(form, FUNCTIONS, several=True), f"{good}\n{good}") == (form is HERMES)


@pytest.mark.parametrize("several", [True, False])
def test_free_answers_hold_right_calls_only(several: bool) -> None:
    """Any text before and behind; a call that has begun must become a right one."""
    spec = free_spec(HERMES, FUNCTIONS, several=several)
    good, bad = call(HERMES, "get_weather", GOOD), call(HERMES, "get_weather", BAD)
    for text in ("", "any text\n< b", good, "See:\n" + good):
        assert takes(spec, text), text
    assert takes(spec, f"a{good}b{good}") == several
    assert takes(spec, f"{good} and text") == several
    for text in (bad, "<tool_call>", "<tool_call>{}", "a" + bad):
        assert not takes(spec, text), text


def test_llamas_free_answers_are_text_or_a_call() -> None:
    """Its calls have no tag: the first character decides."""
    spec = free_spec(LLAMA, FUNCTIONS, several=True)
    for text in ("text {", call(LLAMA, "get_weather", GOOD)):
        assert takes(spec, text), text
    for text in ("{text", call(LLAMA, "get_weather", BAD), call(LLAMA, "get_weather", GOOD) + "."):
        assert not takes(spec, text), text


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (HERMES_TEMPLATE, HERMES),
        (LLAMA_TEMPLATE, LLAMA),
        (UNKNOWN_TEMPLATE, None),
        ({"default": toy.CHAT_TEMPLATE, "tool_use": HERMES_TEMPLATE}, HERMES),
        ("{{ tools }}<tool_call><function=name></tool_call>", None),
    ],
)
def test_the_template_tells_the_form(template: Any, form: CallFormat | None) -> None:
    """What the model was trained to write stands in what it is told."""
    forms = ToolForms(toy.byte_tokenizer(chat_template=template))
    forms.check("tools")
    assert forms.form() is form


@pytest.mark.parametrize(
    "template", [toy.CHAT_TEMPLATE, None, "{# tools #}" + toy.CHAT_TEMPLATE, {"default": toy.CHAT_TEMPLATE}]
)
def test_a_template_that_shows_no_tools_is_noticed(template: Any) -> None:
    """By rendering, not by a word in the source."""
    with pytest.raises(RequestError, match="does not show tools") as error:
        ToolForms(toy.byte_tokenizer(chat_template=template)).check("tools")
    assert error.value.param == "tools"


def test_tags_that_are_left_out_of_the_text_are_not_looked_for() -> None:
    """Special tokens have no text: calls between them could not be told from what the model says."""
    tokenizer = toy.byte_tokenizer(chat_template=HERMES_TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>"]})
    assert ToolForms(tokenizer).form() is None
