"""One command-line option per setting, made from the settings class, for every command that needs settings.

A command is written as ``def command(settings: Settings, ...)``; :func:`takes_settings` replaces the first parameter by
``--config`` and the options. Values stay text until pydantic reads them, so that a bad one is refused by the same rule,
in the same words, whether it came from the command line, the environment or the file.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from pydantic import SecretStr, ValidationError

from app.config import Settings, load_settings


def takes_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Let typer see one option per setting, and call ``command`` with the resolved settings."""

    @wraps(command)
    def run(*, config: Path | None, **given: Any) -> None:
        overrides = {name: given.pop(name) for name in Settings.model_fields}
        command(read_settings(config, overrides), **given)

    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    shown = [_config_option(), *(_option(name) for name in Settings.model_fields)]
    parameters = [*shown, *(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own)]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def read_settings(file: Path | None, overrides: Mapping[str, Any]) -> Settings:
    """Load the settings, or end the program with one line and status 2."""
    try:
        return load_settings(file, overrides)
    except (ValueError, OSError) as error:
        fail(describe(error))


def describe(error: Exception) -> str:
    """One line about a refused setting: every bad key with its value and what was expected."""
    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, entry['loc']))}{_shown(entry)}: {entry['msg']}" for entry in error.errors())
    if isinstance(error, FileNotFoundError):
        return f"{error.filename}: no such file"
    return " ".join(str(error).split()) or type(error).__name__


def _shown(entry: Any) -> str:
    """The refused value, unless it is a secret."""
    name = str(entry["loc"][0]) if entry["loc"] else ""
    return "" if is_secret(name) else f" = {entry['input']!r}"


def is_secret(name: str) -> bool:
    """Whether a setting must never be shown."""
    return name in Settings.model_fields and SecretStr in _parts(Settings.model_fields[name].annotation)


def _parts(annotation: Any) -> set[Any]:
    """A type and all it is made of."""
    return {annotation}.union(*map(_parts, getattr(annotation, "__args__", ())))


def fail(message: str) -> NoReturn:
    """End the program because of what its user asked for: one line, status 2."""
    typer.echo(f"graftserve: {message}", err=True)
    raise typer.Exit(2)


def _config_option() -> inspect.Parameter:
    option = typer.Option(
        "--config", metavar="FILE", help="TOML file with any of the settings below.", show_default=False
    )
    return inspect.Parameter(
        "config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[Path | None, option]
    )


def _option(name: str) -> inspect.Parameter:
    """The option of one setting. Its default is None, *not given*; the real default is part of the help text."""
    field = Settings.model_fields[name]
    default = "" if field.default is None or field.default == () else f" Default: {field.default}."
    option = typer.Option(
        f"--{name.replace('_', '-')}",
        metavar=_kind(field.annotation),
        help=f"{field.description}{default}",
        show_default=False,
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, option]
    )


def _kind(annotation: Any) -> str:
    """What to write after an option: the choices of a literal, else the plain type."""
    choices = getattr(annotation, "__args__", ())
    if choices and all(isinstance(choice, str) for choice in choices):
        return "|".join(choices)
    for kind, word in ((int, "INTEGER"), (float, "NUMBER")):
        if annotation is kind or kind in choices:
            return word
    return "TEXT"
