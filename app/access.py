"""Who may ask: API keys, the few paths that need none, and what a server without keys may listen on and answer to."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Iterable
from hashlib import sha256
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException

from app.config import Settings
from app.errors import shorten

METRICS_PATH = "/metrics"
# Probes come without keys, and a browser that opens a page cannot send one. These answer nothing about anybody's requests.
OPEN_PATHS = frozenset({"/", "/health", "/docs", "/experiments", "/openapi.json"})
OPEN_FOLDERS = ("/static/", "/admin/")  # what the pages are made of; and what asks for a key of its own, see `app.admin_access`


class Keys:
    """The keys that are accepted; empty: none is asked for."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        """Only digests are kept: of equal length whatever the key, and of no use to who reads a memory dump."""
        self._digests = tuple(_digest(key) for key in keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def check(self, authorization: str | None) -> str | None:
        """The key in an ``Authorization`` header; None where no keys are asked for. Raises HTTPException 401.

        The time it takes depends on neither the keys nor how much of one was guessed.
        """
        if not self._digests:
            return None
        scheme, _, key = (authorization or "").strip().partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key:
            raise _unauthorized("This server asks for an API key: send the header Authorization: Bearer KEY.", "Bearer")
        given, is_known = _digest(key), False
        for digest in self._digests:
            is_known |= hmac.compare_digest(given, digest)
        if not is_known:
            raise _unauthorized("The API key is not one of this server's.", 'Bearer error="invalid_token"')
        return key


def keys_of(settings: Settings) -> Keys:
    """The keys that the settings name; the admin's opens every door, where there are doors."""
    admin = [settings.admin_key] if settings.api_keys and settings.admin_key is not None else []
    return Keys(key.get_secret_value() for key in (*settings.api_keys, *admin))


def needs_key(path: str, *, metrics_auth: bool) -> bool:
    """Whether a path is answered only to who has a key, if there are keys at all."""
    if path == METRICS_PATH:
        return metrics_auth
    return path not in OPEN_PATHS and not path.startswith(OPEN_FOLDERS)


def exposure_problem(settings: Settings) -> str | None:
    """Why this server must not be started like this: everyone who reaches it could use it. None: it may."""
    if settings.api_keys or settings.allow_keyless or is_loopback(settings.host):
        return None
    return (
        f"host = {settings.host} lets other machines in, and there are no api_keys; set some, keep to 127.0.0.1, or say "
        "--allow-keyless true where something else keeps strangers out"
    )


def check_host(host: str, listens_on: str) -> None:
    """Raise HTTPException 400 for a call to a server without keys that was not made under a name of this machine.

    Else a page in somebody's browser could ask it whatever it likes, from a host name that its owner lets point here (DNS
    rebinding). `host` is the header, "" where there is none: no browser leaves it out.
    """
    if not host or host.lower() == listens_on.lower() or names_this_machine(host):
        return
    raise HTTPException(
        400,
        f"Host: {shorten(host)!r} is no name of this machine, and a server without API keys answers to no other; "
        "set api_keys, or allow_keyless where something else keeps strangers out.",
    )


def names_this_machine(host: str) -> bool:
    """Whether a ``Host`` header, port included, is a name or address that means this machine everywhere."""
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:  # brackets that do not match
        return False
    return name == "localhost" or name.endswith(".localhost") or is_local_address(name)


def is_loopback(host: str) -> bool:
    """Whether an address, or every address of a name, can be reached from this machine only."""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False  # a name nobody knows; listening on it will say so
    return all(is_local_address(address) for address in found)


def is_local_address(text: str) -> bool:
    """Whether this is an address, and one that means this machine."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)  # ::ffff:127.0.0.1
    return (mapped or address).is_loopback


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


def _unauthorized(message: str, challenge: str) -> HTTPException:
    return HTTPException(401, message, {"WWW-Authenticate": challenge})
