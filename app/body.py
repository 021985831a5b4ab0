"""What every request body has in common: strict values, one complaint, and unknown keys refused by name.

Values are taken as they are: no text is read as a number, no number as a truth value. Error reports are kept to one
complaint on purpose. A body may hold a million wrong items, and a report on each would need a hundred times the memory of
the body; so lists and objects that may be long are checked by hand here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from app.errors import shorten

MAX_PROMPTS = 4096

_TOKEN_ID = re.compile("0|[1-9][0-9]{0,18}")

Prompt = str | list[str] | list[int] | list[list[int]]


def wrap_text(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def wrap_part(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def check_prompt(value: Any) -> Prompt:
    """The prompt as given, if it has one of the four shapes; by hand, as a union would try all four on each item."""
    if isinstance(value, str):
        return encodable(value)
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
        return [encodable(item) for item in value]
    if all(isinstance(item, list) and all(type(token) is int for token in item) for item in value):
        return value
    raise PydanticCustomError("prompt_type", "must hold only strings, only token ids, or only lists of token ids")


def check_bias(value: Any) -> dict[int, Any] | None:
    """Token ids from JSON's keys, which are always text; by hand, for one complaint instead of one per entry."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise PydanticCustomError("bias_type", "must be an object of token ids and numbers")
    if not all(map(_TOKEN_ID.fullmatch, value)):
        raise PydanticCustomError("bias_key", "must have token ids as keys, in decimal digits without leading zeros")
    return {int(token): bias for token, bias in value.items()}


def encodable(text: str) -> str:
    """JSON can spell half a surrogate pair, which is no character and which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PydanticCustomError("unicode", "must be valid Unicode, without unpaired surrogates") from error
    return text


Text = Annotated[str, AfterValidator(encodable)]


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
        known = {field.alias or name for name, field in cls.model_fields.items()}
        for name, value in data.items():
            if name in known:
                kept[name] = value
            elif name not in cls.not_yet:
                raise PydanticCustomError("unknown_parameter", "is not a known parameter", {"param": shorten(name)})
            elif not any(_same(value, neutral) for neutral in cls.not_yet[name]):
                raise PydanticCustomError("unsupported_parameter", "is not supported yet", {"param": name})
        return kept


def _same(value: Any, neutral: Any) -> bool:
    """Equality that tells 0 from false."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)
