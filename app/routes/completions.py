"""``POST /v1/completions``: text that continues one or several prompts."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from app.answers import answer, check_model
from app.prompts import completion_prompts
from app.protocol import CompletionBody
from app.serving import Ready

router = APIRouter()


class CompletionDialect:
    """Choices that carry ``text``."""

    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"
    prompt_param = "prompt"
    default_limit: int | None = 16  # what clients of this endpoint have always got

    def choice(self, index: int, text: str, reason: str | None) -> dict[str, Any]:
        """A whole choice."""
        return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}

    def opening(self, index: int) -> None:
        """None: a stream begins with text."""

    def piece(self, index: int, text: str) -> dict[str, Any]:
        """Text that is not the end."""
        return self.choice(index, text, None)

    def ending(self, index: int, reason: str) -> dict[str, Any]:
        """The end, without text."""
        return self.choice(index, "", reason)


DIALECT = CompletionDialect()


@router.post("/v1/completions", response_model=None)
async def create_completion(http: HttpRequest, serving: Ready, body: CompletionBody) -> Response:
    """Continue a prompt, or each of a list of prompts; ``index`` is the prompt's place in the list."""
    check_model(serving, body.model)
    prompts = await completion_prompts(serving.tokenizer, body.prompt, vocab_size=serving.engine.vocab_size)
    return await answer(http, serving, DIALECT, body, prompts)
