"""The pages for people: the playground at ``/``, experiments at ``/experiments``, and the files that both are made of.

The pages hold nothing that is not public and are served without a key; what they show they fetch from the API with the key
that somebody typed in. Their policy lets the browser load nothing from anywhere else, run no script that stands in a page,
and be framed by nobody.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse

STATIC = Path(__file__).parent.parent / "static"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # an upgrade shows at the next look
}

router = APIRouter(include_in_schema=False)


@router.api_route("/", methods=["GET", "HEAD"], response_model=None)
def playground() -> FileResponse:
    """Ask, and see who drafted what."""
    return _page("index.html")


@router.api_route("/experiments", methods=["GET", "HEAD"], response_model=None)
def experiments() -> FileResponse:
    """Experiments between schedules: how they stand, and the buttons for who runs them."""
    return _page("experiments.html")


@router.api_route("/static/{name}", methods=["GET", "HEAD"], response_model=None)
def static(name: str) -> FileResponse:
    """A file of the pages."""
    return _page(name)


def _page(name: str) -> FileResponse:
    """The file of that name; only names that are there, so that no path can lead elsewhere. Raises HTTPException 404."""
    kind = KINDS.get(Path(name).suffix)
    if kind is None or name not in {path.name for path in STATIC.iterdir()}:
        raise HTTPException(404, f"There is no page {name[:80]!r}.")
    return FileResponse(STATIC / name, media_type=kind, headers=HEADERS)
