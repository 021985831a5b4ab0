"""What everything that measures shares: taking turns, medians with their spread, tables, and the JSON line that ends a run."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from app.machine import machine
from models.loading import Placement

WARM_UP = 3  # rounds that are thrown away


@dataclass(frozen=True, slots=True)
class Spread:
    """A median and what it is the median of."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


def spread(samples: Sequence[float]) -> Spread:
    """Median and quartiles; smallest and largest where there are fewer than five samples."""
    if len(samples) < 5:
        return Spread(statistics.median(samples), min(samples), max(samples))
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Spread(middle, low, high)


@dataclass(slots=True)
class Timed:
    """One thing to time, and its samples."""

    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None  # before each run, not timed
    seconds: list[float] = field(default_factory=list)


def take_turns(things: Sequence[Timed], rounds: int, device: torch.device) -> None:
    """Fill in `seconds`; a round visits every thing once, every other round in reverse order, so that drift hits all alike."""
    for number in range(WARM_UP + rounds):
        for thing in things if number % 2 else reversed(things):
            thing.prepare()
            _wait(device)
            start = time.perf_counter()
            thing.run()
            _wait(device)
            if number >= WARM_UP:
                thing.seconds.append(time.perf_counter() - start)


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; the first column is to the left."""
    table = Table(title=title, box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    # In a file nothing may be cut off.
    Console(highlight=False, width=None if sys.stdout.isatty() else 200).print(table)


def finish(bench: str, placement: Placement, result: dict[str, Any], json_file: Path | None) -> None:
    """Print the run as one JSON object, the last line, and write it to `json_file` if there is one."""
    line = json.dumps({"bench": bench, "machine": machine(placement), **result}, ensure_ascii=False)
    if json_file is not None:
        json_file.write_text(line + "\n", "utf-8")
    typer.echo(line)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
