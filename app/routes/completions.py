"""``POST /v1/completions``: text that continues one or several prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from app.answers import answer, check_model
from app.choice import Echo
from app.prompts import completion_prompts, prompt_offsets, prompt_texts
from app.protocol import CompletionBody
from app.serving import Ready, Serving
from app.token_text import TokenTexts
from app.tool_reading import CallPiece
from engine.request import TokenLogprob

router = APIRouter()


class CompletionDialect:
    """Choices that carry ``text``."""

    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"
    prompt_param = "prompt"
    default_limit: int | None = 16  # what clients of this endpoint have always got

    def choice(
        self, index: int, text: str, reason: str | None, logprobs: dict[str, Any] | None, calls: Sequence[CallPiece] = ()
    ) -> dict[str, Any]:
        """A whole choice."""
        assert not calls, "calls belong to chat"
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def opening(self, index: int) -> None:
        """None: a stream begins with text."""

    def piece(
        self, index: int, text: str, logprobs: dict[str, Any] | None, calls: Sequence[CallPiece] = ()
    ) -> dict[str, Any]:
        """Text that is not the end."""
        return self.choice(index, text, None, logprobs, calls)

    def ending(self, index: int, reason: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """The end, without text."""
        return self.choice(index, "", reason, logprobs)

    def logprobs(self, tokens: Sequence[TokenLogprob], texts: TokenTexts) -> dict[str, Any]:
        """Four lists with one item per token; the token itself is among the likeliest, as one too many if need be."""

        def likeliest(one: TokenLogprob) -> dict[str, float] | None:
            if one.logprob is None:
                return None
            shown: dict[str, float] = {}
            for token_id, logprob in (*one.alternatives, (one.token_id, one.logprob)):
                shown.setdefault(texts(token_id).text, logprob)
            return shown

        return {
            "tokens": [texts(one.token_id).text for one in tokens],
            "token_logprobs": [one.logprob for one in tokens],
            "top_logprobs": [likeliest(one) for one in tokens],
            "text_offset": [one.text_offset for one in tokens],
        }


DIALECT = CompletionDialect()


async def _echoes(serving: Serving, body: CompletionBody, prompts: Sequence[tuple[int, ...]]) -> list[Echo]:
    """What the answers to each prompt begin with."""
    texts = await prompt_texts(serving.tokenizer, body.prompt)
    if body.logprobs is None:
        return [Echo(text) for text in texts]
    pairs = zip(texts, prompts, strict=True)
    return [Echo(text, ids, tuple(await prompt_offsets(serving.tokenizer, ids, text))) for text, ids in pairs]


@router.post("/v1/completions", response_model=None)
async def create_completion(http: HttpRequest, serving: Ready, body: CompletionBody) -> Response:
    """Continue a prompt, or each of a list of prompts; ``index`` counts prompts times n."""
    check_model(serving, body.model)
    prompts = await completion_prompts(serving.tokenizer, body.prompt, vocab_size=serving.engine.vocab_size)
    echoes = await _echoes(serving, body, prompts) if body.echo else None
    spec = body.grammar_spec()
    grammar = None if spec is None else await serving.grammars.compile(spec)
    return await answer(http, serving, DIALECT, body, prompts, echoes, grammar=grammar)
