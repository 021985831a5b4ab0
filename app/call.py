"""One HTTP call as the edge keeps it: who asks, when it came, and what is known of it when it is over.

The edge makes the record, whoever answers fills it in, and the access log reads it. It never holds a prompt or a text.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from starlette.types import Scope

_PLACE = "graftserve.call"


@dataclass(slots=True)
class Call:
    """What is known of a call. Token counts stay None for calls that make no text."""

    request_id: str
    arrived_s: float  # of the event loop's clock
    api_key: str | None = field(default=None, repr=False)  # the key it came with, where keys are asked for
    answer_id: str | None = None
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    is_abandoned: bool = False  # the client hung up before the end
    error: str | None = None  # code or type of the error that ended a stream, whose status was sent long ago


def call_of(scope: Scope) -> Call:
    """The record of a call."""
    call: Call = scope[_PLACE]
    return call


def attach(scope: Scope, call: Call) -> None:
    """Let whoever answers find the record."""
    scope[_PLACE] = call
