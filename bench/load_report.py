"""What a load came to: numbers from replies, the table, the curves, and the JSON.

    TTFT        sending a question to its first text
    TPOT        first text to the end of the answer, per token after the first
    end to end  sending to the end
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from app.measure import spread
from bench.asking import Reply


@dataclass(frozen=True, slots=True)
class Round:
    """All prompts, asked once."""

    seconds: float  # of all together
    replies: Sequence[Reply]  # in the order of the prompts

    @property
    def answers(self) -> list[Reply]:
        """The finished ones."""
        return [reply for reply in self.replies if reply.is_answer]

    @property
    def speed(self) -> float:
        """Tokens per second over all clients."""
        return sum(reply.num_tokens or 0 for reply in self.answers) / self.seconds


@dataclass(slots=True)
class Cell:
    """One number of clients and one schedule."""

    concurrency: int
    schedule: str
    rounds: list[Round] = field(default_factory=list)

    @property
    def answers(self) -> list[Reply]:
        """Of all rounds."""
        return [reply for one in self.rounds for reply in one.answers]

    @property
    def num_refused(self) -> int:
        """Questions that the server turned away because it had enough to do."""
        return sum(reply.status in (429, 503) for one in self.rounds for reply in one.replies)

    @property
    def num_failed(self) -> int:
        """Questions without an answer for any other reason."""
        return sum(len(one.replies) - len(one.answers) for one in self.rounds) - self.num_refused

    def speeds(self) -> list[float]:
        """Tokens per second of each round."""
        return [one.speed for one in self.rounds]

    def first_token_ms(self) -> list[float]:
        """Of each answer."""
        return [(reply.first_s - reply.sent_s) * 1e3 for reply in self.answers if reply.first_s is not None]

    def per_token_ms(self) -> list[float]:
        """Of each answer with more than one token."""
        return [
            (reply.last_s - reply.first_s) * 1e3 / (num_tokens - 1)
            for reply in self.answers
            if reply.last_s is not None and reply.first_s is not None and (num_tokens := reply.num_tokens or 0) > 1
        ]

    def whole_ms(self) -> list[float]:
        """Of each answer."""
        return [(reply.last_s - reply.sent_s) * 1e3 for reply in self.answers if reply.last_s is not None]

    def latencies(self) -> dict[str, list[float]]:
        """Milliseconds by name."""
        return {"ttft": self.first_token_ms(), "tpot": self.per_token_ms(), "e2e": self.whole_ms()}


def percentile(samples: Sequence[float], percent: float) -> float | None:
    """Linear between samples; None of nothing."""
    return float(np.percentile(samples, percent)) if samples else None


def table(cells: Sequence[Cell]) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Titles and rows."""
    titles = ("clients, schedule", "tokens/s", "TTFT", "TPOT", "end to end", "answers", "refused", "failed")
    rows: list[Sequence[str]] = []
    for cell in cells:
        speed = str(spread(cell.speeds())) if cell.rounds else "-"
        times = [_pair(samples) for samples in cell.latencies().values()]
        counts = (str(len(cell.answers)), str(cell.num_refused), str(cell.num_failed))
        rows.append((f"{cell.concurrency} {cell.schedule}", speed, *times, *counts))
    return titles, rows


def as_json(cell: Cell) -> dict[str, Any]:
    """Figures, and the samples that they are made of."""
    latencies = cell.latencies()
    return {
        "concurrency": cell.concurrency,
        "schedule": cell.schedule,
        "tokens_per_s": statistics.median(cell.speeds()) if cell.rounds else None,
        **{
            f"{name}_ms": {"p50": percentile(samples, 50), "p95": percentile(samples, 95)}
            for name, samples in latencies.items()
        },
        "answers": len(cell.answers),
        "refused": cell.num_refused,
        "failed": cell.num_failed,
        "rounds": [
            {"seconds": one.seconds, "tokens": [reply.num_tokens for reply in one.replies], "tokens_per_s": one.speed}
            for one in cell.rounds
        ],
        "samples_ms": {name: [round(sample, 3) for sample in samples] for name, samples in latencies.items()},
    }


def plot(cells: Sequence[Cell], title: str, file: Path) -> None:
    """Throughput, TTFT and TPOT over the number of clients, a line per schedule; p95 is dashed."""
    import matplotlib

    matplotlib.use("Agg")  # no window
    from matplotlib import pyplot

    figure, (speed, first, per_token) = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for number, name in enumerate(dict.fromkeys(cell.schedule for cell in cells)):
        own = sorted((cell for cell in cells if cell.schedule == name and cell.answers), key=lambda cell: cell.concurrency)
        levels, color = [cell.concurrency for cell in own], f"C{number}"
        speed.plot(levels, [statistics.median(cell.speeds()) for cell in own], "o-", color=color, label=name)
        for panel, samples in (
            (first, [cell.first_token_ms() for cell in own]),
            (per_token, [cell.per_token_ms() for cell in own]),
        ):
            for percent, style in ((50, "o-"), (95, "o--")):
                points = [percentile(one, percent) for one in samples]
                panel.plot(levels, [np.nan if p is None else p for p in points], style, color=color, label=f"{name} p{percent}")
    for panel, what in ((speed, "tokens/s, all clients"), (first, "TTFT, ms"), (per_token, "TPOT, ms per token")):
        panel.set(xlabel="clients", ylabel=what, ylim=(0, None))
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter("{x:g}")
        panel.grid(alpha=0.3)
    speed.legend()
    first.legend()
    figure.suptitle(title)
    figure.savefig(file)
    pyplot.close(figure)


def _pair(samples: Sequence[float]) -> str:
    return f"{percentile(samples, 50):.0f} / {percentile(samples, 95):.0f}" if samples else "-"
