"""What ties the calls of one caller together."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from starlette.datastructures import Headers

from app.experiments.live import Experiments
from app.stickiness import stickiness_key
from tests.http_engine import Server, serve


def key(session: str | None = None, user: str | None = None, api_key: str | None = None) -> str | None:
    """The key of a call."""
    headers = Headers({} if session is None else {"x-session-id": session})
    return stickiness_key(headers, SimpleNamespace(user=user), api_key)


def test_session_goes_before_user_before_key() -> None:
    """An application with one API key and many users must not have all of them on one side."""
    assert key("s", "u", "k") == key("s", None, None) == key("s", "other", "other")
    assert key(None, "u", "k") == key(None, "u", None)
    assert key(None, None, "k") is not None
    assert key() is None
    assert key("", "", "") is None
    assert key("", "u") == key(None, "u")


def test_keys_tell_callers_apart_and_are_the_same_tomorrow() -> None:
    """A hash that changed with the process would move everybody at each restart."""
    same = "same"
    keys = [key(same), key(None, same), key(None, None, same), key("other"), key(None, "sam\ud800e")]
    assert len(set(keys)) == 5
    assert all(k is not None and len(k) == 32 and set(k) <= set("0123456789abcdef") for k in keys)
    assert key("same") == "169506cf470d1251011eda4996e78bb1"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_traffic_is_divided_by_it(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All calls of a caller go one way; a key counts only where keys are asked for."""
    seen: list[str | None] = []

    def asked(server: Server, headers: dict[str, str], **extra: object) -> str | None:
        body = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
        assert server.client.post(path, json={**body, "max_tokens": 1, **extra}, headers=headers).status_code == 200
        return seen.pop()

    monkeypatch.setattr(Experiments, "assign", lambda self, sticky, salt: seen.append(sticky))
    with serve(api_keys=["a-key-to-stick-to"]) as server:
        known = {"Authorization": "Bearer a-key-to-stick-to"}
        assert asked(server, known) == key(api_key="a-key-to-stick-to")
        assert asked(server, known, user="ann") == key(user="ann")
        assert asked(server, {**known, "X-SESSION-ID": "s1"}, user="ann", n=3) == key("s1")
    with serve() as server:
        assert asked(server, {"Authorization": "Bearer EMPTY"}) is None  # what clients send that must send something
