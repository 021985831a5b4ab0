"""What ties the calls of one caller together, down to the requests that the engine gets."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from starlette.datastructures import Headers

from app.stickiness import stickiness_key
from tests.http_engine import serve


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
def test_every_request_of_a_call_carries_it(path: str) -> None:
    """All answers of a call go one way."""
    with serve(api_keys=["a-key-to-stick-to"]) as server:
        server.client.headers["Authorization"] = "Bearer a-key-to-stick-to"
        body = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
        for extra, headers, want in (
            ({}, {}, key(api_key="a-key-to-stick-to")),
            ({"user": "ann"}, {}, key(user="ann")),
            ({"user": "ann", "n": 3}, {"X-SESSION-ID": "s1"}, key("s1")),
        ):
            server.engine.reset()
            assert server.client.post(path, json={**body, "max_tokens": 1, **extra}, headers=headers).status_code == 200
            assert {request.stickiness_key for request in server.engine.submitted} == {want}
    with serve() as server:
        server.client.headers["Authorization"] = "Bearer EMPTY"  # what clients send that must send something
        server.complete(max_tokens=1)
        assert server.engine.submitted[0].stickiness_key is None
