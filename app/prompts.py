"""From the prompt of a body to token ids, and whether they fit the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from anyio import to_thread
from jinja2 import TemplateError

from app.body import Prompt
from app.errors import shorten
from app.protocol import Message
from engine.request import RequestError
from engine.text import TextStream, byte_fallback_ids

_INLINE_CHARS = 8192  # tokenized on the event loop up to here (about a millisecond), in a thread beyond


class Tokenizer(Protocol):
    """What the edge needs of a ``transformers`` tokenizer."""

    chat_template: Any

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, ids: Any, /, **options: Any) -> str: ...
    def convert_ids_to_tokens(self, ids: Any, /) -> list[str]: ...
    def get_vocab(self) -> dict[str, int]: ...
    def apply_chat_template(self, conversation: Any, /, **options: Any) -> Any: ...


async def completion_prompts(tokenizer: Tokenizer, prompt: Prompt, *, vocab_size: int) -> list[tuple[int, ...]]:
    """Token ids of each prompt, none of them empty. Raises RequestError with param ``prompt``."""
    if isinstance(prompt, str):
        return [_refuse_empty(await encode(tokenizer, prompt))]
    if isinstance(prompt[0], int):
        return [check_ids(prompt, vocab_size)]
    prompts = []
    for item in prompt:
        ids = await encode(tokenizer, item) if isinstance(item, str) else check_ids(item, vocab_size)
        prompts.append(_refuse_empty(ids))
    return prompts


async def prompt_texts(tokenizer: Tokenizer, prompt: Prompt) -> list[str]:
    """Each prompt as text: as it was sent, or decoded with its special tokens."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [await decode(tokenizer, prompt)]
    return [item if isinstance(item, str) else await decode(tokenizer, item) for item in prompt]


async def prompt_offsets(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> list[int]:
    """Where each token of a prompt begins in its `text`, as :func:`prompt_texts` gives it."""
    return await to_thread.run_sync(_offsets, tokenizer, ids, text)


def _offsets(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> list[int]:
    # Special tokens are part of a text that was sent as ids, and of one that spells them.
    for skip in (False, True):
        decode = partial(tokenizer.decode, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        stream = TextStream(decode, byte_ids=byte_fallback_ids(tokenizer.get_vocab()))
        offsets = []
        for token in ids:
            offsets.append(stream.num_chars)
            stream.push(token)
        stream.finish()
        if stream.text == text:
            break
    return [min(offset, len(text)) for offset in offsets]


async def chat_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    add_generation_prompt: bool = True,
    add_special_tokens: bool = False,
) -> tuple[int, ...]:
    """Token ids of a conversation, ready for the assistant's next turn. Raises RequestError with param ``messages``.

    Args:
        tokenizer: with a chat template.
        messages: the conversation.
        tools: as the template wants them, if the model is to learn of some.
        add_generation_prompt: whether the template begins the assistant's turn.
        add_special_tokens: whether the tokenizer adds its own special tokens to those of the template.
    """
    if not tokenizer.chat_template:
        raise RequestError(
            "This model's tokenizer has no chat template. Use /v1/completions, or serve a model folder that holds a "
            "chat_template.jinja file.",
            param="messages",
            code="no_chat_template",
        )
    turns = [_turn(message) for message in messages]
    told = {"tools": list(tools)} if tools else {}

    def encode() -> tuple[int, ...]:
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=add_generation_prompt, **told)
        if (half := unpaired(text)) is not None:  # JSON inside of JSON can spell it
            raise RequestError(f"The conversation holds half a surrogate pair, {half}.", param="messages")
        # Usually none: the template has written the special tokens itself.
        return tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens))

    try:
        if len(repr(turns)) + len(repr(tools)) <= _INLINE_CHARS:
            ids = encode()
        else:
            ids = await to_thread.run_sync(encode)
    except TemplateError as error:
        message = f"The model's chat template refused the messages: {shorten(str(error))}"
        raise RequestError(message, param="messages") from error
    except RecursionError as error:
        raise RequestError("The arguments of calls, or tools, are nested too deeply.", param="messages") from error
    return _refuse_empty(ids, "messages")


def unpaired(text: str) -> str | None:
    """The first unpaired surrogate in a text, by its name."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"U+{ord(text[error.start]):04X}"
    return None


def _turn(message: Message) -> dict[str, Any]:
    """A message as templates of open models know it: "system" by its older name, arguments as objects and not as text."""
    turn: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": message.text}
    if message.tool_calls:
        turn["tool_calls"] = [
            {"id": call.id, "type": call.type, "function": {"name": call.function.name, "arguments": call.function.values}}
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    return turn


def fit(
    prompt: Sequence[int], *, param: str, limit: tuple[str, int] | None, default: int | None, max_model_len: int
) -> int | None:
    """How many tokens the answer may have: the explicit ``limit``, else ``default`` cut to the room (None: all of it).

    Raises RequestError (``context_length_exceeded``) if the prompt leaves no room for a token, or if the explicit limit
    does not fit behind it.
    """
    known = f"This model's context holds {max_model_len} tokens"
    room = max_model_len - len(prompt)
    if room < 1:
        message = f"{known}; the prompt has {len(prompt)}, and an answer needs at least one more."
        raise RequestError(message, param=param, code="context_length_exceeded")
    if limit is None:
        return default if default is None else min(default, room)
    name, asked = limit
    if asked > room:
        message = f"{known}; {len(prompt)} of the prompt and {asked} of the answer ({name}) are {len(prompt) + asked}."
        raise RequestError(message, param=name, code="context_length_exceeded")
    return asked


async def encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
    """Token ids of a text."""
    if len(text) <= _INLINE_CHARS:
        return tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens))
    work = partial(tokenizer.encode, text, add_special_tokens=add_special_tokens)
    return tuple(await to_thread.run_sync(work))


async def decode(tokenizer: Tokenizer, ids: Sequence[Any]) -> str:
    """The text of token ids inside the vocabulary, special tokens included."""
    work = partial(tokenizer.decode, list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return work() if len(ids) <= _INLINE_CHARS else await to_thread.run_sync(work)


def check_ids(ids: Sequence[Any], vocab_size: int, *, param: str = "prompt") -> tuple[int, ...]:
    """The ids, if the vocabulary has them all. Raises RequestError with that param."""
    # min and max, not a loop: a body may hold a million ids.
    if ids and not (0 <= min(ids) and max(ids) < vocab_size):
        wrong = next(i for i in ids if not 0 <= i < vocab_size)
        message = f"Token id {shorten(hex(wrong) if abs(wrong) >= 2**63 else str(wrong))} is not in the vocabulary"
        raise RequestError(f"{message} (0 to {vocab_size - 1}).", param=param)
    return tuple(ids)


def _refuse_empty(ids: tuple[int, ...], param: str = "prompt") -> tuple[int, ...]:
    if not ids:
        message = "The prompt holds no token, and this model's tokenizer adds no start token."
        raise RequestError(message, param=param)
    return ids
