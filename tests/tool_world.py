"""A real engine over a tiny random model behind a real server, with chat templates that know tools."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from app.serving import LoadedEngine
from models import toy
from tests.engine_world import World
from tests.http_engine import Server, serve

HERMES_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nCall like <tool_call>\n"
    '{"name": ..., "arguments": ...}\n</tool_call>. Tools:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}<|im_end|>\n'
    "{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_TEMPLATE = (
    '{% if tools %}Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
    "{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
UNKNOWN_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Köln"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "time.now"}}


@contextmanager
def serve_toy(template: str = HERMES_TEMPLATE, *, seed: int = 1) -> Iterator[Server]:
    """The application over an engine that drafts with the target itself and with a hostile model."""
    tokenizer = toy.byte_tokenizer(chat_template=template)
    target, hostile = (toy.tiny_causal_lm("llama", len(tokenizer), one, max_positions=4096) for one in (seed, 9))
    ends = [tokenizer.convert_tokens_to_ids(token) for token in ("<|endoftext|>", "<|im_end|>")]
    world = World(target, small=hostile, medium=target, stop_tokens=ends, num_rows=12_000)
    world.engine._decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    with serve(load=lambda: LoadedEngine(world.engine, tokenizer)) as server:
        yield server
    world.check_books()


def chat(server: Server, *, content: str = "hi", **body: Any) -> Any:
    """``POST /v1/chat/completions``, at temperature 1 unless the body says otherwise."""
    messages = body.pop("messages", [{"role": "user", "content": content}])
    defaults = {"temperature": 1, "seed": 1, "max_tokens": 400}
    return server.client.post("/v1/chat/completions", json={"messages": messages, **defaults, **body})
