"""Files that a measurement writes at its end, looked at before it begins."""

from __future__ import annotations

from pathlib import Path

from app.commands.options import fail
from app.plots import check_file


def check_outputs(json_file: Path | None, plot: Path | None) -> None:
    """End the program if one of the files could not be written, or not in that format."""
    for file in (json_file, plot):
        if file is not None and not file.parent.is_dir():
            fail(f"{file}: there is no folder {file.parent}")
    if plot is not None:
        try:
            check_file(plot)
        except ValueError as error:
            fail(str(error))
