"""The bodies of requests: what is accepted, and what is refused by name.

A field that is accepted is honored. One that other servers know and this one cannot honor yet may be sent with the
value that changes nothing, so that clients which always send their defaults work; any other value is refused. A field
nobody knows is refused too. Values are taken as they are: no text is read as a number, no number as a truth value.

Error reports are kept to one complaint on purpose. A body may hold a million wrong items, and a report on each would
need a hundred times the memory of the body.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from app.errors import shorten

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_MESSAGES = 4096
MAX_PARTS = 4096
MAX_PROMPTS = 4096
MAX_COUNT = 2**63 - 1  # beyond it no count can be meant, and a sum might have more digits than Python prints

_TOKEN_ID = re.compile("0|[1-9][0-9]{0,18}")

Prompt = str | list[str] | list[int] | list[list[int]]


def _wrap_text(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _wrap_part(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _check_prompt(value: Any) -> Prompt:
    """The prompt as given, if it has one of the four shapes; by hand, as a union would try all four on each item."""
    if isinstance(value, str):
        return _encodable(value)
    if not isinstance(value, list):
        raise PydanticCustomError(
            "prompt_type", "must be a string, a list of strings, or a list (of lists) of token ids"
        )
    if not value:
        raise PydanticCustomError("empty", "must not be empty")
    if all(type(item) is int for item in value):
        return value
    if len(value) > MAX_PROMPTS:
        raise PydanticCustomError(
            "too_many", f"holds more than {MAX_PROMPTS} prompts, or token ids that are no integers"
        )
    if all(isinstance(item, str) for item in value):
        return [_encodable(item) for item in value]
    if all(isinstance(item, list) and all(type(token) is int for token in item) for item in value):
        return value
    raise PydanticCustomError("prompt_type", "must hold only strings, only token ids, or only lists of token ids")


def _check_bias(value: Any) -> dict[int, Any] | None:
    """Token ids from JSON's keys, which are always text; by hand, for one complaint instead of one per entry."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise PydanticCustomError("bias_type", "must be an object of token ids and numbers")
    if not all(map(_TOKEN_ID.fullmatch, value)):
        raise PydanticCustomError("bias_key", "must have token ids as keys, in decimal digits without leading zeros")
    return {int(token): bias for token, bias in value.items()}


