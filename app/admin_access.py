"""Who may use the admin API: whoever has the admin key; without such a key being set, programs on this machine.

"On this machine" is decided narrowly, since a browser and a reverse proxy are programs on this machine too: the peer's address
is a loopback one, the call was not forwarded, it names a loopback host, and it comes from no page of another site.
"""

from __future__ import annotations

from hmac import compare_digest
from urllib.parse import urlsplit

from fastapi import Depends
from pydantic import SecretStr
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest

from app.access import is_local_address, names_this_machine

_FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")


def require_admin(http: HttpRequest) -> None:
    """Raise HTTPException: 401 without the key, 403 without one being set and from elsewhere."""
    key: SecretStr | None = http.app.state.admin_key
    if key is None:
        if not is_local(http.client.host if http.client else None, http.headers):
            raise HTTPException(403, "The admin API answers this machine only, unless the setting admin_key is set.")
        return
    scheme, _, given = http.headers.get("authorization", "").partition(" ")
    # Compared as bytes, in a time that does not depend on where they differ.
    is_right = compare_digest(given.strip().encode(), key.get_secret_value().encode())
    if scheme.lower() != "bearer" or not is_right:
        raise HTTPException(401, "The admin API needs the admin key as a bearer token.", {"WWW-Authenticate": "Bearer"})


def is_local(peer: str | None, headers: Headers) -> bool:
    """Whether a call with these headers from this address was made by a program on this machine, on its own account."""
    if peer is None or not is_local_address(peer) or any(name in headers for name in _FORWARDED):
        return False
    host, origin = headers.get("host", ""), headers.get("origin")
    if not names_this_machine(host):
        return False  # a foreign name that was made to point here
    return origin is None or urlsplit(origin).netloc == host


Admin = Depends(require_admin)
