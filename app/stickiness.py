"""What ties the calls of one caller together, for whoever divides traffic and must not send a caller back and forth.

The first of these that is there: the header ``X-Session-Id``, the body's ``user``, the API key. What comes out is a hash, so
that it can be stored or compared without holding a name, a session or a key; equal input gives equal output on every
server and after every restart.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Protocol

SESSION_HEADER = "X-Session-Id"


class HasUser(Protocol):
    """A body that may name its caller."""

    @property
    def user(self) -> str | None: ...


def stickiness_key(headers: Mapping[str, str], body: HasUser, api_key: str | None) -> str | None:
    """32 hexadecimal digits, or None for a caller of whom nothing is known. `headers` must not mind upper and lower case."""
    for kind, value in (("session", headers.get(SESSION_HEADER)), ("user", body.user), ("key", api_key)):
        if value:
            return blake2b(f"{kind}:{value}".encode("utf-8", "surrogatepass"), digest_size=16, person=b"sticky").hexdigest()
    return None
