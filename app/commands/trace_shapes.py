"""``graftserve trace-shapes``: what every shape of a delayed tree is worth along texts of the target, to train a selector.

    graftserve trace-shapes --verifier specinfer --out shapes.jsonl
    graftserve fit-scheduler shapes.jsonl --kind nde --out selector.safetensors

Exit status: 0, 1 for our own failures, 2 for what the user can mend.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.commands.options import describe, fail, takes_settings
from app.commands.texts import written_texts
from app.commands.trace import named_profile
from app.config import Settings

if TYPE_CHECKING:
    from app.drafter_quality import Text
    from app.teacher_forcing import Memory

_TEMPERATURES = (0.0, 0.7, 1.0)


@takes_settings
def trace_shapes(
    settings: Settings,
    out: Annotated[Path, typer.Option(metavar="FILE.jsonl", help="Where the labels go.")],
    prompts: Annotated[Path | None, typer.Option(metavar="FILE", help="Prompts, .txt or .jsonl; none: 20 built in.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use the first prompts only.")] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Longest answer, in tokens.")] = 128,
    verifier: Annotated[
        str, typer.Option(metavar="RULE", help="Rule that would verify: walk, naive, specinfer, spectr, khisti.")
    ] = "specinfer",
    drafter_name: Annotated[str, typer.Option("--drafter", metavar="NAME", help="Who draws: small or medium.")] = "medium",
    temperatures: Annotated[
        list[float] | None,
        typer.Option("--temperature", min=0.0, max=2.0, help="Of answers and drafts; repeatable. None: 0, 0.7 and 1."),
    ] = None,
    top_p: Annotated[float, typer.Option(min=0.01, max=1.0, help="Of target and drafter.")] = 1.0,
    trees: Annotated[int, typer.Option(min=1, help="Drawn per root.")] = 4,
    stride: Annotated[int, typer.Option(min=1, help="Label every Nth token of an answer.")] = 16,
    profile_file: Annotated[
        Path | None, typer.Option("--profile", metavar="FILE", help="Prices; none: this machine's, measured if need be.")
    ] = None,
    minutes: Annotated[float | None, typer.Option(min=0, help="Begin no further answer after these.")] = None,
) -> None:
    """Label roots along answers, one per prompt and temperature, with the expected tokens of every delayed tree."""
    from itertools import product

    from app.calibration import profile_for
    from app.commands.loading import load
    from app.commands.serve import say
    from app.prompt_sets import read_prompt_set
    from app.selector_labels import LabelPlan, NoDistribution, label_text
    from app.teacher_forcing import read_text
    from engine.engine import Engine
    from models.kv_cache import OutOfRows
    from models.sampling import SamplingParams
    from scheduler.selector_samples import LabelHeader, label_line, labels_header_line
    from verify.efficiency import LAWS

    # Laws of other draws than a delayed tree's would label it wrongly.
    rules = [name for name in LAWS if name != "specinfer-distinct"]
    if verifier not in rules:
        fail(f"--verifier {verifier}: shapes can be valued for {', '.join(rules)}")
    if not out.parent.is_dir():
        fail(f"{out}: there is no folder {out.parent}")
    try:
        # A prompt with all its temperatures, then the next: what a deadline leaves out is of no one kind.
        asked = list(product(enumerate(read_prompt_set(prompts, limit)), temperatures or _TEMPERATURES))
        samplings = [SamplingParams(temperature, top_p, seed=number) for (number, _), temperature in asked]
        given = None if profile_file is None else named_profile(profile_file)
    except (ValueError, OSError) as error:
        message = describe(error)
        fail(message if prompts is None or str(prompts) in message else f"{prompts}: {message}")
    settings, loaded = load(settings)
    engine = loaded.engine
    assert isinstance(engine, Engine), "models can be asked in this very process only"
    drafter = engine.drafters.get(drafter_name)
    if drafter is None or not drafter.runs_model:
        fail(f"--drafter {drafter_name}: a drafter with a model of its own is needed; set --{drafter_name}")
    profile = given or profile_for(loaded, settings, say)
    texts = written_texts(loaded, [prompt.messages for (_, prompt), _ in asked], max_tokens, samplings)
    say(f"{len(texts)} answers of {engine.model_id}")

    # The engine's thread is gone; from here on this one computes, and it alone.
    target, start, count = engine.target, time.monotonic(), 0

    def memory_of(text: Text, layers: tuple[int, ...]) -> Memory:
        return read_text(target, text.tokens, layers, chunk=settings.prefill_chunk)

    with out.open("w", encoding="utf-8") as file:
        file.write(labels_header_line(LabelHeader(engine.model_id, drafter.name, verifier, trees), profile))
        for place, (text, sampling, ((number, _), _)) in enumerate(zip(texts, samplings, asked, strict=True)):
            if minutes is not None and time.monotonic() - start > 60 * minutes:
                say(f"time is over; {len(texts) - place} answers are left out")
                break
            plan = LabelPlan(target, drafter, LAWS[verifier], sampling, engine.stop_tokens, trees, stride)
            try:
                for label in label_text(text, number, plan, memory_of):
                    file.write(label_line(label))
                    count += 1
            except (NoDistribution, OutOfRows) as refusal:
                say(f"prompt {number} at {sampling.temperature:g} ends early: {refusal}")
    say(f"{count} roots of {len(texts)} answers labeled in {out}")
