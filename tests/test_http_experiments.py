"""Experiments over HTTP: the admin API and who may use it, what answers say, what is counted, and the command."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from starlette.datastructures import Headers
from typer.testing import CliRunner

from app.admin_access import is_local
from app.cli import application
from app.serving import LoadedEngine
from tests.engine_world import World
from tests.http_engine import ScriptedEngine, Server, serve, until

KEY = "0123456789abcdef"
ARMS = [{"name": "control", "schedule": "ar"}, {"name": "tree", "schedule": "graft", "budget": 5}]


@pytest.fixture(scope="module", name="running")
def _running() -> Iterator[Server]:
    with serve() as server:
        yield server


@pytest.fixture
def server(running: Server) -> Iterator[Server]:
    """A server on which nothing runs."""
    running.engine.reset()
    yield running
    name = admin(running, "GET")["running"]
    if name is not None:
        admin(running, "POST", f"/{name}/stop")


def call(server: Server, method: str, path: str = "", body: Any = None, **options: Any) -> Any:
    return server.client.request(method, f"/admin/experiments{path}", json=body, **options)


def admin(server: Server, method: str, path: str = "", body: Any = None, **options: Any) -> dict[str, Any]:
    response = call(server, method, path, body, **options)
    assert response.status_code == 200, response.text
    return response.json()


def start(server: Server, name: str, **options: Any) -> dict[str, Any]:
    return admin(server, "POST", "", {"name": name, "arms": ARMS, **options})


def counted(server: Server, name: str) -> int:
    return sum(arm["num_requests"] for arm in admin(server, "GET", f"/{name}")["report"]["arms"])


def test_an_answer_names_its_arm_and_is_decoded_by_it(server: Server) -> None:
    """Who compares speeds on the client's side must know which arm an answer had."""
    plain = server.complete(max_tokens=9)
    assert "x-graft-arm" not in plain.headers
    assert plain.json()["metrics"]["graft"]["arm"] is None
    start(server, "named")
    seen = set()
    for number in range(16):
        answer = server.client.post("/v1/completions", json={"prompt": "hi", "temperature": 0, "user": f"u{number}"})
        graft = answer.json()["metrics"]["graft"]
        assert (answer.headers["x-graft-experiment"], answer.headers["x-graft-arm"]) == ("named", graft["arm"])
        assert graft["experiment"] == "named"
        assert (graft["schedule"], graft["budget"]) == {"control": ("ar", 1), "tree": ("graft", 5)}[graft["arm"]]
        assert answer.json()["choices"] == server.complete(speculative={"enabled": False}).json()["choices"]
        seen.add(graft["arm"])
    assert seen == {"control", "tree"}
    assert {request.arm for request in server.engine.submitted} == {"", "named/control", "named/tree"}


def test_a_stream_names_its_arm_too(server: Server) -> None:
    """Most clients stream."""
    start(server, "streamed")
    body = {"prompt": "hi", "stream": True, "temperature": 0}
    with server.client.stream("POST", "/v1/completions", json=body, headers={"X-Session-Id": "s1"}) as response:
        events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
        arm = response.headers["x-graft-arm"]
    assert events[-1]["metrics"]["graft"]["arm"] == arm
    assert counted(server, "streamed") == 1


def test_the_same_session_gets_the_same_arm_and_all_choices_of_a_call_share_it(server: Server) -> None:
    """Else a conversation would jump between speeds, and one answer's metrics would mix two schedules."""
    start(server, "sticky")
    for session in ("a", "b", "c", "d"):
        got = {server.client.post("/v1/completions", json={"prompt": "x", "user": str(n)}, headers={"X-Session-Id": session})
               .headers["x-graft-arm"] for n in range(4)}
        assert len(got) == 1
    before = counted(server, "sticky")
    server.complete(n=3)
    assert counted(server, "sticky") == before + 3
    arms = {request.arm for request in server.engine.submitted[-3:]}
    assert len(arms) == 1
    report = admin(server, "GET", "/sticky")["report"]["arms"]
    assert sum(arm["num_units"] for arm in report) <= 5, "three answers to one call are one unit"


