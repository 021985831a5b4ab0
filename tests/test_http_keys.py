"""Who is let in: API keys, what needs none, web pages of other origins, and servers that must not be open to all."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from app.access import Keys, exposure_problem, is_loopback
from app.cli import application
from app.config import Settings, load_settings
from tests.http_engine import Server, alphabet, serve

ROOT = Path(__file__).resolve().parent.parent
KEYS = ["first-key-of-two", "second-key-of-two"]
PAGE = "https://page.example"


@pytest.fixture(scope="module", name="locked")
def _locked() -> Iterator[Server]:
    with serve(api_keys=KEYS, cors_origins=[PAGE]) as server:
        yield server


def post(server: Server, authorization: str | None, **headers: str) -> httpx.Response:
    """A completion with that header."""
    given = headers if authorization is None else {"Authorization": authorization, **headers}
    return server.client.post("/v1/completions", json={"prompt": "hi", "temperature": 0, "max_tokens": 3}, headers=given)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("scheme", ["Bearer ", "bearer ", "Bearer   "])
def test_each_key_opens_the_door(locked: Server, scheme: str, key: str) -> None:
    """Keys are renewed by serving the old and the new one for a while; the scheme's case means nothing."""
    assert post(locked, scheme + key).json()["choices"][0]["text"] == alphabet(3)


WRONG = [None, "", "Bearer", f"Basic {KEYS[0]}", KEYS[0], "Bearer first-key-of-tw", "Bearer first-key-of-two2",
         "Bearer FIRST-KEY-OF-TWO", "Bearer first-key-of-two second-key-of-two", "Bearer \xff\xfe", "Bearer " + "x" * 10_000]


@pytest.mark.parametrize("authorization", WRONG)
def test_everything_else_is_a_401_of_the_apis_form(locked: Server, authorization: str | None) -> None:
    """And says by which scheme to ask, without repeating what was sent."""
    headers = {} if authorization is None else {"Authorization": authorization.encode("latin-1")}
    response = locked.client.post("/v1/completions", json={"prompt": "hi"}, headers=headers)  # type: ignore[arg-type]
    assert response.status_code == 401
    assert response.headers["www-authenticate"].startswith("Bearer")
    error = response.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_api_key", None)
    assert "first-key" not in response.text and "xxx" not in response.text


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/health", 200),
        ("HEAD", "/health", 200),
        ("GET", "/metrics", 200),
        ("GET", "/docs", 200),
        ("GET", "/openapi.json", 200),
        ("GET", "/v1/models", 401),
        ("GET", "/v1/models/toy/scripted", 401),
        ("GET", "/v1/schedules", 401),
        ("POST", "/tokenize", 401),
        ("POST", "/detokenize", 401),
        ("POST", "/v1/chat/completions", 401),
        ("GET", "/nowhere", 401),
        ("GET", "/health/", 401),
        ("GET", "//health", 401),
        ("GET", "/%68ealth/x", 401),
        ("OPTIONS", "/v1/completions", 401),
    ],
)
def test_only_probes_and_the_description_need_no_key(locked: Server, method: str, path: str, status: int) -> None:
    """What is not named as open is closed, paths of tomorrow included."""
    assert locked.client.request(method, httpx.URL(locked.url + path)).status_code == status


def test_a_call_without_key_costs_nothing(locked: Server) -> None:
    """It is refused before its body is read, or strangers could fill the memory."""
    locked.engine.reset()
    assert locked.client.post("/v1/completions", content=b"x" * 9_000_000).status_code == 401
    assert locked.engine.submitted == []


