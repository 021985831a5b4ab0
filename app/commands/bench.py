"""``graftserve bench``: measurements of the models as configured. ``bench drafters``: how good and how dear
the drafters are; ``bench schedules``: how fast whole answers are; ``bench verifiers``: what trees and rules make of them.

Exit status: 0, 1 for our own failures, 2 for what the user can mend.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.commands.bench_schedules import schedules
from app.commands.bench_verifiers import verifiers
from app.commands.options import describe, fail, takes_settings
from app.commands.outputs import check_outputs
from app.commands.texts import written_texts
from app.config import Settings

if TYPE_CHECKING:
    from app.drafter_quality import Text

bench = typer.Typer(help="Measure the models as configured, on this machine.", no_args_is_help=True)


bench.command("schedules")(takes_settings(schedules))
bench.command("verifiers")(takes_settings(verifiers))


@bench.command("drafters")
@takes_settings
def drafters(
    settings: Settings,
    prompts: Annotated[Path | None, typer.Option(metavar="FILE", help="Prompts, .txt or .jsonl; none: 20 built in.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use the first prompts only.")] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Longest answer, in tokens.")] = 128,
    stride: Annotated[int, typer.Option(min=1, help="Measure depths 2 to 5 at every Nth token of an answer.")] = 4,
    rounds: Annotated[int, typer.Option(min=0, help="Rounds of the price table; 0: leave it out.")] = 15,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result there too.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png|svg", help="Draw agreement and calibration there.")] = None,
) -> None:
    """Measure how often each drafter agrees with the target, by depth, and what its forwards cost."""
    from app.commands.loading import load
    from app.commands.serve import say
    from app.drafter_price import CONTEXT, Plan, prices
    from app.drafter_quality import FLOOR, Extent, measure, num_positions
    from app.drafter_report import (
        COLUMNS,
        calibration_line,
        halt_lines,
        legend,
        panels,
        price_json,
        price_rows,
        quality_json,
        quality_rows,
    )
    from app.measure import finish, show
    from app.plots import draw
    from app.prompt_sets import read_prompts
    from app.teacher_forcing import Memory, read_text
    from engine.engine import Engine
    from models.loading import choose_placement

    check_outputs(json_file, plot)
    try:
        conversations = read_prompts(prompts, limit)
        placement = choose_placement(settings.device, settings.weights)
    except (ValueError, OSError) as error:
        message = describe(error)
        fail(message if prompts is None or str(prompts) in message else f"{prompts}: {message}")
    _, loaded = load(settings)
    engine = loaded.engine
    assert isinstance(engine, Engine), "models can be measured in this very process only"
    texts = written_texts(loaded, conversations, max_tokens)
    say(f"{len(texts)} answers of {engine.model_id}, {num_positions(texts)} positions")

    # The engine's thread is gone; from here on this one computes, and it alone.
    target, known = engine.target, engine.drafters.values()
    extent = Extent(stride=stride, max_texts=engine.max_num_seqs, max_rows=target.pool.num_rows)

    def memory_of(text: Text, layers: tuple[int, ...]) -> Memory:
        return read_text(target, text.tokens, layers, chunk=settings.prefill_chunk)

    qualities = []
    for drafter in known:
        qualities.append(measure(drafter, texts, extent, memory_of))
        say(f"{drafter.name} measured")
    plan = Plan(context=min(CONTEXT, engine.max_model_len // 2), rounds=rounds)
    priced, missing = prices(target, list(known), plan) if rounds else ([], {})

    for quality in qualities:
        show(f"{quality.drafter}: agreement with {engine.model_id}, {placement.weights}", COLUMNS, quality_rows(quality))
    typer.echo(legend())
    for quality in qualities:
        typer.echo(calibration_line(quality))
        for line in halt_lines(quality):
            typer.echo(line)
    if priced:
        title = f"one forward over n rows, context {plan.context}: medians of {rounds} (quartiles)"
        show(title, ("rows", *map(str, plan.rows)), price_rows(priced))
    for name, reason in missing.items():
        typer.echo(f"{name} gave up while it was timed ({reason})")
    if plot is not None:
        draw(panels(qualities), plot)
    record = {
        "model": engine.model_id,
        "prompts": len(texts),
        "answer_tokens": sum(len(text.tokens) - text.num_prompt for text in texts),
        "max_tokens": max_tokens,
        "stride": stride,
        "floor": FLOOR,
        "settings": settings.model_dump(mode="json"),
        "drafters": [quality_json(quality) for quality in qualities],
        "prices": {"context": plan.context, "rounds": rounds, "missing": missing, "samples": price_json(priced)},
    }
    finish("drafters", placement, record, json_file)