@pytest.mark.parametrize("asked", [{"schedule": "chain"}, {"budget": 3}, {"enabled": False}, {"enabled": True}])
def test_a_request_that_says_how_to_draft_is_obeyed_and_not_counted(asked: dict[str, Any], server: Server) -> None:
    """It would bring into an arm what the arm did not do."""
    start(server, f"open-{'-'.join(asked)}-{str(next(iter(asked.values()))).lower()}", arms=[
        {"name": "a", "schedule": "ar"}, {"name": "b", "schedule": "ar"}])
    name = admin(server, "GET")["running"]
    answer = server.complete(speculative=asked)
    schedule = {"schedule": "chain", "budget": "graft", "enabled": "graft" if asked.get("enabled") else "ar"}[next(iter(asked))]
    assert answer.json()["metrics"]["graft"]["schedule"] == schedule
    assert "x-graft-arm" not in answer.headers
    assert counted(server, name) == 0
    assert server.complete(speculative={}).headers["x-graft-experiment"] == name, "an empty object says nothing"
    assert counted(server, name) == 1


def test_a_refused_request_and_an_aborted_one_do_not_spoil_the_figures(server: Server) -> None:
    """Only whole answers have a speed; the abort is counted as such."""
    start(server, "spoiled")
    assert server.complete(top_p=-1).status_code == 400
    assert counted(server, "spoiled") == 0
    server.engine.pace_s = 0.02
    with server.client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True, "max_tokens": 60}) as response:
        next(response.iter_lines())
    until(lambda: counted(server, "spoiled") == 1)
    arms = admin(server, "GET", "/spoiled")["report"]["arms"]
    assert (sum(arm["num_aborted"] for arm in arms), sum(arm["num_timed"] for arm in arms)) == (1, 0)


def test_a_report_says_what_requests_did(server: Server) -> None:
    """The scripted engine emits three tokens a step with two forwards, or one with none."""
    start(server, "told", sticky=False)
    for _ in range(24):
        server.complete(max_tokens=30)
    one = admin(server, "GET", "/told")
    for arm, tau, delta in zip(one["report"]["arms"], (1, 3), (0, 2), strict=True):
        assert (arm["tau"], arm["delta"], arm["num_output_tokens"]) == (tau, delta, 30 * arm["num_requests"])
        assert arm["tau_per_answer"]["low"] <= arm["tau_per_answer"]["estimate"] == pytest.approx(tau)
        for figure in ("tokens_per_s", "time_to_first_token_s", "time_per_output_token_s"):
            assert 0 < arm[figure]["low"] < arm[figure]["estimate"] < arm[figure]["high"]
        rate, per_token = arm["tokens_per_s"], arm["time_per_output_token_s"]
        assert per_token["low"] == pytest.approx(1 / rate["high"])
        assert not arm["enough"]
    (difference,) = one["report"]["differences"]
    assert (difference["arm"], difference["against"], difference["decided"]) == ("tree", "control", False)
    public = server.client.get("/v1/experiments").json()["data"][0]
    assert (public["name"], public["arms"][0]["tokens_per_s"]) == ("told", one["report"]["arms"][0]["tokens_per_s"])
    assert set(public) == {"name", "state", "control", "winner", "arms", "differences"}


def test_a_promotion_changes_what_requests_get_without_a_restart(server: Server) -> None:
    """The end of an experiment that found something."""
    start(server, "promoted")
    assert call(server, "POST", "/promoted/promote").status_code == 400, "there is no winner yet"
    done = admin(server, "POST", "/promoted/promote", {"arm": "tree"})
    assert (done["state"], done["promoted"]) == ("promoted", "tree")
    graft = server.complete().json()["metrics"]["graft"]
    assert (graft["schedule"], graft["budget"], graft["arm"]) == ("graft", 5, None)
    assert server.complete(speculative={"schedule": "graft"}).json()["metrics"]["graft"]["budget"] == 8
    assert admin(server, "GET")["default"] == {
        "schedule": "graft", "budget": 5, "promoted_by": {"experiment": "promoted", "arm": "tree"}}
    admin(server, "POST", "/promoted/promote", {"arm": "control"})
    assert server.complete().json()["metrics"]["graft"]["schedule"] == "ar"
    listed = server.client.get("/v1/schedules").json()["data"]
    assert [one["name"] for one in listed if one["default"]] == ["ar"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("", {"name": "x", "arms": ARMS[:1]}, 400, "arms"),
        ("", {"name": "x", "arms": [ARMS[0], {"name": "b", "schedule": "none"}]}, 400, "arms[1].schedule"),
        ("", {"name": "x", "arms": ARMS, "colour": "red"}, 400, "colour"),
        ("", {"name": "x", "arms": ARMS, "mode": "random"}, 400, "mode"),
        ("", {"name": "X!", "arms": ARMS}, 400, "name"),
        ("/nothing/stop", None, 404, "name"),
        ("/nothing/weights", {"weights": {"a": 1}}, 404, "name"),
        ("/nothing/weights", {"weights": {}}, 400, "weights"),
    ],
)
def test_bad_calls_name_what_is_wrong(path: str, body: Any, status: int, param: str, server: Server) -> None:
    """In the API's own shape of errors."""
    response = call(server, "POST", path, body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param), response.text