def test_the_openai_client_meets_its_own_exception(locked: Server) -> None:
    """Applications catch AuthenticationError, nothing else."""
    with openai.OpenAI(base_url=f"{locked.url}/v1", api_key="wrong-key", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
    with openai.OpenAI(base_url=f"{locked.url}/v1", api_key=KEYS[1]) as client:
        assert client.completions.create(model="toy/scripted", prompt="x", max_tokens=2, temperature=0).choices[0].text == "ab"


def test_refusals_are_counted_and_metrics_can_be_closed_too() -> None:
    """Someone who tries keys must be seen on the board; the board itself may be nobody's business."""
    with serve(api_keys=KEYS, metrics_auth=True) as server:
        post(server, "Bearer wrong-key")
        assert server.client.get("/metrics").status_code == 401
        page = server.client.get("/metrics", headers={"Authorization": f"Bearer {KEYS[0]}"})
        assert 'graftserve_request_errors_total{status="401"} 1.0' in page.text


def test_every_key_is_compared_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison that ends at the first difference, or a loop that ends at the first match, tells keys by its time."""
    seen: list[tuple[int, int]] = []

    def compare(a: bytes, b: bytes) -> bool:
        seen.append((len(a), len(b)))
        return a == b

    monkeypatch.setattr("app.access.hmac.compare_digest", compare)
    assert Keys(KEYS).check(f"Bearer {KEYS[0]}") == KEYS[0]
    assert seen == [(32, 32)] * 2


def test_a_page_of_a_listed_origin_may_call_with_its_key(locked: Server) -> None:
    """The preflight brings no key and must pass; errors must be readable for the page too."""
    asked = {"Origin": PAGE, "Access-Control-Request-Method": "POST",
             "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os"}
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
        preflight = locked.client.options(path, headers=asked)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == PAGE
        assert "POST" in preflight.headers["access-control-allow-methods"]
        assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
    for authorization, status in ((f"Bearer {KEYS[0]}", 200), ("Bearer no-such-key", 401)):
        response = post(locked, authorization, Origin=PAGE)
        assert response.status_code == status
        assert response.headers["access-control-allow-origin"] == PAGE
    too_large = locked.client.post("/v1/completions", content=b"x" * 9_000_000,
                                   headers={"Origin": PAGE, "Authorization": f"Bearer {KEYS[0]}"})
    assert (too_large.status_code, too_large.headers["access-control-allow-origin"]) == (413, PAGE)


def test_other_origins_get_no_leave(locked: Server) -> None:
    """Neither by name nor by likeness, and none at all where nothing is set."""
    ask = {"Access-Control-Request-Method": "POST"}
    for origin in ("https://evil.example", PAGE + ".evil.example", PAGE.replace("https", "http"), "null"):
        preflight = locked.client.options("/v1/completions", headers={"Origin": origin, **ask})
        assert preflight.status_code == 400
        assert "access-control-allow-origin" not in preflight.headers
    with serve() as server:
        response = server.client.options("/v1/completions", headers={"Origin": PAGE, **ask})
        assert response.status_code == 405
        assert "access-control-allow-origin" not in server.client.get("/v1/models", headers={"Origin": PAGE}).headers


@pytest.mark.parametrize(
    ("host", "is_safe"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("127.8.9.1", True), ("::ffff:127.0.0.1", True),
     ("0.0.0.0", False), ("::", False), ("192.0.2.7", False), ("no-such-host.invalid", False)],
)
def test_a_server_for_other_machines_needs_keys_or_leave(host: str, is_safe: bool) -> None:
    """One forgotten option must not hand the machine to the whole network."""
    assert is_loopback(host) == is_safe
    assert (exposure_problem(Settings(host=host)) is None) == is_safe
    assert exposure_problem(Settings(host=host, api_keys=KEYS)) is None
    assert exposure_problem(Settings(host=host, allow_keyless=True)) is None


def test_the_refusal_is_one_line_with_the_remedies() -> None:
    """Before the models are loaded, and before the port is taken."""
    command = [sys.executable, "-m", "app", "serve", "--host", "0.0.0.0", "--port", "0", "--target", "/no/such/model"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert all(word in line for word in ("0.0.0.0", "api_keys", "--allow-keyless", "127.0.0.1"))


def test_keys_come_from_every_source_and_are_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`graftserve config` ends up in bug reports, and a hidden key must not be taken for a key when it is read back."""
    file = tmp_path / "settings.toml"
    file.write_text(f"api_keys = {json.dumps(KEYS)}\n")

    def shown(*arguments: str) -> str:
        result = CliRunner().invoke(application(), ["config", *arguments])
        assert result.exit_code == 0, result.output
        return result.output

    outputs = [shown("--config", str(file)), shown("--api-keys", ",".join(KEYS))]
    monkeypatch.setenv("GRAFTSERVE_API_KEYS", json.dumps(KEYS))
    outputs.append(shown())
    monkeypatch.setenv("GRAFTSERVE_API_KEYS", " , ".join(KEYS))
    outputs.append(shown())
    assert len(set(outputs)) == 1
    assert "# api_keys has 2, and not shown" in outputs[0].splitlines()
    assert not any(word in outputs[0] for word in ("first-key", "second-key", "****"))
    settings = load_settings()
    assert [key.get_secret_value() for key in settings.api_keys] == KEYS
    assert "first-key" not in repr(settings)


@pytest.mark.parametrize("bad", ["short", "with space inside", "umläut-key", "**********"])
def test_a_bad_key_is_refused_without_being_shown(bad: str) -> None:
    """The complaint goes to a log; the key in it may be one letter from a good one."""
    result = CliRunner().invoke(application(), ["config", "--api-keys", f"{bad},{KEYS[0]}"])
    assert result.exit_code == 2
    assert "api_keys" in result.output
    assert bad not in result.output and "first-key" not in result.output


@pytest.mark.parametrize("bad", ["page.example", "https://page.example/", "https://page.example/path", "*.example"])
def test_an_origin_that_can_match_nothing_is_refused(bad: str) -> None:
    """Browsers send scheme, name and port, nothing else: the setting would be dead."""
    with pytest.raises(ValidationError, match="cors_origins"):
        Settings(cors_origins=[bad])


def test_keys_never_reach_the_log(locked: Server, caplog: pytest.LogCaptureFixture) -> None:
    """Nor in the URL, for a client that sends them there."""
    with caplog.at_level(logging.DEBUG):
        post(locked, f"Bearer {KEYS[0]}")
        post(locked, "Bearer almost-right-key")
        locked.client.get("/v1/models?api_key=key-in-the-query")
    lines = [record.getMessage() for record in caplog.records if record.name.startswith(("app", "engine"))]
    assert sum("/v1/completions" in line for line in lines) == 2
    assert not any(word in line for line in lines for word in (KEYS[0], "almost-right-key", "key-in-the-query"))


def test_settings_of_lists_take_text_and_lists() -> None:
    """As the command line, the environment and the file have them."""
    for given in ("https://a.example, https://b.example", '["https://a.example", "https://b.example"]'):
        values: dict[str, Any] = {"cors_origins": given}
        assert load_settings(None, values).cors_origins == ("https://a.example", "https://b.example")
    assert load_settings(None, {"cors_origins": ""}).cors_origins == ()


OWN = ["localhost", "LOCALHOST:8000", "app.localhost", "127.0.0.1:1", "127.9.9.9", "[::1]:8000", "localhost."]
STRANGE = ["evil.example", "evil.example:8000", "localhost.evil.example", "10.0.0.7", "[fe80::1]:8", "127.0.0.1.evil.example"]


@pytest.mark.parametrize("host", OWN)
def test_a_server_without_keys_answers_to_names_of_this_machine(host: str) -> None:
    """However a client, a tunnel or a container spells them."""
    with serve() as server:
        assert server.client.get("/v1/models", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", STRANGE)
def test_a_page_whose_name_was_made_to_point_here_gets_nothing(host: str, locked: Server) -> None:
    """The browser sends such a page's calls as its own origin's, so CORS is no help; with keys the page would need one."""
    with serve() as server:
        for path in ("/v1/models", "/", "/metrics", "/admin/experiments"):
            response = server.client.get(path, headers={"Host": host})
            assert response.status_code == 400 and response.json()["error"]["message"].startswith("Host: ")
        assert post(server, None, Host=host).status_code == 400
    assert post(locked, f"Bearer {KEYS[0]}", Host=host).status_code == 200
    with serve(allow_keyless=True) as server:
        assert server.client.get("/v1/models", headers={"Host": host}).status_code == 200
