"""What a chat body's tools mean for its answer: what the model is shown, what holds the answer, and who reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from app.guided import GrammarSpec
from app.protocol import ChatBody
from app.protocol_tools import shown_tools
from app.tool_formats import ToolForms, demanded_spec, free_spec
from app.tool_reading import DemandedReader, Reader, TaggedReader, WholeReader
from engine.request import RequestError


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The three answers; nothing of each for a body without tools."""

    shown: tuple[Mapping[str, Any], ...] = ()  # for the chat template
    spec: GrammarSpec | None = None
    reader: Callable[[], Reader] | None = None


def tool_use(forms: ToolForms, body: ChatBody) -> ToolUse:
    """Raises RequestError for what the model's template, or this server, cannot do."""
    if any(message.is_about_tools for message in body.messages):
        forms.check("messages")
    functions = body.offered
    if not functions:
        return ToolUse()
    forms.check("tools")
    asked = body.grammar_spec()
    if asked is not None:
        raise RequestError(f"{asked.param} is not allowed together with tools, unless tool_choice is none", param=asked.param)
    form = forms.form()
    if form is None:
        message = (
            "tools: this model's chat template shows tools, but the way in which the model writes calls is not known here. "
            "Known are calls between <tool_call> tags, and Llama 3's JSON."
        )
        raise RequestError(message, param="tools", code="unsupported_parameter")
    shown = tuple(shown_tools(functions))
    several = body.parallel_tool_calls is not False
    if body.demanded:
        one = body.tool_choice != "required"  # a function by its name is called once
        demanded = demanded_spec(form, body.demanded, several=several and not one)
        return ToolUse(shown, demanded, partial(DemandedReader, form))
    names = frozenset(function.name for function in functions)
    is_held = any(function.strict for function in functions) or not several
    spec = free_spec(form, functions, several=several) if is_held else None
    return ToolUse(shown, spec, partial(TaggedReader if form.opening else WholeReader, form, names))
