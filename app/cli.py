"""The command line, behind a guard on where our packages come from.

Our top-level names are generic: another distribution may own one of them (dm-tree installs ``tree``), and Python would
take it without a word. So nothing of ours but this file is imported before the guard has looked.

    graftserve serve --port 8000
    python -m app config
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import typer

PACKAGES = ("app", "distill", "drafters", "engine", "models", "scheduler", "tree", "verify")


def main() -> None:
    """Entry point of the console script. Exit status 1: a package of another origin is in the way."""
    problem = intruder()
    if problem is not None:
        typer.echo(f"graftserve: {problem}", err=True)
        sys.exit(1)
    application()()


def intruder() -> str | None:
    """What is wrong with the first of our packages that would not be imported from beside ``app``, or None."""
    home = Path(__file__).resolve().parent.parent
    for name in PACKAGES:
        spec = find_spec(name)
        if spec is None:
            return f"package '{name}' is missing from {home}"
        places = (
            [spec.origin]
            if spec.origin
            else [f"{place}/__init__.py" for place in spec.submodule_search_locations or ()]
        )
        for place in places:
            if Path(place).resolve().parent.parent != home:
                return (
                    f"package '{name}' comes from {Path(place).parent}, not from {home}: another distribution uses the "
                    "same name. Install graftserve into an environment of its own."
                )
    return None


def application() -> typer.Typer:
    """The command line as an object: one command, or one group of them, per module of ``app.commands``."""
    from app.commands import COMMANDS, GROUPS

    cli = typer.Typer(
        name="graftserve",
        help="Serve one Hugging Face model with speculative decoding: two drafters grow one draft tree.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    for name, command in COMMANDS.items():
        cli.command(name)(command)
    for name, group in GROUPS.items():
        cli.add_typer(group, name=name)
    return cli
