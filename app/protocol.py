"""The bodies of requests: what is accepted, and what is refused by name.

A field that is accepted is honored. One that other servers know and this one cannot honor yet may be sent with the
value that changes nothing, so that clients which always send their defaults work; any other value is refused. A field
nobody knows is refused too.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from app.body import Body, Prompt, Text, check_bias, check_prompt, wrap_part, wrap_text
from app.protocol_guided import GuidedBody
from app.protocol_tools import MAX_CALLS, ToolCall, ToolsBody
from engine.request import MAX_LOGPROBS

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_MESSAGES = 4096
MAX_PARTS = 4096
MAX_STOP_TOKENS = 1024
MAX_COUNT = 2**63 - 1  # beyond it no count can be meant, and a sum might have more digits than Python prints

Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]


def _budget(value: object) -> object:
    """A union would report its branches as places in the body."""
    if value == "auto":
        return value
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_COUNT:
        raise ValueError('must be a whole number of at least 1, or "auto"')
    return value


Budget = Annotated[int | Literal["auto"], PlainValidator(_budget, json_schema_input_type=Count | Literal["auto"])]


class Speculation(Body):
    """How this request is drafted for; none of it changes the answer."""

    enabled: bool | None = Field(None, description="false: decode without drafting, which is the schedule 'ar'.")
    schedule: str | None = Field(None, description="A name from /v1/schedules.")
    budget: Budget | None = Field(None, description="Nodes verified per step, root included; auto: as many as pay.")
    trace: bool | None = Field(None, description="Choices carry their draft trees and who drafted each token. Default false.")


class StreamOptions(Body):
    """What a stream carries besides the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's; load generators count tokens by it

    @model_validator(mode="after")
    def _check_usage(self) -> StreamOptions:
        if self.continuous_usage_stats and not self.include_usage:
            raise PydanticCustomError(
                "without_usage", "is only allowed when include_usage is true", {"param": "continuous_usage_stats"}
            )
        return self


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
    }

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        Annotated[
            list[TextPart], Field(fail_fast=True, max_length=MAX_PARTS), BeforeValidator(wrap_part, str | list[TextPart])
        ]
        | None
    ) = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=MAX_CALLS)] | None = Field(
        None, description="What the assistant called in this turn."
    )
    tool_call_id: Text | None = Field(None, description="The call of which a message of the role tool is the result.")

    @model_validator(mode="after")
    def _check_role(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("role", "is only allowed with the role assistant", {"param": "tool_calls"})
        if (self.tool_call_id is not None) != (self.role == "tool"):
            kind = "missing" if self.role == "tool" else "role"
            raise PydanticCustomError(kind, "belongs to the role tool, and only to it", {"param": "tool_call_id"})
        if self.content is None and not self.tool_calls:
            raise PydanticCustomError("missing", "is required", {"param": "content"})
        return self

    @property
    def is_about_tools(self) -> bool:
        """Whether it is a call or the result of one."""
        return self.role == "tool" or bool(self.tool_calls)

    @property
    def text(self) -> str:
        """The parts as one text, a line each."""
        return "\n".join(part.text for part in self.content or ())


Stop = Annotated[Text, Field(min_length=1, max_length=MAX_STOP_CHARS)]


class GenerationBody(GuidedBody):
    """What both ways of asking for text have in common."""

    not_yet = {
        "suffix": (None,),
        "functions": (None, []),
        "function_call": (None, "none", "auto"),
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
    seed: int | None = Field(
        None,
        description="Same seed, same answer; without one each answer draws its own. Of several answers to one prompt the "
        "first is the one that n = 1 gives, the others have seeds made from it.",
    )
    n: Count | None = Field(None, description="Answers to each prompt. Default 1.")
    best_of: Count | None = Field(
        None,
        description="Answers drawn to each prompt, of which the n with the highest mean log-probability per token are given "
        "back, best first. At least n, which is the default; more only without stream.",
    )
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
        dict[int, float] | None, PlainValidator(check_bias, json_schema_input_type=dict[str, float] | None)
    ] = Field(None, description="Token ids, as JSON keys, to numbers from -100 to 100 that are added to their logits.")
    stop: (
        Annotated[
            list[Stop], Field(fail_fast=True, max_length=MAX_STOPS), BeforeValidator(wrap_text, str | list[str] | None)
        ]
        | None
    ) = Field(None, description="Strings that end the answer; they are not part of it.")
    stop_token_ids: (
        Annotated[list[Annotated[int, Field(ge=0, le=MAX_COUNT)]], Field(fail_fast=True, max_length=MAX_STOP_TOKENS)] | None
    ) = Field(None, description="Tokens that end the answer, as the model's own end tokens do; their text is left out.")
    ignore_eos: bool | None = Field(None, description="The model's own end tokens do not end the answer. Default false.")
    min_tokens: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = Field(
        None, description="Tokens before which neither a token nor a stop string ends the answer. Default 0."
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(
        None,
        description="Who asks; it changes nothing in the answer. While an experiment runs the same user gets the same arm, "
        "and a keyed hash of the name is kept. The header X-Session-Id goes before it.",
    )
    timeout: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Seconds after which the answer is given up; at most what the server allows."
    )
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
        if self.num_drawn < self.num_choices:
            raise PydanticCustomError("contradiction", "must be at least n", {"param": "best_of"})
        if self.num_drawn > self.num_choices and self.stream:
            raise PydanticCustomError(
                "contradiction", "must equal n when stream is true: the best is known in the end", {"param": "best_of"}
            )
        return self

    @property
    def num_choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def num_drawn(self) -> int:
        """Answers drawn to each prompt; the best `num_choices` are given back."""
        return self.num_choices if self.best_of is None else self.best_of

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to report with each token's log-probability; None: report nothing."""
        raise NotImplementedError

    @property
    def limit(self) -> tuple[str, int] | None:
        """The explicit limit of the answer's length, and the name it was sent under."""
        for name, value in (("max_tokens", self.max_tokens), ("max_completion_tokens", self.max_completion_tokens)):
            if value is not None:
                return name, value
        return None

    @property
    def wants_trace(self) -> bool:
        """Whether choices carry their draft trees."""
        return self.speculative is not None and bool(self.speculative.trace)

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_running_usage(self) -> bool:
        """Whether every chunk of a stream says what was used so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


Alternatives = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
_LOGPROBS = (
    "The log-probability of every token that usage counts, an end token included: the model's own, before temperature and "
    "everything else that shapes what is drawn."
)
_ALTERNATIVES = f"The number, 0 to {MAX_LOGPROBS}, says how many of the likeliest tokens are reported at each place."


class CompletionBody(GenerationBody):
    """Body of ``POST /v1/completions``."""

    not_yet = {
        **GenerationBody.not_yet,
        "top_logprobs": (None, 0),
        "tools": (None, []),
        "tool_choice": (None, "none", "auto"),
        "parallel_tool_calls": (None, True, False),
    }

    prompt: Annotated[Prompt, PlainValidator(check_prompt, json_schema_input_type=Prompt)]
    logprobs: Alternatives | None = Field(None, description=f"{_LOGPROBS} {_ALTERNATIVES}")
    echo: bool | None = Field(
        None, description="The text begins with the prompt, and so does what logprobs reports. Default false."
    )

    @property
    def num_logprobs(self) -> int | None:
        """See the base class."""
        return self.logprobs


class ChatBody(GenerationBody, ToolsBody):
    """Body of ``POST /v1/chat/completions``."""

    not_yet = {**GenerationBody.not_yet, "echo": (False, None)}

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    logprobs: bool | None = Field(None, description=_LOGPROBS)
    top_logprobs: Alternatives | None = Field(None, description=f"{_ALTERNATIVES} Only with logprobs.")

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError(
                "without_logprobs", "is only allowed when logprobs is true", {"param": "top_logprobs"}
            )
        return self

    @property
    def num_logprobs(self) -> int | None:
        """See the base class."""
        return (self.top_logprobs or 0) if self.logprobs else None
