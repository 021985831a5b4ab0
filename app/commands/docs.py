"""``graftserve docs``: pages of the documentation that are written from the code."""

from __future__ import annotations

import typer

docs = typer.Typer(help="Print pages of the documentation that are written from the code.", no_args_is_help=True)


@docs.command()
def metrics() -> None:
    """Print docs/metrics.md: every Prometheus family, its labels and its meaning."""
    from app.metrics_reference import reference

    typer.echo(reference(), nl=False)


@docs.command()
def schedules() -> None:
    """Print docs/schedules.md: every schedule, tree policy with its options, and decision rule."""
    from app.schedules_reference import reference

    typer.echo(reference(), nl=False)
