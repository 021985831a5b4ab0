"""Figures of a server under load are what their names say, and who is compared takes turns."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from typer.testing import CliRunner

from app.prompt_sets import read_prompt_set
from bench.asking import Reply
from bench.load import _measure, body_of, main, read_levels
from bench.load_report import Cell, Round, as_json, plot, table

application = typer.Typer()
application.command()(main)


def reply(first: float, last: float, tokens: int, status: int = 200) -> Reply:
    return Reply(10.0, status, ["x"], ["length"], tokens, first_s=10.0 + first, last_s=10.0 + last)


CELL = Cell(2, "ar", [Round(2.0, [reply(0.1, 0.5, 5), reply(0.3, 0.3, 1), reply(0.0, 0.1, 9, status=429)])])


def test_times_are_what_they_are_called() -> None:
    """A time per token that counts the first one is too short, and a refusal is no fast answer."""
    assert CELL.first_token_ms() == pytest.approx([100, 300])
    assert CELL.per_token_ms() == pytest.approx([100])
    assert CELL.whole_ms() == pytest.approx([500, 300])
    assert CELL.speeds() == [3.0] and (CELL.num_refused, CELL.num_failed) == (1, 0)
    shown = as_json(CELL)
    assert shown["ttft_ms"]["p50"] == pytest.approx(200) and json.dumps(shown)
    titles, (row,) = table([CELL])
    assert len(titles) == len(row) and row[2] == "200 / 290"


def test_a_cell_without_answers_is_shown_as_such() -> None:
    """A server that refuses everything must give a table, not a traceback."""
    cell = Cell(1, "ar", [Round(1.0, [reply(0, 0, 0, status=503)])])
    _, (row,) = table([cell])
    assert row[2:5] == ("-", "-", "-") and as_json(cell)["e2e_ms"] == {"p50": None, "p95": None}


def test_curves_are_drawn(tmp_path: Path) -> None:
    """`--plot` writes a picture, without a window."""
    pytest.importorskip("matplotlib")
    cells = [CELL, Cell(1, "default", CELL.rounds), Cell(1, "ar", CELL.rounds)]
    plot(cells, "title", tmp_path / "load.png")
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")


def fake_server(asked: list[str]) -> Callable[[httpx.Request], httpx.Response]:
    """Notes the schedule of every question; has no chat template."""

    def respond(request: httpx.Request) -> httpx.Response:
        match request.url.path:
            case "/v1/schedules":
                data = [{"name": "ar", "default": False}, {"name": "small", "default": True}]
                return httpx.Response(200, json={"data": data})
            case "/v1/models":
                return httpx.Response(200, json={"data": [{"id": "toy"}]})
            case "/tokenize":
                return httpx.Response(400, json={"error": {}})
        asked.append(json.loads(request.content).get("speculative", {}).get("schedule", "default"))
        end = {"choices": [{"index": 0, "text": "x", "finish_reason": "stop"}]}
        usage = {"choices": [], "usage": {"completion_tokens": 1}}
        return httpx.Response(200, content=f"data: {json.dumps(end)}\n\ndata: {json.dumps(usage)}\n\ndata: [DONE]\n\n")

    return respond


def test_schedules_take_turns_and_who_begins_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured one after the other, a machine that slows down favors the first."""
    asked: list[str] = []
    client = httpx.AsyncClient(base_url="http://toy", transport=httpx.MockTransport(fake_server(asked)))
    monkeypatch.setattr(httpx, "AsyncClient", lambda **_: client)
    prompts = read_prompt_set(None, 2)
    about, cells = asyncio.run(_measure("http://toy", [1, 2], ["ar", "default"], prompts, {"max_tokens": 3}, 2))
    assert about == {"model": "toy", "default_schedule": "small", "has_chat": False}
    assert [(cell.concurrency, cell.schedule) for cell in cells] == [(1, "ar"), (1, "default"), (2, "ar"), (2, "default")]
    warm_up, level = ["ar"] * 2 + ["default"] * 2, ["ar"] * 2 + ["default"] * 4 + ["ar"] * 2
    assert asked == warm_up + level * 2
    assert all(len(cell.answers) == 4 and not cell.num_failed for cell in cells)


def test_a_server_that_asks_for_a_key_gets_one() -> None:
    """With every request: a server for other people has one, and could not be measured."""
    keys: list[str | None] = []

    def respond(request: httpx.Request) -> httpx.Response:
        keys.append(request.headers.get("authorization"))
        return fake_server([])(request)

    transport, create = httpx.MockTransport(respond), httpx.AsyncClient
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(httpx, "AsyncClient", lambda **given: create(**given, transport=transport))
        asyncio.run(_measure("http://toy", [1], ["ar"], read_prompt_set(None, 1), {"max_tokens": 3}, 1, key="secret"))
        assert keys and set(keys) == {"Bearer secret"}
        keys.clear()
        asyncio.run(_measure("http://toy", [1], ["ar"], read_prompt_set(None, 1), {"max_tokens": 3}, 1))
        assert set(keys) == {None}


def test_each_prompt_has_its_own_seed_and_the_template_decides_the_endpoint() -> None:
    """One seed for all would give answers that resemble each other."""
    prompt = read_prompt_set(None, 1)[0]
    path, body = body_of(prompt, {"max_tokens": 3, "temperature": 1.0, "seed": 7}, 2, has_chat=True)
    assert path == "/v1/chat/completions" and body["seed"] == 9 and body["messages"][0]["role"] == "user"
    path, body = body_of(prompt, {"max_tokens": 3}, 2, has_chat=False)
    assert path == "/v1/completions" and "seed" not in body and body["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("text", ["", "1,x", "0,1", "-2"])
def test_a_bad_list_of_clients_is_named(text: str) -> None:
    """A level of 0 would wait for ever."""
    with pytest.raises(ValueError, match="--concurrency"):
        read_levels(text)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--concurrency", "1,a"], "--concurrency"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--plot", "/no/such/folder/x.png"], "/no/such/folder"),
        (["--url", "http://127.0.0.1:9"], "http://127.0.0.1:9"),
    ],
)
def test_a_mistake_ends_with_status_2_and_one_line(options: list[str], named: str) -> None:
    """What a user can mend needs no traceback."""
    done: Any = CliRunner().invoke(application, options)
    assert done.exit_code == 2 and named in done.stderr and len(done.stderr.splitlines()) == 1, done.output
