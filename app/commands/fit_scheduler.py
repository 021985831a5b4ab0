"""``graftserve fit-scheduler``: from a trace to the rule that calls the medium drafter, or to a selector of delayed trees.

Exit status: 0, 2 for what the user can mend.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.commands.options import describe, fail

if TYPE_CHECKING:
    from scheduler.rule import Rule
    from scheduler.traces import Trace


class Kind(Enum):
    """What is fitted."""

    RULE = "rule"
    NDE = "nde"


def fit_scheduler(
    trace: Annotated[Path, typer.Argument(metavar="TRACE.jsonl", help="Made by `graftserve trace`, or `trace-shapes`.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the rule (.json) or selector (.safetensors) goes.")],
    kind: Annotated[
        Kind, typer.Option(help="rule: when the medium is called; nde: a neural selector of delayed trees (2602.16994).")
    ] = Kind.RULE,
    profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Prices of another machine, or a name; none: the trace's own.")
    ] = None,
    budget: Annotated[int | None, typer.Option(min=1, help="Nodes verified per step, root included; none: by price.")] = None,
    max_calls: Annotated[int, typer.Option(min=0, help="Most calls of the medium per decoding step.")] = 5,
) -> None:
    """Fit the rule that says when a call of the medium drafter is worth its price; or a selector of delayed trees."""
    if kind is Kind.NDE:
        _fit_selector(trace, out, profile)
        return
    from app.commands.serve import say
    from app.commands.trace import named_profile
    from scheduler.rule_fit import RuleFit, fit_rule
    from scheduler.traces import priced

    if not out.parent.is_dir():
        fail(f"{out}: there is no folder {out.parent}")
    try:
        log = load_trace(trace)
        prices = log.profile if profile is None else named_profile(profile)
        if prices is None:
            fail(f"{trace} holds no prices: name some with --profile")
        steps = priced(log, prices, budget=budget)
        rule = fit_rule(steps, RuleFit(max_calls=max_calls))
    except (ValueError, OSError) as error:
        fail(describe(error))
    out.write_text(rule.to_json(), "utf-8")
    _show(rule)
    say(f"{rule.describe()}; written to {out}")


def _fit_selector(file: Path, out: Path, profile: Path | None) -> None:
    """Train on labels of `trace-shapes`, write the weights and the report beside them."""
    from app.commands.serve import say
    from app.commands.trace import named_profile
    from app.measure import show
    from scheduler.selected import SERVED
    from scheduler.selector_fit import fit_selector
    from scheduler.selector_samples import priced_samples, read_labels

    if not out.parent.is_dir():
        fail(f"{out}: there is no folder {out.parent}")
    try:
        labels = read_labels(file.read_text("utf-8"))
        prices = labels.profile if profile is None else named_profile(profile)
        if prices is None:
            fail(f"{file} holds no prices: name some with --profile")
        selector, report = fit_selector(priced_samples(labels, prices), labels.header.verifier, inputs=SERVED)
        selector.save(out)
    except (ValueError, OSError) as error:
        message = describe(error)
        fail(message if str(file) in message else f"{file}: {message}")
    made_for = {**asdict(labels.header), "prices": asdict(prices.origin)}
    out.with_suffix(".json").write_text(json.dumps({**made_for, **report}, indent=1) + "\n", "utf-8")
    parts = {name: report[name] for name in ("trained", "held_out") if report[name] is not None}
    columns = ("prompts", "roots", "best single shape, tokens/s", "selector", "oracle", "shapes used")
    lines = [
        (
            name.replace("_", " "),
            f"{numbers['roots']:.0f}",
            *(f"{1000 * numbers[way]:.1f}" for way in ("static", "selector", "oracle")),
            f"{numbers['shapes_used']:.0f}",
        )
        for name, numbers in parts.items()
    ]
    show(f"selector of delayed trees, {labels.header.verifier}, {labels.header.drafter}", columns, lines)
    say(f"written to {out}, its report beside it")


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
