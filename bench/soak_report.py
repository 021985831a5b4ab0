"""The checks of a soak, each with what was seen, its limit and its verdict; and the tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from app.measure import show
from bench.soak_checks import Acceptance, Series, beyond_caches, busy, farewell, growth, rows_held, server_faults


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must hold. `is_right` is true where nothing could be seen, and `seen` says so."""

    name: str
    seen: str
    limit: str
    is_right: bool

    def as_json(self) -> dict[str, Any]:
        """As an object."""
        return asdict(self)


def checks(
    memory: Sequence[tuple[float, int]],
    scrapes: Sequence[tuple[float, Series]],
    rates: Acceptance | None,
    series: Series,
    *,
    health: int,
    status: int | None,
    written: str,
    growth_limit: float,
    acceptance_limit: float,
    num_violations: int,
    num_compared: int,
    num_hung_up: int,
) -> list[Check]:
    """Everything that is decided after the load.

    Args:
        memory: seconds and resident bytes; scrapes: seconds and metrics, both at rest, at the same times.
        rates: of the same questions before and after; None if nothing was drafted.
        series: the metrics when all were gone.
        health, status, written: of /health, of the process after SIGTERM, and what it wrote to standard error.
        num_violations: what the clients complain of.
        num_compared, num_hung_up: answers compared, and requests that the client gave up; without them nothing is shown.
    """
    found = [
        Check("wrong answers, statuses, streams", str(num_violations), "0", not num_violations),
        Check("answers compared", str(num_compared), "> 0", num_compared > 0),
        Check("clients that hung up", str(num_hung_up), "> 0", num_hung_up > 0),
    ]

    def add(name: str, complaint: str | None, limit: str) -> None:
        found.append(Check(name, complaint or "none", limit, complaint is None))

    add("requests left in the engine", busy(series), "none")
    rows = rows_held(series)
    seen = "no gauge says" if rows is None else f"{rows:g}"
    found.append(Check("cache rows left, kept prefixes aside", seen, "0", rows is None or rows <= 0))
    add("errors the server counted", server_faults(series), "none")
    slope = growth(beyond_caches(memory, scrapes))
    seen = "too short to say" if slope is None else f"{slope:+.2f} MB/min"
    name, limit = "memory growth at rest, second half, caches aside", f"< {growth_limit:g} MB/min"
    found.append(Check(name, seen, limit, slope is None or slope < growth_limit))
    if rates is None:
        found.append(Check("accepted per step, before and after", "nothing drafted", "no fall", True))
    else:
        seen, limit = f"{rates.first:.3f}, {rates.last:.3f}", f"falls by < {acceptance_limit:.0%}"
        found.append(Check("accepted per step, before and after", seen, limit, not rates.fell(acceptance_limit)))
    found.append(Check("/health in the end", str(health), "200", health == 200))
    add("end after SIGTERM", farewell(status, written), "status 0, no complaint")
    return found


def show_soak(sent: Mapping[str, int], ended: Mapping[tuple[str, str], int], found: Sequence[Check]) -> None:
    """Print what was asked and how it ended, then the checks."""
    hows = sorted({how for _, how in ended})
    rows = [[kind, str(sent[kind]), *(str(ended.get((kind, how), 0)) for how in hows)] for kind in sorted(sent)]
    show("requests by kind, and how they ended", ("kind", "sent", *hows), rows)
    verdicts = [(check.name, check.seen, check.limit, "ok" if check.is_right else "FAIL") for check in found]
    show("checks", ("check", "seen", "limit", ""), verdicts)
