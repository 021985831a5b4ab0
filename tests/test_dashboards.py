"""The dashboards against a real Prometheus that scrapes a real service: every panel shows something."""

from __future__ import annotations

import json
import math
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from app.metrics import Metrics
from tests.http_engine import Server, until
from tests.real_service import serve_toy
from tests.required_tools import required_tool
from tests.test_engine_auto import FREE, prices

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
BOARDS = {path.stem: json.loads(path.read_text()) for path in sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))}
VARIABLES = {"$__rate_interval": "8s", "$schedule": ".*", "$arm": ".*"}

EMPTY_UNTIL = {
    ("ab-schedules", "Fallbacks"): "a schedule has failed",
    ("service", "Fallbacks"): "a schedule has failed",
    ("service", "Alerts"): "an alert is pending",
}
"""Panels that have nothing to show while all is well; their queries must be valid all the same."""


@dataclass(frozen=True)
class Target:
    """One query of one panel."""

    board: str
    panel: str
    expr: str

    def __str__(self) -> str:
        return f"{self.board}: {self.panel}"

    @property
    def query(self) -> str:
        """The expression as Grafana would send it."""
        expr = self.expr
        for name, value in VARIABLES.items():
            expr = expr.replace(name, value)
        assert "$" not in expr, expr
        return expr


TARGETS = [
    Target(name, panel["title"], target["expr"])
    for name, board in BOARDS.items()
    for panel in board["panels"]
    for target in panel.get("targets", [])
]


class Prometheus:
    """A server of our own on a free port, with the project's rules and short intervals."""

    def __init__(self, folder: Path, scraped: str) -> None:
        self.program = required_tool("prometheus", "prometheus")
        config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(DEPLOY / "prometheus" / "rules.yml")]
        config["scrape_configs"] = [{"job_name": "graftserve", "static_configs": [{"targets": [scraped]}]}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self.log = (folder / "log").open("w+")
        self.process = subprocess.Popen(
            [
                self.program,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                "--web.listen-address=127.0.0.1:0",
                "--log.format=json",
            ],
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )

    def url(self) -> str:
        """Where it listens, from its log; the port was its own choice."""
        found: list[str] = []

        def listening() -> bool:
            assert self.process.poll() is None, self.text()
            found.extend(re.findall(r'"address":"(127\.0\.0\.1:[1-9]\d*)"', self.text()))
            return bool(found) and "Server is ready" in self.text()

        until(listening, within_s=20)
        return f"http://{found[0]}"

    def text(self) -> str:
        return Path(self.log.name).read_text()

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(10)
        self.log.close()


@pytest.fixture(scope="module", name="prometheus")
def _prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    required_tool("prometheus", "prometheus")
    over = threading.Event()
    costs = tmp_path_factory.mktemp("costs") / "costs.json"
    costs.write_text(prices(FREE).costs.profile.to_json())
    toy = tmp_path_factory.mktemp("toy")
    # One schedule is left to prices, so that these are on the boards; the clock of a toy would end all drafting of the others.
    priced = {"priced": {"policy": "talon", "plan": "M*", "auto": True}}
    with serve_toy(toy, max_num_seqs=4, budget=8, define=priced, costs=str(costs), tune_talon=True) as server:
        program = Prometheus(tmp_path_factory.mktemp("prometheus"), server.url.removeprefix("http://"))
        load = threading.Thread(target=_load, args=(server, over))
        try:
            load.start()
            with httpx.Client(base_url=program.url(), timeout=10) as client:
                until(lambda: _recorded(client), within_s=25)
                time.sleep(4)  # rates of rates, and a few scrapes more
                yield client
        finally:
            over.set()
            load.join(20)
            program.stop()
    assert not load.is_alive()


def _load(server: Server, over: threading.Event) -> None:
    """Requests of every schedule and of an experiment, and some mistakes, until told to stop."""
    arms = [{"name": "plain", "schedule": "ar"}, {"name": "grafted", "schedule": "treegraft"}]
    # A toy's target is as cheap as its drafters: a guard would end the grafted arm as soon as it is sure of that.
    experiment = {"name": "trial", "arms": arms, "guard": None}
    assert server.client.post("/admin/experiments", json=experiment).status_code == 200
    schedules = [entry["name"] for entry in server.client.get("/v1/schedules").json()["data"]]
    with httpx.Client(base_url=server.url, timeout=20) as client:
        while not over.is_set():
            for schedule in schedules:
                body = {"prompt": ["one two one two one two", "x"], "max_tokens": 6, "temperature": 0}
                client.post("/v1/completions", json={**body, "speculative": {"schedule": schedule}})
                client.post("/v1/completions", json=body)
                client.post("/v1/completions", json={**body, "top_p": -1})


def _recorded(client: httpx.Client) -> bool:
    """Whether the last recording rule has something on every schedule that drafts."""
    return len(ask(client, "graftserve:first_draft_acceptance:halfwidth5m >= 0")) >= 4


def ask(client: httpx.Client, query: str) -> list[float]:
    """The finite values of an instant query."""
    answer = client.get("/api/v1/query", params={"query": query}).json()
    assert answer["status"] == "success", f"{query}: {answer.get('error')}"
    result: list[dict[str, Any]] = answer["data"]["result"]
    return [float(one["value"][1]) for one in result if math.isfinite(float(one["value"][1]))]


def test_every_panel_has_data(prometheus: httpx.Client) -> None:
    """A panel with a misspelled label looks like a quiet service."""
    empty = []
    for target in TARGETS:
        values = ask(prometheus, target.query)
        if not values and (target.board, target.panel) not in EMPTY_UNTIL:
            empty.append(f"{target}: {target.query}")
    assert not empty, "\n".join(empty)


def test_a_query_of_something_that_does_not_exist_is_seen(prometheus: httpx.Client) -> None:
    """Negative control: the check above must be able to fail."""
    assert not ask(prometheus, 'rate(graftserve_spec_decode_num_steps_total{schedule="no such"}[8s])')
    with pytest.raises(AssertionError, match="parse error"):
        ask(prometheus, "sum by (schedule (up)")


def test_figures_agree_with_each_other(prometheus: httpx.Client) -> None:
    """tau of plain decoding is 1, and nobody accepts more than was drafted."""
    assert ask(prometheus, 'graftserve:tokens_per_step:mean5m{schedule="ar", arm=""}') == [1.0]
    assert ask(prometheus, 'graftserve:tokens_per_step:halfwidth5m{schedule="ar", arm=""}') == [0.0]
    assert max(ask(prometheus, 'graftserve:tokens_per_step:mean5m{schedule="chain-medium"}')) > 1
    assert all(0 <= value <= 1 for value in ask(prometheus, "graftserve:first_draft_acceptance:ratio5m"))
    assert all(value <= 1.001 for value in ask(prometheus, 'graftserve:speedup_bound:ratio5m{schedule="ar"}'))


def test_arms_are_told_apart(prometheus: httpx.Client) -> None:
    """A board that adds up the arms compares nothing."""
    for arm, figure in (("trial/plain", "== 1"), ("trial/grafted", "> 1")):
        until(lambda arm=arm, figure=figure: ask(prometheus, f'graftserve:tokens_per_step:mean5m{{arm="{arm}"}} {figure}'))
    assert ask(prometheus, 'graftserve:tokens_per_step:halfwidth5m{arm="trial/grafted"} > 0')


def test_values_of_the_variables_are_there(prometheus: httpx.Client) -> None:
    """A drop-down without entries hides every panel below it."""
    for board in BOARDS.values():
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                match = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["definition"])
                assert match, variable["definition"]
                assert ask(prometheus, f"count by ({match[2]}) ({match[1]})")


