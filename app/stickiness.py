"""By what a caller is recognized, so that the same caller gets the same treatment: the arm of an experiment, for one."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

SESSION_HEADER = "X-Session-Id"


def stickiness_key(headers: Mapping[str, str], body: Any, api_key: str | None) -> str | None:
    """The session that the header names, else the user that the body names, else the API key, hashed; else None.

    Each kind has a prefix of its own, so that nobody's user name is another one's session. `body` has an attribute ``user``.
    """
    if session := headers.get(SESSION_HEADER):
        return f"session:{session}"
    if body.user:
        return f"user:{body.user}"
    return None if api_key is None else "key:" + blake2b(api_key.encode(), digest_size=16, person=b"stickiness").hexdigest()
