"""The fields about tools: functions that the model may call, and the calls and results in a conversation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from app.body import Body, Text

MAX_TOOLS = 128
MAX_CALLS = 128  # in one message

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class FunctionDefinition(Body):
    """A function as the model is told of it."""

    name: Name
    description: Text | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema of an object. Default: no parameters.")
    strict: bool | None = Field(
        None, description="With tool_choice auto: calls are held to the schemas as well, as required ones always are."
    )


class Tool(Body):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Body):
    """Which function."""

    name: str


class NamedTool(Body):
    """The one function that is to be called."""

    type: Literal["function"]
    function: FunctionName


def check_tool_choice(value: Any) -> str | NamedTool | None:
    """By hand, for one complaint about the field instead of one per shape that it may have."""
    if value is None or value in ("none", "auto", "required"):
        return value
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or value != {"type": "function", "function": {"name": name}}:
        raise PydanticCustomError(
            "tool_choice", 'must be none, auto, required, or {"type": "function", "function": {"name": "..."}}'
        )
    return NamedTool(type="function", function=FunctionName(name=name))


class CalledFunction(Body):
    """What was called, and with what."""

    name: Name
    arguments: Text = Field(description="A JSON object, as text.")

    @property
    def values(self) -> dict[str, Any]:
        """The arguments as an object, as chat templates want them."""
        return dict(json.loads(self.arguments or "{}"))

    @model_validator(mode="after")
    def _check_arguments(self) -> CalledFunction:
        try:
            read = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise PydanticCustomError("arguments", "must be the text of a JSON object", {"param": "arguments"}) from error
        if not isinstance(read, dict):
            raise PydanticCustomError("arguments", "must be the text of a JSON object", {"param": "arguments"})
        return self


class ToolCall(Body):
    """A call in an earlier turn of the assistant."""

    id: Text
    type: Literal["function"]
    function: CalledFunction


class ToolsBody(Body):
    """What chat has about tools."""

    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = Field(
        None, description="Functions that the model may call. The model's chat template must know how to show them."
    )
    tool_choice: Annotated[
        str | NamedTool | None,
        PlainValidator(
            check_tool_choice, json_schema_input_type=Literal["none", "auto", "required"] | NamedTool | None
        ),
    ] = Field(
        None,
        description="none: the model is not told of the tools. auto, the default with tools: it may call them. required, or "
        "one by name: the answer is calls and nothing else, whose arguments fulfill the functions' schemas.",
    )
    parallel_tool_calls: bool | None = Field(None, description="Whether one answer may hold several calls. Default true.")

    @model_validator(mode="after")
    def _check_tools(self) -> ToolsBody:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise PydanticCustomError("contradiction", "must have different names", {"param": "tools"})
        if not names and self.tool_choice not in (None, "none", "auto"):
            raise PydanticCustomError("without_tools", "is only allowed with tools", {"param": "tool_choice"})
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise PydanticCustomError(
                "unknown_tool", "names a function that is not among the tools", {"param": "tool_choice.function.name"}
            )
        return self

    @property
    def offered(self) -> list[FunctionDefinition]:
        """The functions the model is told of."""
        return [] if self.tool_choice == "none" else [tool.function for tool in self.tools or ()]

    @property
    def demanded(self) -> list[FunctionDefinition]:
        """The functions of which one has to be called; empty: none has to be."""
        match self.tool_choice:
            case "required":
                return self.offered
            case NamedTool():
                return [function for function in self.offered if function.name == self.tool_choice.function.name]
            case _:
                return []


def shown_tools(functions: Sequence[FunctionDefinition]) -> list[dict[str, Any]]:
    """Functions as chat templates want them."""
    return [{"type": "function", "function": f.model_dump(exclude_none=True, exclude={"strict"})} for f in functions]