@pytest.mark.parametrize("name", BOARDS)
def test_boards_can_be_provisioned(name: str) -> None:
    """Grafana drops a panel it does not understand, or two boards with one uid, without a word to the user."""
    board = BOARDS[name]
    assert board["uid"].startswith("graftserve-") and len({b["uid"] for b in BOARDS.values()}) == len(BOARDS)
    assert board["schemaVersion"] >= 39
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    source = {"type": "prometheus", "uid": "${datasource}"}
    assert board["templating"]["list"][0] == {
        "type": "datasource", "name": "datasource", "label": "Data source", "query": "prometheus", "current": {}, "hide": 0
    }
    cells: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        columns, rows = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        covered = set(product(columns, rows))
        assert place["x"] + place["w"] <= 24 and not covered & cells, f"{panel['title']} lies over another panel"
        cells |= covered
        if panel["type"] != "row":
            assert panel["datasource"] == source and panel["description"] and panel["title"]
            assert all(target["datasource"] == source for target in panel["targets"])


def test_boards_are_written_to_be_read() -> None:
    """A board in one line cannot be reviewed."""
    for path in (DEPLOY / "grafana" / "dashboards").glob("*.json"):
        assert path.read_text() == json.dumps(json.loads(path.read_text()), indent=2) + "\n"


def test_the_exceptions_are_panels() -> None:
    """An exception for a panel that was renamed would excuse another one later."""
    assert EMPTY_UNTIL.keys() <= {(target.board, target.panel) for target in TARGETS}


def test_boards_speak_of_every_kind_of_counter() -> None:
    """A counter that no board shows is looked at by nobody."""
    shown = set(re.findall(r"graftserve[_:][\w:]+", json.dumps(BOARDS)))
    rules = yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())["groups"][0]["rules"]
    recorded = {rule["record"]: set(re.findall(r"graftserve[_:][\w:]+", rule["expr"])) for rule in rules}
    for name, used in reversed(recorded.items()):
        if name in shown:
            shown |= used
    names = {family.collector.describe()[0].name for family in Metrics().collectors.families}
    missing = {name for name in names if not any(found.startswith(name) for found in shown)}
    assert missing <= {"graftserve_spec_decode_num_drafts"}, missing
