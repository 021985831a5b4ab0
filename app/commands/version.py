"""``graftserve version``."""

from __future__ import annotations

import platform
from importlib import metadata

import typer

from app.version import version as own_version


def version() -> None:
    """Print the versions of graftserve and of what its results depend on."""
    parts = [f"{name} {metadata.version(name)}" for name in ("torch", "transformers", "tokenizers")]
    typer.echo(f"graftserve {own_version()} ({', '.join(parts)}, Python {platform.python_version()})")
