"""How models write calls of functions: found out from the chat template, and as grammars that hold an answer to it.

Two forms are known. *Hermes*, which Qwen, Hermes and many others were trained on, has any text and, for each call, ::

    <tool_call>
    {"name": "f", "arguments": {...}}
    </tool_call>

*Llama 3* answers with text or with one call and nothing else: ``{"name": "f", "parameters": {...}}``.

A demanded call is written in the form that the model was trained on, with the white space of the training data: the grammar
leaves open the name, the arguments, and with several calls their number.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from app.guided import GrammarSpec, check_schema, json_with_options, lark_text
from app.prompts import Tokenizer
from app.protocol_tools import FunctionDefinition
from engine.request import RequestError

_PROBE = "graftserve_probe"
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class CallFormat:
    """One form of calls."""

    name: str
    opening: str  # what announces a call; empty: a call is the whole answer
    closing: str
    key: str  # of the arguments

    @property
    def head(self) -> str:
        """All of a call in front of the function's name."""
        return f'{self.opening}{{"name": "'

    @property
    def middle(self) -> str:
        """What is between name and arguments."""
        return f'", "{self.key}": '

    @property
    def tail(self) -> str:
        """What is behind the arguments."""
        return f"}}{self.closing}"


HERMES = CallFormat("hermes", "<tool_call>\n", "\n</tool_call>", "arguments")
LLAMA = CallFormat("llama", "", "", "parameters")


class ToolForms:
    """What one model's chat template does with tools; looked into when the first tools come."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Nothing is rendered yet."""
        self._tokenizer = tokenizer
        self._shows_tools: bool | None = None

    def check(self, param: str) -> None:
        """Raise RequestError if the template leaves tools out, so that the model would not learn of them."""
        if self._shows_tools is None:
            self._shows_tools = bool(self._tokenizer.chat_template) and self._show_probe()
        if not self._shows_tools:
            message = (
                f"{param}: this model's chat template does not show tools, so the model would not learn of them. Describe "
                "the functions in a message and ask for their arguments with response_format, or serve a model folder "
                "whose chat_template.jinja knows tools."
            )
            raise RequestError(message, param=param, code="unsupported_parameter")

    def form(self) -> CallFormat | None:
        """The form in which this model calls; None: one that is not known here."""
        template = self._template()
        special = getattr(self._tokenizer, "all_special_tokens", [])
        if "<tool_call>" in template and "</tool_call>" in template and "<function=" not in template:
            # Special tokens are left out of the text, in which calls are looked for.
            return HERMES if "<tool_call>" not in special else None
        return LLAMA if '"parameters": dictionary of argument name' in template else None

    def _show_probe(self) -> bool:
        tool = {"type": "function", "function": {"name": _PROBE, "description": "x", "parameters": _NO_PARAMETERS}}
        turns = [{"role": "user", "content": "x"}]
        try:
            text = self._tokenizer.apply_chat_template(turns, tools=[tool], tokenize=False, add_generation_prompt=True)
        except TemplateError:  # it wants another conversation; that says nothing about tools
            return "tools" in self._template()
        return _PROBE in text

    def _template(self) -> str:
        """The template that is taken for conversations with tools."""
        template = self._tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("tool_use", template.get("default", ""))
        return str(template or "")


def demanded_spec(form: CallFormat, functions: Sequence[FunctionDefinition], *, several: bool) -> GrammarSpec:
    """The grammar of an answer that is one call of one of the functions, or at least one. RequestError for a bad schema."""
    more = " (SEPARATOR call)*" if several and form.opening else ""
    lines = [f"start: call{more}", f"call: {lark_text(form.head)} function {lark_text(form.tail)}", *_rules(form, functions)]
    if more:
        lines.append(r'SEPARATOR: "\n"')
    return GrammarSpec("grammar", "\n".join(lines), "tools")


def free_spec(form: CallFormat, functions: Sequence[FunctionDefinition], *, several: bool) -> GrammarSpec:
    """The grammar of any text in which calls, where there are some, are right. RequestError for a bad schema."""
    if not form.opening:
        lines = ["start: TEXT | call", r"TEXT: /[^{](.|\n)*/", f"call: {lark_text(form.head)} function {lark_text(form.tail)}"]
    else:
        tag, rest = form.opening.strip(), form.head.removeprefix(form.opening.strip())
        lines = [
            "start: call* text" if several else "start: text | call",
            "text: TEXT",
            r"TEXT: /(.|\n)*/",
            f"announced[lazy]: TEXT {lark_text(tag)}",
            f"call: announced {lark_text(rest)} function {lark_text(form.tail)}",
        ]
    return GrammarSpec("grammar", "\n".join([*lines, *_rules(form, functions)]), "tools")


def _rules(form: CallFormat, functions: Sequence[FunctionDefinition]) -> list[str]:
    """The rule ``function``: name, what is between, and arguments."""
    rules = ["function: " + " | ".join(f"f_{i}" for i in range(len(functions)))]
    for i, function in enumerate(functions):
        schema = _checked(function, i)
        rules.append(f"f_{i}: {lark_text(function.name + form.middle)} a_{i}")
        rules.append(f"a_{i}: %json {json.dumps(schema, ensure_ascii=False)}")
    return rules


def _checked(function: FunctionDefinition, index: int) -> dict[str, Any]:
    """The schema of a function's arguments, which are an object in any case."""
    param = f"tools[{index}].function.parameters"
    schema = function.parameters or _NO_PARAMETERS
    if schema.get("type", "object") != "object":
        raise RequestError(f"{param}: type must be object", param=param)
    try:
        check_schema(schema)
    except ValueError as error:
        raise RequestError(f"{param}: {error}", param=param) from error
    return json_with_options({**schema, "type": "object"})
