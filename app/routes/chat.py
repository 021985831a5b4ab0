"""``POST /v1/chat/completions``: the next turn of a conversation, through the model's chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from app.answers import answer, check_model
from app.prompts import chat_prompt
from app.protocol import ChatBody
from app.serving import Ready
from app.token_text import TokenTexts
from app.tool_reading import CallPiece
from app.tool_use import tool_use
from engine.request import TokenLogprob

router = APIRouter()


class ChatDialect:
    """Choices that carry a ``message``, or in a stream the ``delta`` to it."""

    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    prompt_param = "messages"
    default_limit: int | None = None

    def choice(
        self, index: int, text: str, reason: str, logprobs: dict[str, Any] | None, calls: Sequence[CallPiece] = ()
    ) -> dict[str, Any]:
        """A whole choice; the pieces of its calls are put together."""
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            message |= {"content": text or None, "tool_calls": joined_calls(calls)}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def opening(self, index: int) -> dict[str, Any]:
        """Who speaks; said once."""
        return self._delta(index, {"role": "assistant", "content": ""})

    def piece(
        self, index: int, text: str, logprobs: dict[str, Any] | None, calls: Sequence[CallPiece] = ()
    ) -> dict[str, Any]:
        """Text and pieces of calls that are not the end."""
        delta: dict[str, Any] = {"content": text} if text else {}
        if calls:
            delta["tool_calls"] = [{"index": call.index, **_call(call)} for call in calls]
        return self._delta(index, delta, logprobs=logprobs)

    def ending(self, index: int, reason: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """The end, without text."""
        return self._delta(index, {}, reason, logprobs)

    def logprobs(self, tokens: Sequence[TokenLogprob], texts: TokenTexts) -> dict[str, Any]:
        """One object per token, with the likeliest tokens at its place."""

        def entry(token_id: int, logprob: float | None) -> dict[str, Any]:
            shown = texts(token_id)
            return {"token": shown.text, "bytes": shown.bytes, "logprob": logprob}

        content = [
            {**entry(one.token_id, one.logprob), "top_logprobs": [entry(*other) for other in one.alternatives]}
            for one in tokens
        ]
        return {"content": content, "refusal": None}

    @staticmethod
    def _delta(
        index: int, delta: dict[str, Any], reason: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def joined_calls(pieces: Sequence[CallPiece]) -> list[dict[str, Any]]:
    """Whole calls, as messages hold them."""
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if piece.id is not None:
            calls.append(_call(piece))
        else:
            calls[-1]["function"]["arguments"] += piece.arguments
    return calls


def _call(piece: CallPiece) -> dict[str, Any]:
    if piece.id is None:
        return {"function": {"arguments": piece.arguments}}
    return {"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": piece.arguments}}


DIALECT = ChatDialect()


@router.post("/v1/chat/completions", response_model=None)
async def create_chat_completion(http: HttpRequest, serving: Ready, body: ChatBody) -> Response:
    """Answer a conversation with the assistant's next turn."""
    check_model(serving, body.model)
    use = tool_use(serving.tool_forms, body)
    prompt = await chat_prompt(serving.tokenizer, body.messages, tools=use.shown)
    spec = use.spec or body.grammar_spec()
    grammar = None if spec is None else await serving.grammars.compile(spec)
    return await answer(http, serving, DIALECT, body, [prompt], grammar=grammar, reader=use.reader)
