"""``graftserve experiments``: A/B experiments of a running server, through its admin API.

    graftserve experiments start tree-or-not --arm control=ar --arm tree=treegraft:16@2
    graftserve experiments report tree-or-not

Exit status: 0, 2 for what the user can mend: no server there, a wrong key, a change that the server refuses.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from app.commands.options import fail
from app.config import ENV_PREFIX

experiments = typer.Typer(help="A/B experiments between schedules, on a running server.", no_args_is_help=True)

_TIMEOUT_S = 30
Url = Annotated[str, typer.Option(help="The server.")]
Key = Annotated[
    str | None, typer.Option(help=f"Its admin key; better in the environment, as {ENV_PREFIX}ADMIN_KEY.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print the server's JSON.")]
Name = Annotated[str, typer.Argument(help="The experiment.")]
_URL = "http://127.0.0.1:8000"


@experiments.command("list")
def list_all(url: Url = _URL, admin_key: Key = None, as_json: Json = False) -> None:
    """All experiments, the newest first, and the default schedule."""
    answer = _call("GET", url, admin_key, "")
    if as_json:
        typer.echo(json.dumps(answer))
        return
    rows = [
        (
            one["name"],
            one["state"],
            one["mode"],
            " ".join(f"{arm['name']}={arm['schedule']} ({arm['share']:.0%})" for arm in one["arms"]),
            one["winner"] or "-",
        )
        for one in answer["data"]
    ]
    _table("experiments", ("name", "state", "mode", "arms", "winner"), rows)
    default = answer["default"]
    typer.echo(f"default schedule: {default['schedule']}" + (", promoted" if default["promoted_by"] else ""))
    if not answer["persistent"]:
        typer.echo("kept in memory only: set state_dir to keep experiments over a restart")


@experiments.command("start")
def start(
    name: Name,
    arm: Annotated[list[str], typer.Option(metavar="NAME=SCHEDULE[:BUDGET][@WEIGHT]", help="An arm; give two or more.")],
    control: Annotated[str | None, typer.Option(help="The arm the others are compared with. Default: the first.")] = None,
    mode: Annotated[str, typer.Option(help="fixed, or bandit: weights that follow what is seen.")] = "fixed",
    guard: Annotated[
        str | None, typer.Option(help="Stop arms surely that much slower than the control; none: do not.")
    ] = None,
    sticky: Annotated[bool, typer.Option(help="Same session, user or key, same arm.")] = True,
    url: Url = _URL,
    admin_key: Key = None,
) -> None:
    """Start an experiment."""
    body: dict[str, Any] = {"name": name, "arms": [_arm(text) for text in arm], "mode": mode, "sticky": sticky}
    if control is not None:
        body["control"] = control
    if guard is not None:
        body["guard"] = None if guard == "none" else _number("--guard", guard)
    _say(_call("POST", url, admin_key, "", body))


@experiments.command("stop")
def stop(name: Name, url: Url = _URL, admin_key: Key = None) -> None:
    """End an experiment; requests get the default schedule again."""
    _say(_call("POST", url, admin_key, f"/{_path(name)}/stop", {}))


@experiments.command("weights")
def weights(
    name: Name,
    weight: Annotated[list[str], typer.Argument(metavar="ARM=WEIGHT…")],
    url: Url = _URL,
    admin_key: Key = None,
) -> None:
    """Change arms' weights; the others keep theirs."""
    parts = [text.rpartition("=") for text in weight]
    changed = {arm: _number("ARM=WEIGHT", value) for arm, _, value in parts}
    _say(_call("POST", url, admin_key, f"/{_path(name)}/weights", {"weights": changed}))


@experiments.command("promote")
def promote(
    name: Name,
    arm: Annotated[str | None, typer.Option(help="The arm. Default: the winner.")] = None,
    url: Url = _URL,
    admin_key: Key = None,
) -> None:
    """Make an arm's schedule the server's default; ends the experiment."""
    _say(_call("POST", url, admin_key, f"/{_path(name)}/promote", {} if arm is None else {"arm": arm}))


@experiments.command("report")
def report(name: Name, url: Url = _URL, admin_key: Key = None, as_json: Json = False) -> None:
    """What is known of each arm, with intervals that hold however often one looks."""
    one = _call("GET", url, admin_key, f"/{_path(name)}")
    if as_json:
        typer.echo(json.dumps(one))
        return
    rows = [
        (
            arm["name"],
            str(arm["num_requests"]),
            str(arm["num_output_tokens"]),
            _interval(arm["tokens_per_s"]),
            _interval(arm["time_to_first_token_s"], 1000),
            _interval(arm["time_per_output_token_s"], 1000),
            _interval(arm["tau_per_answer"]),
            _figure(arm["delta"]),
        )
        for arm in one["report"]["arms"]
    ]
    columns = ("arm", "requests", "tokens", "tokens/s", "first token, ms", "per token, ms", "tau", "delta")
    _table(f"{name}, {one['state']}, intervals of {one['report']['confidence']:.0%}", columns, rows)
    enough = all(arm["enough"] for arm in one["report"]["arms"])
    for other in one["report"]["differences"]:
        verdict = "decided" if other["decided"] else "open" if enough else "too few requests for these bounds to hold"
        typer.echo(f"{other['arm']} against {other['against']}: {_interval(other['tokens_per_s'], 100)} % tokens/s, {verdict}")
    typer.echo(f"winner: {one['winner'] or 'none yet'}")


def _arm(text: str) -> dict[str, Any]:
    """An arm from NAME=SCHEDULE[:BUDGET][@WEIGHT]."""
    name, equals, rest = text.partition("=")
    rest, at, weight = rest.partition("@")
    schedule, colon, budget = rest.partition(":")
    if not (name and equals and schedule):
        fail(f"--arm {text}: write NAME=SCHEDULE[:BUDGET][@WEIGHT]")
    arm: dict[str, Any] = {"name": name, "schedule": schedule}
    if colon:
        if not budget.isdecimal():
            fail(f"--arm {text}: the budget must be a whole number, not {budget!r}")
        arm["budget"] = int(budget)
    if at:
        arm["weight"] = _number(f"--arm {text}", weight)
    return arm


def _path(name: str) -> str:
    return urllib.parse.quote(name, safe="")


def _number(what: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        fail(f"{what}: {text!r} is not a number")


def _call(method: str, url: str, key: str | None, path: str, body: object = None) -> Any:
    """The server's JSON answer, or the end of the program with its complaint."""
    key = key or os.environ.get(f"{ENV_PREFIX}ADMIN_KEY")
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    if not url.startswith(("http://", "https://")):
        fail(f"--url {url}: must begin with http:// or https://")
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{url.rstrip('/')}/admin/experiments{path}", data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            fail(_complaint(error))
    except (OSError, ValueError) as error:
        fail(f"{url}: {getattr(error, 'reason', None) or error}")


def _complaint(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{error.url} answered with status {error.code}"


def _say(one: dict[str, Any]) -> None:
    arms = ", ".join(f"{arm['name']} ({arm['schedule']}) {arm['share']:.0%}" for arm in one["arms"])
    typer.echo(f"{one['name']}: {one['state']}; {arms}")


def _interval(interval: dict[str, float] | None, scale: float = 1.0) -> str:
    if interval is None:
        return "-"
    return f"{interval['estimate'] * scale:.3g} ({interval['low'] * scale:.3g} to {interval['high'] * scale:.3g})"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _table(title: str, columns: tuple[str, ...], rows: Sequence[Sequence[str]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, width=None if sys.stdout.isatty() else 200).print(table)
