"""A bar on standard error while many answers come in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def answer_bar(total: int) -> Iterator[Callable[[str], None]]:
    """Show how many of `total` answers are there; the value is to be called with each answer's author."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda who: progress.update(task, advance=1, description=who)
