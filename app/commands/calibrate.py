"""``graftserve calibrate``: measure what forwards of the configured models cost here, for schedules that know prices.

Measured once per machine and models and kept in the cache folder; this command shows it and can write it to a file.
Exit status: 0, 1 for our own failures, 2 for what the user can mend.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.commands.options import fail, takes_settings
from app.config import Settings

if TYPE_CHECKING:
    from scheduler.cost import LatencyModel


@takes_settings
def calibrate(
    settings: Settings,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the profile there too, as JSON.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again even if a profile is kept already.")] = False,
    seconds: Annotated[float | None, typer.Option(min=0, help="Begin no further pass after these.")] = None,
) -> None:
    """Measure what a forward of each model costs, by rows and context."""
    from dataclasses import replace

    from app.calibration import default_effort, profile_for
    from app.commands.loading import load
    from app.commands.serve import say
    from app.measure import show
    from models.loading import choose_placement

    if out is not None and not out.parent.is_dir():
        fail(f"{out}: there is no folder {out.parent}")
    settings, loaded = load(settings)
    effort = default_effort(choose_placement(settings.device, settings.weights))
    if seconds is not None:
        effort = replace(effort, seconds=seconds)
    profile = profile_for(loaded, settings, say, effort=effort, fresh=fresh)
    origin = profile.origin
    say(f"{origin.model}, {origin.weights}, {origin.machine}, {origin.threads} threads, measured {origin.date}")
    for name, model in profile.models.items():
        counts = list(model.rows)
        show(f"{name}: milliseconds of a forward", ("sequences, context", *map(str, counts)), _table(model, counts))
    if out is not None:
        out.write_text(profile.to_json(), "utf-8")


def _table(model: LatencyModel, counts: list[int]) -> list[list[str]]:
    """One line per measured batch and context, measured and as the model has it, then what the slopes say."""
    lines = []
    for sequences, context in sorted({(point.sequences, point.context) for point in model.points}):
        measured = {p.rows: p.ms for p in model.points if (p.sequences, p.context) == (sequences, context)}
        fitted = {rows: model.ms(rows, sequences=sequences, context=context) for rows in measured}
        title = f"{sequences}, {context}"
        lines.append([f"{title}, measured", *(f"{measured[rows]:.2f}" if rows in measured else "" for rows in counts)])
        lines.append([f"{title}, fitted", *(f"{fitted[rows]:.2f}" if rows in fitted else "" for rows in counts)])
    lines.append([f"largest misfit {model.misfit:.0%}", *("" for _ in counts)])
    return lines