def _encodable(text: str) -> str:
    """JSON can spell half a surrogate pair, which is no character and which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PydanticCustomError("unicode", "must be valid Unicode, without unpaired surrogates") from error
    return text


Text = Annotated[str, AfterValidator(_encodable)]


class Body(BaseModel):
    """A JSON object whose unknown and unsupported keys are refused by name."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    not_yet: ClassVar[Mapping[str, tuple[Any, ...]]] = {}  # unsupported field -> its values that change nothing

    @model_validator(mode="before")
    @classmethod
    def _refuse_by_name(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept = {}
        for name, value in data.items():
            if name in cls.model_fields:
                kept[name] = value
            elif name not in cls.not_yet:
                raise PydanticCustomError("unknown_parameter", "is not a known parameter", {"param": shorten(name)})
            elif not any(_same(value, neutral) for neutral in cls.not_yet[name]):
                raise PydanticCustomError("unsupported_parameter", "is not supported yet", {"param": name})
        return kept


def _same(value: Any, neutral: Any) -> bool:
    """Equality that tells 0 from false."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]


class Speculation(Body):
    """How this request is drafted for; none of it changes the answer."""

    enabled: bool | None = Field(None, description="false: decode without drafting, which is the schedule 'ar'.")
    schedule: str | None = Field(None, description="A name from /v1/schedules.")
    budget: Count | None = Field(None, description="Nodes verified per step, root included.")


class StreamOptions(Body):
    """What a stream carries besides the text."""

    include_usage: bool | None = None


class TextPart(Body):
    """One part of a message; text is the only kind."""

    type: Literal["text"]
    text: Text


class Message(Body):
    """One turn of a conversation."""

    not_yet = {
        # What the answer of an earlier turn holds when a client sends it back whole.
        "name": (None,),
        "refusal": (None,),
        "annotations": (None, []),
        "audio": (None,),
        "function_call": (None,),
        "tool_calls": (None, []),
        "tool_call_id": (None,),
    }

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        list[TextPart], Field(fail_fast=True, max_length=MAX_PARTS), BeforeValidator(_wrap_part, str | list[TextPart])
    ]

    @property
    def text(self) -> str:
        """The parts as one text, a line each."""
        return "\n".join(part.text for part in self.content)


Stop = Annotated[Text, Field(min_length=1, max_length=MAX_STOP_CHARS)]


class GenerationBody(Body):
    """What both ways of asking for text have in common."""

    not_yet = {
        "n": (1, None),
        "best_of": (1, None),
        "logprobs": (None, False),
        "top_logprobs": (None, 0),
        "echo": (False, None),
        "suffix": (None,),
        "min_tokens": (0, None),
        "stop_token_ids": (None, []),
        "ignore_eos": (False, None),
        "response_format": (None, {"type": "text"}),
        "tools": (None, []),
        "tool_choice": (None, "none", "auto"),
        "functions": (None, []),
        "function_call": (None, "none", "auto"),
        "parallel_tool_calls": (None, True, False),
        "modalities": (None, ["text"]),
    }

    model: str | None = Field(None, description="The served model's name, or nothing.")
    max_tokens: Count | None = Field(None, description="Most tokens of the answer; at least 1.")
    max_completion_tokens: Count | None = Field(None, description="Another name of max_tokens.")
    # The ranges down to logit_bias are SamplingParams' to check.
    temperature: float | None = Field(None, description="0 to 2; 0: always the likeliest token. Default 1.")
    top_p: float | None = Field(None, description="Probability mass of the likeliest tokens kept, above 0. Default 1.")
    top_k: int | None = Field(None, description="Number of likeliest tokens kept; 0 or -1: all. Default 0.")
    min_p: float | None = Field(
        None, description="Tokens less likely than this share of the likeliest one are dropped. 0 to 1; default 0."
    )
    seed: int | None = Field(None, description="Same seed, same answer; without one each answer draws its own.")
    presence_penalty: float | None = Field(
        None, description="-2 to 2: lowers the logits of tokens that the answer holds already. Default 0."
    )
    frequency_penalty: float | None = Field(
        None, description="-2 to 2: the same, once for each time the answer holds the token. Default 0."
    )
    repetition_penalty: float | None = Field(
        None, description="Above 0: makes tokens of prompt and answer less likely if above 1. Default 1."
    )
    logit_bias: Annotated[
        dict[int, float] | None, PlainValidator(_check_bias, json_schema_input_type=dict[str, float] | None)
    ] = Field(None, description="Token ids, as JSON keys, to numbers from -100 to 100 that are added to their logits.")
    stop: (
        Annotated[
            list[Stop], Field(fail_fast=True, max_length=MAX_STOPS), BeforeValidator(_wrap_text, str | list[str] | None)
        ]
        | None
    ) = Field(None, description="Strings that end the answer; they are not part of it.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="Who asks; it changes nothing in the answer.")
    speculative: Speculation | None = None

    @model_validator(mode="after")
    def _check_together(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError(
                "without_stream", "is only allowed when stream is true", {"param": "stream_options"}
            )
        both = self.max_tokens, self.max_completion_tokens
        if None not in both and both[0] != both[1]:
            raise PydanticCustomError(
                "contradiction", "differs from max_completion_tokens; send one of them", {"param": "max_tokens"}
            )
        return self

    @property
    def limit(self) -> tuple[str, int] | None:
        """The explicit limit of the answer's length, and the name it was sent under."""
        for name, value in (("max_tokens", self.max_tokens), ("max_completion_tokens", self.max_completion_tokens)):
            if value is not None:
                return name, value
        return None

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionBody(GenerationBody):
    """Body of ``POST /v1/completions``."""

    prompt: Annotated[Prompt, PlainValidator(_check_prompt, json_schema_input_type=Prompt)]


class ChatBody(GenerationBody):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
