"""Load: throughput and latency of a server over HTTP, by number of clients and schedule.

Every client asks one question after another and reads the streamed answer; together they ask each prompt once per round. At
each number of clients the schedules take turns, round by round, and who begins changes, after one round that is thrown away.
A server of its own is started with the given settings, unless `--url` names a running one.

    python -m bench.load --concurrency 1,2,4,8,16,32 --schedules ar,default
    python -m bench.load --url http://127.0.0.1:8000 --prompts question.jsonl --limit 80 --plot load.png
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from app.commands.options import describe, fail, takes_settings
from app.commands.serve import say
from app.config import Settings
from app.machine import machine
from app.measure import show
from app.prompt_sets import Prompt, read_prompt_set
from bench.asking import Reply, ask
from bench.load_report import Cell, Round, as_json, plot, table
from bench.server_process import ServerFailed, ServerProcess
from models.loading import choose_placement

PATIENCE_S = 600.0
DEFAULT = "default"  # stands for no schedule named: the server's own choice
WARM_UP = 4  # prompts asked in front, per schedule


@takes_settings
def main(
    settings: Settings,
    url: Annotated[str | None, typer.Option(help="A running server; none: one is started with the settings.")] = None,
    concurrency: Annotated[str, typer.Option(metavar="N,…", help="Numbers of clients.")] = "1,2,4,8,16,32",
    schedules: Annotated[str, typer.Option(metavar="NAME,…", help="default: none is named.")] = f"ar,{DEFAULT}",
    prompts: Annotated[Path | None, typer.Option(metavar="FILE", help=".txt or .jsonl; none: 20 built in.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use the first prompts only.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Every answer has max_tokens tokens.")] = False,
    temperature: Annotated[float, typer.Option(min=0, max=2)] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the first prompt; every other has the next one.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds per schedule and number of clients.")] = 3,
    plot_file: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Curves, as PNG, SVG or PDF.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE")] = None,
) -> None:
    """Measure a server under load."""
    for file in (plot_file, json_file):
        if file is not None and not file.parent.is_dir():  # known before the measuring, not after it
            fail(f"{file}: there is no folder {file.parent}")
    if plot_file is not None:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            fail("--plot needs matplotlib; install it, or draw from the JSON line")
    try:
        asked = read_prompt_set(prompts, limit)
        levels = read_levels(concurrency)
        placement = choose_placement(settings.device, settings.weights)
    except (ValueError, OSError) as error:
        fail(describe(error))
    names = list(dict.fromkeys(schedules.split(",")))
    options = {"max_tokens": max_tokens, "temperature": temperature} | ({"ignore_eos": True} if ignore_eos else {})
    if temperature > 0:
        options["seed"] = seed
    try:
        with ExitStack() as stack:
            if url is None:
                say(f"starting the server (target: {settings.target})")
                server = stack.enter_context(ServerProcess.start(settings))
            address = url or server.url
            # A server of ours asks for none.
            key = settings.api_keys[0].get_secret_value() if url and settings.api_keys else None
            about, cells = asyncio.run(_measure(address, levels, names, asked, options, repeats, key=key))
    except (ServerFailed, httpx.HTTPError) as error:
        fail(f"{address if url else 'the server'}: {describe(error)}" if isinstance(error, httpx.HTTPError) else str(error))

    title = f"{about['model']}, {len(asked)} prompts of up to {max_tokens} tokens, T={temperature:g}, {repeats} rounds"
    show(f"{title}\ntokens/s: median (range) of rounds; milliseconds: p50 / p95 of answers", *table(cells))
    if plot_file is not None:
        plot(cells, title, plot_file)
    record = {
        "bench": "load",
        "machine": None if url else machine(placement),  # of another machine nothing is known
        "url": url,
        **about,
        **options,
        "prompts": len(asked),
        "repeats": repeats,
        "settings": None if url else settings.model_dump(mode="json"),
        "cells": [as_json(cell) for cell in cells],
    }
    line = json.dumps(record, ensure_ascii=False)
    if json_file is not None:
        json_file.write_text(line + "\n", "utf-8")
    typer.echo(line)
    raise typer.Exit(1 if any(cell.num_failed for cell in cells) else 0)


def read_levels(text: str) -> list[int]:
    """Numbers of clients from a list with commas. Raises ValueError that names the option."""
    try:
        levels = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--concurrency: {text!r} is not a list of whole numbers, as in 1,2,4") from None
    if min(levels) < 1:
        raise ValueError(f"--concurrency: {min(levels)} is less than 1")
    return list(dict.fromkeys(levels))


async def _measure(
    url: str,
    levels: Sequence[int],
    names: Sequence[str],
    asked: Sequence[Prompt],
    options: dict[str, Any],
    repeats: int,
    *,
    key: str | None = None,
) -> tuple[dict[str, Any], list[Cell]]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=max(levels))
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(
        base_url=url, timeout=PATIENCE_S, limits=limits, headers=headers, trust_env=False
    ) as client:
        offered = {entry["name"]: entry for entry in (await client.get("/v1/schedules")).raise_for_status().json()["data"]}
        if unknown := [name for name in names if name != DEFAULT and name not in offered]:
            fail(f"schedule {unknown[0]!r} is not one of {', '.join([DEFAULT, *offered])}")
        model = (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
        probe = await client.post("/tokenize", json={"messages": [{"role": "user", "content": "a"}]})
        bodies = [body_of(prompt, options, index, has_chat=probe.status_code == 200) for index, prompt in enumerate(asked)]
        for name in names:
            await round_of(client, name, bodies[:WARM_UP], 1)
        cells: list[Cell] = []
        for level in levels:
            here = {name: Cell(level, name) for name in names}
            for repeat in range(repeats):
                for offset in range(len(names)):
                    name = names[(repeat + offset) % len(names)]
                    here[name].rounds.append(await round_of(client, name, bodies, level))
            cells += here.values()
            say(f"{level} {'client' if level == 1 else 'clients'} done")
    default = next((name for name, entry in offered.items() if entry["default"]), None)
    return {"model": model, "default_schedule": default, "has_chat": probe.status_code == 200}, cells


def body_of(prompt: Prompt, options: dict[str, Any], index: int, *, has_chat: bool) -> tuple[str, dict[str, Any]]:
    """Path and body of a prompt: a chat, or where the model has no template its last text alone."""
    common = {**options, "stream": True, "stream_options": {"include_usage": True}}
    if "seed" in options:
        common["seed"] = options["seed"] + index
    if has_chat:
        messages = [{"role": message.role, "content": message.text} for message in prompt.messages]
        return "/v1/chat/completions", {"messages": messages, **common}
    return "/v1/completions", {"prompt": prompt.messages[-1].text, **common}


async def round_of(
    client: httpx.AsyncClient, schedule: str, bodies: Sequence[tuple[str, dict[str, Any]]], concurrency: int
) -> Round:
    """Ask every prompt once, `concurrency` at a time; replies in the order of the prompts."""
    named = {} if schedule == DEFAULT else {"speculative": {"schedule": schedule}}
    replies: list[Reply | None] = [None] * len(bodies)
    waiting = iter(enumerate(bodies))

    async def work() -> None:
        for index, (path, body) in waiting:
            replies[index] = await ask(client, path, body | named)

    start = time.perf_counter()
    async with asyncio.TaskGroup() as clients:
        for _ in range(min(concurrency, len(bodies))):
            clients.create_task(work())
    seconds = time.perf_counter() - start
    return Round(seconds, [reply for reply in replies if reply is not None])


if __name__ == "__main__":
    typer.run(main)
