"""``graftserve trace``: log decoding steps with everything that could have been drafted in them, to fit and compare schedulers.

    graftserve trace --prompts questions.jsonl --out steps.jsonl
    graftserve fit-scheduler steps.jsonl --out rule.json
    graftserve simulate steps.jsonl --profile h200-8b

Exit status: 0, 1 for our own failures, 2 for what the user can mend.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.commands.options import describe, fail, takes_settings
from app.commands.texts import written_texts
from app.config import Settings

if TYPE_CHECKING:
    from app.drafter_quality import Text
    from app.teacher_forcing import Memory
    from scheduler.cost import CostProfile


@takes_settings
def trace(
    settings: Settings,
    out: Annotated[Path, typer.Option(metavar="FILE.jsonl", help="Where the trace goes.")],
    prompts: Annotated[Path | None, typer.Option(metavar="FILE", help="Prompts, .txt or .jsonl; none: 20 built in.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use the first prompts only.")] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Longest answer, in tokens.")] = 128,
    drafting_steps: Annotated[int, typer.Option(min=1, max=5, help="Letters of a word; a record holds 2^N trees.")] = 3,
    stride: Annotated[int, typer.Option(min=1, help="Log every Nth token of an answer.")] = 4,
    schedule_name: Annotated[
        str, typer.Option("--graft", metavar="NAME", help="Schedule whose trees are grown; it must graft.")
    ] = "treegraft",
    profile_file: Annotated[
        Path | None, typer.Option("--profile", metavar="FILE", help="Prices; none: this machine's, measured if need be.")
    ] = None,
    minutes: Annotated[float | None, typer.Option(min=0, help="Begin no further prompt after these.")] = None,
) -> None:
    """Log decoding steps along greedy answers, with a tree for every order in which the drafters could take turns."""
    from app.calibration import profile_for
    from app.commands.loading import load
    from app.commands.serve import say
    from app.prompt_sets import read_prompt_set
    from app.teacher_forcing import read_text
    from app.tracing import GaveUp, memory_rows, plan_for, trace_text
    from engine.engine import Engine
    from scheduler.features import FEATURES
    from scheduler.schedule import Action
    from scheduler.traces import Header, cost_ratio, header_line, record_line

    if not out.parent.is_dir():
        fail(f"{out}: there is no folder {out.parent}")
    try:
        asked = read_prompt_set(prompts, limit)
        given = None if profile_file is None else named_profile(profile_file)
    except (ValueError, OSError) as error:
        message = describe(error)
        fail(message if prompts is None or str(prompts) in message else f"{prompts}: {message}")
    settings, loaded = load(settings)
    engine = loaded.engine
    assert isinstance(engine, Engine), "models can be asked in this very process only"
    schedule = engine.schedules.get(schedule_name)
    if schedule is None:
        fail(f"--graft {schedule_name}: these drafters offer {', '.join(engine.schedules)}; set --medium for one that grafts")
    profile = given or profile_for(loaded, settings, say)
    try:
        plan = plan_for(
            schedule,
            engine.drafters,
            depth=drafting_steps,
            stride=stride,
            stop_tokens=engine.stop_tokens,
            vocab_size=engine.vocab_size,
            cost_ratio=lambda context: cost_ratio(profile, schedule.drafters[Action.MEDIUM], context),
        )
    except ValueError as error:
        fail(str(error))
    texts = written_texts(loaded, [prompt.messages for prompt in asked], max_tokens)
    say(f"{len(texts)} answers of {engine.model_id}")

    # The engine's thread is gone; from here on this one computes, and it alone.
    target, start, count = engine.target, time.monotonic(), 0

    def memory_of(text: Text, layers: tuple[int, ...]) -> Memory:
        return read_text(target, text.tokens, layers, chunk=settings.prefill_chunk)

    header = Header(
        engine.model_id, plan.drafters["S"].name, plan.drafters["M"].name, drafting_steps, schedule.budget, stride, FEATURES
    )
    with out.open("w", encoding="utf-8") as file:
        file.write(header_line(header, profile))
        for number, (text, prompt) in enumerate(zip(texts, asked, strict=True)):
            if minutes is not None and time.monotonic() - start > 60 * minutes:
                say(f"time is over; {len(texts) - number} prompts are left out")
                break
            if memory_rows([text], list(plan.drafters.values())) > target.pool.num_free:
                say(f"prompt {number} is left out: kv_rows has no room for its text twice")
                continue
            try:
                for record in trace_text(text, number, prompt.category, plan, memory_of):
                    file.write(record_line(record))
                    count += 1
            except GaveUp as refusal:
                say(f"prompt {number} ends early: {refusal}")
    say(f"{count} positions of {len(texts)} answers logged in {out}")


def named_profile(name: Path) -> CostProfile:
    """The cost profile in a file, or the one of that name that comes with the program. ValueError, OSError."""
    from scheduler.cost import CostProfile
    from scheduler.profiles import PROFILES

    file = PROFILES / f"{name}.json" if not name.suffix and not name.exists() else name
    if not file.is_file():
        known = ", ".join(sorted(path.stem for path in PROFILES.glob("*.json")))
        raise ValueError(f"--profile {name}: no such file, and not one of {known}")
    try:
        return CostProfile.from_json(file.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
