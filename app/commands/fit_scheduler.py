"""``graftserve fit-scheduler``: from a trace to the rule that says when the medium drafter is called.

Exit status: 0, 2 for what the user can mend.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.commands.options import describe, fail

if TYPE_CHECKING:
    from scheduler.rule import Rule
    from scheduler.traces import Trace


def fit_scheduler(
    trace: Annotated[Path, typer.Argument(metavar="TRACE.jsonl", help="Made by `graftserve trace`.")],
    out: Annotated[Path, typer.Option(metavar="RULE.json", help="Where the rule goes.")],
    profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Prices of another machine, or a name; none: the trace's own.")
    ] = None,
    budget: Annotated[int | None, typer.Option(min=1, help="Nodes verified per step, root included; none: by price.")] = None,
    max_calls: Annotated[int, typer.Option(min=0, help="Most calls of the medium per decoding step.")] = 5,
) -> None:
    """Fit the rule that says when a call of the medium drafter is worth its price."""
    from app.commands.serve import say
    from app.commands.trace import read_profile
    from scheduler.rule_fit import RuleFit, fit_rule
    from scheduler.traces import priced

    if not out.parent.is_dir():
        fail(f"{out}: there is no folder {out.parent}")
    try:
        log = load_trace(trace)
        prices = log.profile if profile is None else read_profile(profile)
        if prices is None:
            fail(f"{trace} holds no prices: name some with --profile")
        steps = priced(log, prices, budget=budget)
        rule = fit_rule(steps, RuleFit(max_calls=max_calls))
    except (ValueError, OSError) as error:
        fail(describe(error))
    out.write_text(rule.to_json(), "utf-8")
    _show(rule)
    say(f"{rule.describe()}; written to {out}")


def load_trace(file: Path) -> Trace:
    """A trace file's content. ValueError that names the file, OSError."""
    from scheduler.traces import read_trace

    try:
        found = read_trace(file.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    if not found.records:
        raise ValueError(f"{file}: no position was logged")
    return found


def _show(rule: Rule) -> None:
    from app.measure import show

    report = rule.report
    entries: dict[str, dict[str, Any]] = {
        "plain decoding": report["plain"],
        "always small": report["end_points"]["small"],
        "always medium": report["end_points"]["medium"],
        **{f"rule: {name} (held out)": numbers for name, numbers in report["held_out"].items()},
        "oracle": report["oracle"],
    }
    columns = ("", "tokens/step", "ms/step", "calls/step", "tokens/s", "value per 1,000 steps")
    lines = [
        (
            name,
            f"{numbers['tokens_per_step']:.3f}",
            f"{numbers['ms_per_step']:.2f}",
            f"{numbers['calls_per_step']:.2f}",
            f"{1000 * numbers['tokens_per_ms']:.1f}",
            f"{numbers['value_per_1000_steps']:+.1f}",
        )
        for name, numbers in entries.items()
    ]
    show(f"{report['steps']} steps of {report['prompts']} prompts", columns, lines)
    signals = list(report["single_signal"].items())[:6]
    show("signals alone, over the better end point", ("", "value per 1,000 steps"), [(n, f"{v:+.1f}") for n, v in signals])
    explained = report["value_model"]["explained"]
    typer.echo(f"The value model explains {explained:.1%} of the margins' variance on held-out prompts.")
