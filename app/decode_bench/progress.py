"""A bar on standard error with the time that is left, while methods take turns."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextmanager
def bar(total: int, console: Console | None = None) -> Iterator[Callable[[str], None]]:
    """Show how many of `total` answers are there; the value is to be called with each answer's author.

    Nothing is shown where standard error (or `console`) is no terminal.
    """
    console = console or Console(file=sys.stderr)
    columns = (
        *(BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()),
        *(TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.description}")),
    )
    # Drawn after an answer, never by a thread of its own: it would compute while somebody is timed.
    with Progress(
        *columns, console=console, transient=True, auto_refresh=False, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("", total=total)

        def told(who: str) -> None:
            progress.update(task, advance=1, description=who, refresh=True)

        yield told
