"""Prompts from a file or from the built-in set, and their token ids as the HTTP API would make them.

    prompts = read_prompts(Path("questions.jsonl"))
    ids = [encode(tokenizer, messages) for messages in prompts]
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from app.prompts import Tokenizer, chat_prompt, completion_prompts
from app.prompts_builtin import PROMPTS
from app.protocol import Message


def read_prompts(file: Path | None, limit: int | None = None) -> list[list[Message]]:
    """Conversations of a file, the first `limit` of them; of the built-in set without a file.

    A ``.txt`` file holds one prompt per line. A ``.jsonl`` file holds one object per line with ``prompt`` (text),
    ``messages`` (a conversation) or ``turns`` (the user's texts, of which the first is asked). Raises ValueError that
    names the line, and OSError.
    """
    if file is None:
        conversations = [_user(prompt) for prompt in PROMPTS]
    else:
        lines = [(number, line) for number, line in enumerate(file.read_text("utf-8").split("\n"), 1) if line.strip()]
        if file.suffix == ".txt":
            conversations = [_user(line) for _, line in lines]
        elif file.suffix == ".jsonl":
            conversations = [_from_json(line, f"{file}:{number}") for number, line in lines]
        else:
            raise ValueError(f"{file}: prompts are read from .txt and .jsonl files")
    if not conversations:
        raise ValueError(f"{file} holds no prompt")
    return conversations[:limit]


def encode(tokenizer: Tokenizer, messages: Sequence[Message], *, raw: bool = False) -> tuple[int, ...]:
    """Token ids of a conversation; of its last text alone if `raw`, or if the tokenizer has no chat template.

    Raises RequestError as the HTTP API does.
    """
    if raw or not tokenizer.chat_template:
        return asyncio.run(completion_prompts(tokenizer, messages[-1].text, vocab_size=0))[0]
    return asyncio.run(chat_prompt(tokenizer, messages))


def _user(text: str) -> list[Message]:
    return [Message.model_validate({"role": "user", "content": text})]


def _from_json(line: str, place: str) -> list[Message]:
    try:
        entry: Any = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place}: not a JSON object: {error}") from error
    try:
        match entry:
            case {"messages": [_, *_] as messages}:
                return [Message.model_validate(message) for message in messages]
            case {"turns": [str(text), *_]} | {"prompt": str(text)}:
                return _user(text)
    except ValidationError as error:
        raise ValueError(f"{place}: {error.errors()[0]['msg']}") from error
    raise ValueError(f'{place}: expected "prompt" (a text), "messages" or "turns" (not empty)')
