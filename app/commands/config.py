"""``graftserve config``: what the server would run with, as a file it could be started from."""

from __future__ import annotations

import json

import typer

from app.commands.options import is_secret, takes_settings
from app.config import Settings


@takes_settings
def config(settings: Settings) -> None:
    """Print the settings as resolved from command line, environment and file, in TOML."""
    for name, value in settings.model_dump(mode="json").items():
        if is_secret(name) and value:
            how_many = "is set" if isinstance(value, str) else f"has {len(value)}"
            typer.echo(f"# {name} {how_many}, and not shown")
            continue
        if value is None and Settings.model_fields[name].default is not None:
            value = "none"  # turned off, where leaving it out would mean the default
        if isinstance(value, dict):  # an object's JSON is no TOML; as a string it is, and is read back like the command line's
            value = json.dumps(value, ensure_ascii=False)
        # TOML has no null; JSON's strings, numbers and booleans are TOML's.
        typer.echo(f"# {name} is not set" if value is None else f"{name} = {json.dumps(value, ensure_ascii=False)}")
