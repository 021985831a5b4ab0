"""Prompts from a file or from the built-in set, and their token ids as the HTTP API would make them.

    prompts = read_prompt_set(Path("questions.jsonl"))
    ids = [encode(tokenizer, prompt.messages) for prompt in prompts]
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from app.prompts import Tokenizer, chat_prompt, completion_prompts
from app.prompts_builtin import PROMPTS
from app.protocol import Message


@dataclass(frozen=True, slots=True)
class Prompt:
    """One conversation to be answered."""

    messages: list[Message]
    category: str | None = None  # what kind of task it is, if its file says so


def read_prompt_set(file: Path | None, limit: int | None = None) -> list[Prompt]:
    """The prompts of a file, the first `limit` of them; of the built-in set without a file.

    A ``.txt`` file holds one prompt per line. A ``.jsonl`` file holds one object per line with ``prompt`` (text),
    ``messages`` (a conversation) or ``turns`` (the user's texts, of which the first is asked), and perhaps a ``category``
    (text). Raises ValueError that names the line, and OSError.
    """
    if file is None:
        prompts = [_user(prompt) for prompt in PROMPTS]
    else:
        lines = [(number, line) for number, line in enumerate(file.read_text("utf-8").split("\n"), 1) if line.strip()]
        if file.suffix == ".txt":
            prompts = [_user(line) for _, line in lines]
        elif file.suffix == ".jsonl":
            prompts = [_from_json(line, f"{file}:{number}") for number, line in lines]
        else:
            raise ValueError(f"{file}: prompts are read from .txt and .jsonl files")
    if not prompts:
        raise ValueError(f"{file} holds no prompt")
    return prompts[:limit]


def read_prompts(file: Path | None, limit: int | None = None) -> list[list[Message]]:
    """The conversations of :func:`read_prompt_set`, for those who do not ask for categories."""
    return [prompt.messages for prompt in read_prompt_set(file, limit)]


def encode(tokenizer: Tokenizer, messages: Sequence[Message], *, raw: bool = False) -> tuple[int, ...]:
    """Token ids of a conversation; of its last text alone if `raw`, or if the tokenizer has no chat template.

    Raises RequestError as the HTTP API does.
    """
    if raw or not tokenizer.chat_template:
        return asyncio.run(completion_prompts(tokenizer, messages[-1].text, vocab_size=0))[0]
    return asyncio.run(chat_prompt(tokenizer, messages))


def _user(text: str, category: str | None = None) -> Prompt:
    return Prompt([Message.model_validate({"role": "user", "content": text})], category)


def _from_json(line: str, place: str) -> Prompt:
    try:
        entry: Any = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place}: not a JSON object: {error}") from error
    category = entry.get("category") if isinstance(entry, dict) else None
    if not isinstance(category, str | None):
        raise ValueError(f"{place}: the category must be a text")
    try:
        match entry:
            case {"messages": [_, *_] as messages}:
                return Prompt([Message.model_validate(message) for message in messages], category)
            case {"turns": [str(text), *_]} | {"prompt": str(text)}:
                return _user(text, category)
    except ValidationError as error:
        raise ValueError(f"{place}: {error.errors()[0]['msg']}") from error
    raise ValueError(f'{place}: expected "prompt" (a text), "messages" or "turns" (not empty)')
