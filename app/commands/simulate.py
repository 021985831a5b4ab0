"""``graftserve simulate``: replay a trace under the prices of other machines.

Exit status: 0, 2 for what the user can mend.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from app.commands.fit_scheduler import load_trace
from app.commands.options import describe, fail


def simulate(
    trace: Annotated[Path, typer.Argument(metavar="TRACE.jsonl", help="Made by `graftserve trace`.")],
    profile: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Prices, or a name such as gpu80-8b; repeatable. None: the trace's own machine."),
    ] = None,
    budget: Annotated[int | None, typer.Option(min=1, help="Nodes verified per step, root included; none: by price.")] = None,
    rule_file: Annotated[
        Path | None, typer.Option("--rule", metavar="RULE.json", help="Replay this rule; none: rules fitted to other prompts.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result there too.")] = None,
) -> None:
    """Tokens per modeled second of every way to schedule two drafters, under any cost profile."""
    from app.commands.trace import named_profile
    from app.measure import show
    from scheduler.rule import Rule
    from scheduler.simulation import PLAIN
    from scheduler.simulation import simulate as run

    if json_file is not None and not json_file.parent.is_dir():
        fail(f"{json_file}: there is no folder {json_file.parent}")
    try:
        log = load_trace(trace)
        profiles = {str(name): named_profile(name) for name in profile or ()}
        if not profiles:
            if log.profile is None:
                fail(f"{trace} holds no prices: name some with --profile")
            profiles = {"traced machine": log.profile}
        rule = None if rule_file is None else Rule.from_json(rule_file.read_text("utf-8"))
        found = {name: run(log, prices, budget=budget, rule=rule) for name, prices in profiles.items()}
    except (ValueError, OSError) as error:
        fail(describe(error))
    record: dict[str, Any] = {"trace": str(trace), "steps": len(log.records), "budget": budget, "machines": {}}
    columns = ("", "tokens/s", "times ar", "tokens/step", "ms/step", "calls/step")
    for name, result in found.items():
        base = result.totals[PLAIN].rate
        lines = [
            (
                schedule,
                f"{1000 * total.rate:.1f}",
                f"{total.rate / base:.3f}",
                f"{total.tokens / total.steps:.3f}",
                f"{total.ms / total.steps:.3f}",
                f"{total.calls / total.steps:.2f}",
            )
            for schedule, total in result.totals.items()
        ]
        show(f"{name}: {profiles[name].origin.model}", columns, lines)
        typer.echo(f"value guidance over the better end point: {result.gain:+.1%}; an oracle: {result.possible:+.1%}\n")
        record["machines"][name] = {
            "machine": profiles[name].origin.machine,
            "gain": result.gain,
            "possible": result.possible,
            "tokens_per_second": {schedule: 1000 * total.rate for schedule, total in result.totals.items()},
        }
    line = json.dumps(record, ensure_ascii=False)
    if json_file is not None:
        json_file.write_text(line + "\n", "utf-8")
    typer.echo(line)