def test_a_schedule_that_changes_the_text_can_not_be_an_arm() -> None:
    """Who asked for nothing must not get another text because somebody compares speeds."""
    engine = ScriptedEngine()
    engine.schedules["loose"] = dataclasses.replace(engine.schedules["chain"], name="loose", greedy_verifier="margin")
    with serve(engine) as server:
        response = call(server, "POST", "", {"name": "x", "arms": [ARMS[0], {"name": "b", "schedule": "loose"}]})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "arms[1].schedule")
        assert server.complete(speculative={"schedule": "loose"}).status_code == 200, "by its name it is still there"


def test_with_a_key_nothing_goes_without_it() -> None:
    """Weights are as good as the server's speed; whoever can change them can slow it down."""
    with serve(admin_key=KEY) as server:
        for method, path in (("GET", ""), ("POST", ""), ("GET", "/x"), ("POST", "/x/stop"), ("POST", "/x/weights"),
                             ("POST", "/x/promote")):
            for given in (None, "", "Bearer", "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY}x", "Bearer schlüssel".encode()):
                headers = {} if given is None else {"Authorization": given}
                assert call(server, method, path, {}, headers=headers).status_code == 401, (method, path, given)
        assert call(server, "GET", headers={"Authorization": f"Bearer {KEY}"}).status_code == 200
        assert server.client.get("/v1/experiments").status_code == 200


def test_without_a_key_only_this_machine_is_answered(server: Server) -> None:
    """A proxy and a browser are on this machine too, and speak for others."""
    assert call(server, "GET").status_code == 200
    for headers in ({"X-Forwarded-For": "127.0.0.1"}, {"Forwarded": "for=127.0.0.1"},
                    {"Origin": "http://evil.example"}, {"Origin": "null"}):
        response = call(server, "POST", "", {"name": "x", "arms": ARMS}, headers=headers)
        assert response.status_code == 403 and "admin_key" in response.json()["error"]["message"], headers
    here = Headers({"host": "localhost:8000"})
    assert not is_local("127.0.0.1", Headers({"host": "evil.example"})), "with API keys the edge does not look at it"
    assert is_local("127.0.0.1", here) and is_local("::1", Headers({"host": "[::1]:8000"}))
    assert is_local("127.0.0.1", Headers({"host": "localhost:8000", "origin": "http://localhost:8000"}))
    assert not any(is_local(peer, here) for peer in ("10.0.0.5", "8.8.8.8", None, "testclient"))


def test_the_key_is_not_printed() -> None:
    """`graftserve config` goes into bug reports."""
    shown = CliRunner().invoke(application(), ["config", "--admin-key", KEY]).stdout
    assert KEY not in shown and "admin_key is set" in shown
    assert KEY not in repr(SecretStr(KEY))


