"""What a proof found, as a table, as sentences and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from app.proof import Difference, Result, Trial, verdict

_STYLES = {"equal": "green", "near ties": "yellow", "FAIL": "bold red"}


def condition(trial: Trial) -> str:
    """Under which condition a trial ran, in words."""
    return f"T={int(trial.sampled)}, {'one by one' if trial.concurrency == 1 else f'{trial.concurrency} at once'}"


def table(results: Sequence[Result]) -> Table:
    """One row per trial."""
    # Fits into 80 columns.
    drawing = Table(title="compared with plain decoding", box=SIMPLE_HEAD, padding=0)
    for name in ("schedule", "condition"):
        drawing.add_column(name, no_wrap=True)
    for name in ("prompts", "tokens", "equal", "near\nties", "failures", "tokens\n/step", "verdict"):
        drawing.add_column(name, justify="right")
    for result in results:
        numbers = (result.num_prompts, result.num_tokens, result.equal, result.near_ties, result.failures)
        drawing.add_row(
            result.trial.schedule,
            condition(result.trial),
            *map(str, numbers),
            f"{result.num_tokens / max(result.num_steps, 1):.2f}",
            f"[{_STYLES[result.verdict]}]{result.verdict}[/]",
        )
    return drawing


def explain(results: Sequence[Result], decode: Callable[[Sequence[int]], str]) -> Iterator[str]:
    """One line per difference, with its evidence."""

    def name(token: int | None) -> str:
        return "the end" if token is None else f"{decode([token])!r} ({token})"

    for result in results:
        for item in result.differences:
            head = "near tie" if item.is_near_tie else "FAIL"
            yield (
                f"{head}: {result.trial.schedule}, {condition(result.trial)}, prompt {item.prompt + 1}, "
                f"token {item.position + 1}: {name(item.got)} in place of {name(item.expected)}{_evidence(item)}"
            )


def sentence(results: Sequence[Result]) -> str:
    """The verdict on all trials in one line."""
    answers = f"{sum(result.num_prompts for result in results)} answers"
    match verdict(results):
        case "FAIL":
            return f"FAIL: {sum(result.failures for result in results)} of {answers} differ from plain decoding."
        case "near ties":
            ties = sum(result.near_ties for result in results)
            return f"Equal up to near ties: {ties} of {answers} part from plain decoding where two tokens score the same."
        case _:
            return f"Equal: all {answers} are plain decoding's, token for token."


def as_json(result: Result) -> dict[str, Any]:
    """A result as a JSON object."""
    return {
        **asdict(result.trial),
        **{name: getattr(result, name) for name in ("num_prompts", "num_tokens", "num_steps", "num_accepted")},
        **{name: getattr(result, name) for name in ("equal", "near_ties", "failures", "verdict")},
        "differences": [{**asdict(item), "is_near_tie": item.is_near_tie} for item in result.differences],
    }


def _evidence(item: Difference) -> str:
    if item.expected_score is None or item.got_score is None or item.gap is None:
        return ""
    return f"; scores {item.got_score:.5f} and {item.expected_score:.5f}, gap {item.gap:.2g}, tolerance {item.tolerance:.2g}"
