"""One question over HTTP, whole or streamed, and what came back, when, and whether it kept the rules of the dialect.

    reply = await ask(client, "/v1/completions", {"prompt": "abc", "stream": True})
    reply.texts[0], reply.first_s - reply.sent_s
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass(slots=True)
class Reply:
    """What came back. Times are seconds of `time.perf_counter`."""

    sent_s: float
    status: int = 0
    texts: list[str] = field(default_factory=list)  # per choice
    reasons: list[str | None] = field(default_factory=list)
    num_tokens: int | None = None  # of all choices together, as `usage` counts them
    logprobs: dict[str, Any] | None = None  # of the first choice of a whole answer
    error: dict[str, Any] | None = None  # the error object of a refusal, or of a stream that broke off
    fault: str | None = None  # how the answer breaks the rules of the dialect
    retry_after: str | None = None
    first_s: float | None = None  # the first text came
    last_s: float | None = None  # everything had come

    @property
    def is_answer(self) -> bool:
        """Whether it is a finished answer."""
        return self.status == 200 and self.error is None and self.fault is None


async def ask(client: httpx.AsyncClient, path: str, body: Mapping[str, Any], *, hang_up_after: int | None = None) -> Reply:
    """Ask, and read to the end; or hang up after so many chunks of a stream.

    A reply that was hung up on has no `last_s`. Raises what httpx raises.
    """
    reply = Reply(time.perf_counter())
    if not body.get("stream"):
        response = await client.post(path, json=body)
        _take_head(reply, response)
        if reply.status == 200:
            _take_whole(reply, response.json())
        else:
            _take_refusal(reply, response.content)
        reply.first_s = reply.last_s = time.perf_counter()
        return reply
    async with client.stream("POST", path, json=body) as response:
        _take_head(reply, response)
        if reply.status != 200:
            _take_refusal(reply, await response.aread())
        elif not await _take_stream(reply, response, int(body.get("n") or 1), hang_up_after):
            return reply
    reply.last_s = time.perf_counter()
    return reply


async def send_raw(client: httpx.AsyncClient, path: str, content: bytes) -> Reply:
    """Send any bytes as a body of JSON; only the status and the error of the reply are read."""
    reply = Reply(time.perf_counter())
    response = await client.post(path, content=content, headers={"Content-Type": "application/json"})
    _take_head(reply, response)
    if reply.status != 200:
        _take_refusal(reply, response.content)
    reply.last_s = time.perf_counter()
    return reply


def _take_head(reply: Reply, response: httpx.Response) -> None:
    reply.status, reply.retry_after = response.status_code, response.headers.get("retry-after")


def _take_whole(reply: Reply, answer: dict[str, Any]) -> None:
    for choice in answer["choices"]:
        reply.texts.append(choice["text"] if "text" in choice else choice["message"]["content"])
        reply.reasons.append(choice["finish_reason"])
    reply.logprobs = answer["choices"][0]["logprobs"]
    reply.num_tokens = answer["usage"]["completion_tokens"]


def _take_refusal(reply: Reply, content: bytes) -> None:
    try:
        reply.error = json.loads(content)["error"]
    except (ValueError, KeyError, TypeError):
        reply.fault = f"a {reply.status} without an error object: {content[:80]!r}"


async def _take_stream(reply: Reply, response: httpx.Response, num_choices: int, hang_up_after: int | None) -> bool:
    """Read the events; False if hung up. Every choice must end once, and the stream with the closing event."""
    reply.texts, reply.reasons = [""] * num_choices, [None] * num_choices
    num_chunks, is_done = 0, False
    async for line in response.aiter_lines():
        if not line:
            continue
        if is_done or not line.startswith("data: "):
            reply.fault = f"an unexpected line: {line[:80]!r}"
            continue
        if line == "data: [DONE]":
            is_done = True
            continue
        _take_chunk(reply, json.loads(line.removeprefix("data: ")))
        num_chunks += 1
        if hang_up_after is not None and num_chunks >= hang_up_after:
            return False
    if not is_done:
        reply.fault = "the stream ended without [DONE]"
    elif reply.error is None and None in reply.reasons:
        reply.fault = reply.fault or "a choice ended without a finish reason"
    return True


def _take_chunk(reply: Reply, chunk: dict[str, Any]) -> None:
    if "error" in chunk:
        reply.error = chunk["error"]
        return
    if chunk.get("usage"):
        reply.num_tokens = chunk["usage"]["completion_tokens"]
    for choice in chunk["choices"]:
        index = choice["index"]
        piece = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        if reply.reasons[index] is not None:
            reply.fault = f"choice {index} goes on after its end"
        reply.texts[index] += piece
        reply.reasons[index] = choice["finish_reason"]
        if reply.first_s is None and (piece or choice["finish_reason"]):
            reply.first_s = time.perf_counter()
