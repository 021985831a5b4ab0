"""``graftserve docs``: pages of the documentation that are written from the code."""

from __future__ import annotations

import typer

docs = typer.Typer(help="Print pages of the documentation that are written from the code.", no_args_is_help=True)


@docs.callback()
def _group() -> None:
    """Keeps `metrics` a command of a group while it is the only one."""


@docs.command()
def metrics() -> None:
    """Print docs/metrics.md: every Prometheus family, its labels and its meaning."""
    from app.metrics_reference import reference

    typer.echo(reference(), nl=False)