def test_the_state_folder_outlives_the_server(tmp_path: Path) -> None:
    """The whole way: settings, a server, another one."""
    with serve(state_dir=tmp_path) as server:
        start(server, "kept")
        arms = {user: server.complete(user=user).headers["x-graft-arm"] for user in "abcdefgh"}
    with serve(state_dir=tmp_path) as server:
        assert {user: server.complete(user=user).headers["x-graft-arm"] for user in "abcdefgh"} == arms
        assert counted(server, "kept") == 16
    seen: list[BaseException] = []
    (tmp_path / "file").write_text("")
    with serve(state_dir=tmp_path / "file", wait_ready=False, on_failure=seen.append):
        until(lambda: seen)
    assert "file" in str(seen[0])


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(application(), ["experiments", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_the_command_does_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody wants to write JSON at three in the morning."""
    monkeypatch.delenv("GRAFTSERVE_ADMIN_KEY", raising=False)
    with serve(admin_key=KEY) as server:
        at = ("--url", server.url)
        assert run("list", *at)[0] == 2
        monkeypatch.setenv("GRAFTSERVE_ADMIN_KEY", KEY)
        status, shown, _ = run("start", "cli", "--arm", "control=ar", "--arm", "tree=graft:5@3", "--guard", "none", *at)
        assert (status, shown) == (0, "cli: running; control (ar) 25%, tree (graft) 75%\n")
        for _ in range(20):
            server.complete(max_tokens=20)
        assert run("weights", "cli", "control=1", "tree=1", *at)[1] == "cli: running; control (ar) 50%, tree (graft) 50%\n"
        status, shown, _ = run("report", "cli", *at)
        assert status == 0 and "tokens/s" in shown and "winner: none yet" in shown
        assert json.loads(run("report", "cli", "--json", *at)[1])["guard"] is None
        assert run("stop", "cli", *at)[1].startswith("cli: stopped")
        assert run("promote", "cli", "--arm", "tree", *at)[1].startswith("cli: promoted")
        assert "default schedule: graft, promoted" in run("list", *at)[1]
        for arguments, word in (
            (("stop", "cli"), "ended"), (("stop", "none"), "no experiment"), (("start", "x", "--arm", "ar"), "NAME=SCHEDULE"),
            (("start", "x", "--arm", "a=ar:many"), "whole number"), (("weights", "cli", "tree"), "not a number"),
            (("list", "--admin-key", "wrong"), "admin key"), (("list", "--url", "ftp://x"), "http"),
        ):
            status, shown, complaint = run(*arguments, *(() if "--url" in arguments else at))
            assert (status, shown, complaint.count("\n")) == (2, "", 1) and word in complaint, complaint
    assert run("list", *at)[0] == 2


@pytest.mark.slow
def test_a_hundred_switches_under_eight_streams_change_no_text(tiny_model: Any) -> None:
    """What an experiment may never do. Real engine, real server, temperature 0; every way of switching takes part."""
    world = World(tiny_model(seed=3), small=tiny_model(seed=3), medium=tiny_model(seed=4))
    schedules = [name for name in world.schedules if name != "ar"]
    prompts = [f"stream number {number} says" for number in range(8)]
    wrong: list[tuple[str, str, str]] = []
    arms: set[str] = set()
    with serve(load=lambda: LoadedEngine(world.engine, world.tokenizer)) as server:  # type: ignore[arg-type]

        def text(prompt: str, **body: Any) -> tuple[str, str | None]:
            asked = {"prompt": prompt, "temperature": 0, "max_tokens": 24, "ignore_eos": True, "stream": True, **body}
            whole = ""
            with server.client.stream("POST", "/v1/completions", json=asked, timeout=60) as response:
                assert response.status_code == 200
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        whole += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
                return whole, response.headers.get("x-graft-arm")

        expected = {prompt: text(prompt, speculative={"enabled": False})[0] for prompt in prompts}
        assert text(prompts[0], temperature=1, seed=1)[0] != expected[prompts[0]], "the control: other text is seen"
        done = threading.Event()

        def keep_asking(prompt: str) -> None:
            while not done.is_set():
                got, arm = text(prompt)
                arms.add(arm or "none")
                if got != expected[prompt]:
                    wrong.append((prompt, arm or "none", got))

        streams = [threading.Thread(target=keep_asking, args=(prompt,)) for prompt in prompts]
        for stream in streams:
            stream.start()
        try:
            for number in range(25):
                one, other = (schedules[(2 * number + k) % len(schedules)] for k in (0, 1))
                made = [{"name": "control", "schedule": "ar"}, {"name": one, "schedule": one}]
                if other != one:
                    made.append({"name": other, "schedule": other, "budget": 4 + number % 9})
                admin(server, "POST", "", {"name": f"e{number}", "arms": made, "guard": None})
                time.sleep(0.05)
                admin(server, "POST", f"/e{number}/weights", {"weights": {"control": 0, one: 3}})
                time.sleep(0.05)
                admin(server, "POST", f"/e{number}/weights", {"weights": {"control": 2, one: 0}})
                admin(server, "POST", f"/e{number}/{'promote' if number % 2 else 'stop'}", {"arm": one} if number % 2 else {})
        finally:
            done.set()
            for stream in streams:
                stream.join(60)
        assert not wrong, wrong[:3]
        assert len(arms) >= 4, f"only {arms} were seen"
    world.check_books()
