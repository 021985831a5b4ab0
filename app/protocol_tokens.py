"""The bodies of /tokenize and /detokenize, which have vLLM's names."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from app.body import Body, Text
from app.protocol import MAX_MESSAGES, Message
from app.protocol_tools import MAX_TOOLS, Tool, shown_tools


class TokenizeBody(Body):
    """Body of ``POST /tokenize``: a text, or a conversation as the chat template writes it."""

    model: str | None = Field(None, description="The served model's name, or nothing.")
    prompt: Text | None = Field(None, description="A text; either this or messages.")
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = Field(
        None, description="Functions that the template shows; with messages only."
    )
    add_special_tokens: bool | None = Field(
        None, description="Special tokens that the tokenizer adds to a text. Default: true for a text, false for messages."
    )
    add_generation_prompt: bool | None = Field(
        None, description="Whether the template begins the assistant's turn. Default true; with messages only."
    )
    return_token_strs: bool | None = Field(None, description="Also the tokens as the vocabulary spells them.")

    @model_validator(mode="after")
    def _check_one(self) -> TokenizeBody:
        if self.prompt is None and self.messages is None:
            raise PydanticCustomError("missing", "is required, or messages", {"param": "prompt"})
        if self.prompt is not None and self.messages is not None:
            raise PydanticCustomError("contradiction", "is not allowed together with prompt", {"param": "messages"})
        for name in ("add_generation_prompt", "tools"):
            if self.prompt is not None and getattr(self, name) is not None:
                raise PydanticCustomError("without_messages", "is only allowed with messages", {"param": name})
        return self

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        """As the template wants them."""
        return shown_tools([tool.function for tool in self.tools or ()])


class DetokenizeBody(Body):
    """Body of ``POST /detokenize``."""

    model: str | None = Field(None, description="The served model's name, or nothing.")
    tokens: Annotated[list[int], Field(fail_fast=True)]
