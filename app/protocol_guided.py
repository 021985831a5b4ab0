"""The fields by which a body asks for structured output: OpenAI's ``response_format``, and vLLM's names for the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from app.body import Body, Text, encodable
from app.guided import GrammarSpec, json_spec
from engine.request import RequestError

MAX_CHOICES = 4096


def check_schema_value(value: Any) -> dict[str, Any] | bool | str | None:
    """By hand, for one complaint about the field instead of one per type that it may have."""
    if value is None or isinstance(value, dict | bool):
        return value
    if not isinstance(value, str):
        raise PydanticCustomError("schema_type", "must be a JSON schema, as an object or as its text")
    return encodable(value)


Schema = Annotated[dict[str, Any] | bool | str | None, PlainValidator(check_schema_value)]
Choices = Annotated[list[Annotated[Text, Field(min_length=1)]], Field(fail_fast=True, min_length=1, max_length=MAX_CHOICES)]
_ANY_OBJECT = {"type": "object"}
_SCHEMA = "A JSON schema, as an object or as its text: the answer is a JSON text that fulfills it."
_REGEX = "The whole answer matches this regular expression (Rust's dialect)."
_CHOICE = "The answer is one of these texts."
_GRAMMAR = "The answer is a text of this grammar, in Lark's or GBNF's notation."


class JsonSchemaFormat(Body):
    """OpenAI's envelope around a schema."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = Field(None, description="For people; the model does not see it.")
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = Field(None, description="The schema is enforced in any case, whole, or refused.")


class ResponseFormat(Body):
    """What kind of text the answer is."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise PydanticCustomError("missing", "is required", {"param": "json_schema"})
        if self.type != "json_schema" and self.json_schema is not None:
            raise PydanticCustomError(
                "contradiction", "is only allowed with type json_schema", {"param": "json_schema"}
            )
        return self


class StructuredOutputs(Body):
    """vLLM's object; exactly one way of saying what the answer shall be."""

    not_yet = {
        "structural_tag": (None,),
        "whitespace_pattern": (None,),
        "disable_fallback": (None, True, False),
        "disable_any_whitespace": (None, False),
        "disable_additional_properties": (None, False),
    }

    json_: Schema = Field(None, alias="json", description=_SCHEMA)
    json_object: bool | None = Field(None, description="Any JSON object.")
    regex: Text | None = Field(None, description=_REGEX)
    choice: Choices | None = Field(None, description=_CHOICE)
    grammar: Text | None = Field(None, description=_GRAMMAR)

    @model_validator(mode="after")
    def _check_one(self) -> StructuredOutputs:
        if len(list(self.specs())) != 1:
            raise PydanticCustomError("contradiction", "must say one of json, json_object, regex, choice, grammar")
        return self

    def specs(self) -> Iterator[GrammarSpec]:
        """All that were given."""
        under = "structured_outputs."
        if self.json_ is not None:
            yield _schema_spec(self.json_, under + "json")
        if self.json_object:
            yield json_spec(_ANY_OBJECT, under + "json_object")
        yield from _text_specs(self.regex, self.choice, self.grammar, under)


class GuidedBody(Body):
    """The fields of both endpoints."""

    response_format: ResponseFormat | None = Field(
        None, description="text, json_object or json_schema. The model is not told; say in the prompt what you want as well."
    )
    guided_json: Schema = Field(None, description=_SCHEMA)
    guided_regex: Text | None = Field(None, description=_REGEX)
    guided_choice: Choices | None = Field(None, description=_CHOICE)
    guided_grammar: Text | None = Field(None, description=_GRAMMAR)
    structured_outputs: StructuredOutputs | None = Field(None, description="The same under vLLM's newer names.")

    def grammar_spec(self) -> GrammarSpec | None:
        """What the answer shall be; None: any text. Raises RequestError for two wishes at once, and for broken JSON."""
        specs = list(self._specs())
        if len(specs) > 1:
            message = f"{specs[1].param} is not allowed together with {specs[0].param}"
            raise RequestError(message, param=specs[1].param)
        return specs[0] if specs else None

    def _specs(self) -> Iterator[GrammarSpec]:
        if self.response_format is not None and self.response_format.type == "json_object":
            yield json_spec(_ANY_OBJECT, "response_format")
        if self.response_format is not None and self.response_format.json_schema is not None:
            yield json_spec(self.response_format.json_schema.schema_, "response_format.json_schema.schema")
        if self.guided_json is not None:
            yield _schema_spec(self.guided_json, "guided_json")
        yield from _text_specs(self.guided_regex, self.guided_choice, self.guided_grammar, "guided_")
        if self.structured_outputs is not None:
            yield from self.structured_outputs.specs()


def _schema_spec(schema: dict[str, Any] | bool | str, param: str) -> GrammarSpec:
    if not isinstance(schema, str):
        return json_spec(schema, param)
    try:
        read = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{param} is not valid JSON: {error}", param=param) from error
    if not isinstance(read, dict | bool):
        raise RequestError(f"{param} must hold a JSON object", param=param)
    return json_spec(read, param)


def _text_specs(
    regex: str | None, choice: list[str] | None, grammar: str | None, prefix: str
) -> Iterator[GrammarSpec]:
    if regex is not None:
        yield GrammarSpec("regex", regex, prefix + "regex")
    if choice is not None:
        yield GrammarSpec("choice", json.dumps(choice), prefix + "choice")
    if grammar is not None:
        yield GrammarSpec("grammar", grammar, prefix + "grammar")
