"""``POST /tokenize`` and ``POST /detokenize``: what the served model's tokenizer makes of a text, in vLLM's format."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from app.answers import check_model
from app.prompts import chat_prompt, check_ids, decode, encode
from app.protocol_tokens import DetokenizeBody, TokenizeBody
from app.serving import Ready

router = APIRouter()


@router.post("/tokenize", response_model=None)
async def tokenize(serving: Ready, body: TokenizeBody) -> dict[str, Any]:
    """Token ids of a text, or of a conversation: those that the completion endpoints would give the model."""
    check_model(serving, body.model)
    if body.messages is not None:
        if body.tools:
            serving.tool_forms.check("tools")
        ids = await chat_prompt(
            serving.tokenizer,
            body.messages,
            tools=body.shown_tools,
            add_generation_prompt=body.add_generation_prompt is not False,
            add_special_tokens=bool(body.add_special_tokens),
        )
    else:
        assert body.prompt is not None, "a body has a prompt or messages"
        ids = await encode(serving.tokenizer, body.prompt, add_special_tokens=body.add_special_tokens is not False)
    return {
        "count": len(ids),
        "max_model_len": serving.engine.max_model_len,
        "tokens": list(ids),
        "token_strs": serving.tokenizer.convert_ids_to_tokens(list(ids)) if body.return_token_strs else None,
    }


@router.post("/detokenize", response_model=None)
async def detokenize(serving: Ready, body: DetokenizeBody) -> dict[str, Any]:
    """The text of token ids, special tokens by their names."""
    check_model(serving, body.model)
    ids = check_ids(body.tokens, serving.engine.vocab_size, param="tokens")
    return {"prompt": await decode(serving.tokenizer, ids)}
