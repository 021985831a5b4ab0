"""``graftserve prove``: compare the text of every schedule with plain decoding, on the models as configured.

Exit status: 0 if no text differs beyond near ties, 1 if one does, 2 for what the user can mend.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from app.commands.options import describe, fail, takes_settings
from app.config import Settings


@takes_settings
def prove(
    settings: Settings,
    prompts: Annotated[Path | None, typer.Option(metavar="FILE", help="Prompts, .txt or .jsonl; none: 20 built in.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use the first prompts only.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 128,
    concurrency: Annotated[int, typer.Option(min=1, help="Answers in flight in the runs that are not one by one.")] = 8,
    reference: Annotated[
        str | None,
        typer.Option(metavar="transformers|ar", help="Who decodes plainly at T=0; none: transformers if weights are fp32."),
    ] = None,
    schedules: Annotated[str | None, typer.Option(metavar="NAME,…", help="Schedules to compare; none: all.")] = None,
    seed: Annotated[int, typer.Option(help="Of the runs at temperature 1.")] = 1,
    tolerance: Annotated[
        float | None, typer.Option(min=0, help="Largest score gap of a near tie; none: 0.001 in fp32, 0.05 in half.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result there too.")] = None,
) -> None:
    """Compare every schedule with plain decoding, token by token, on this machine."""
    from rich.console import Console

    from app.commands.loading import load
    from app.commands.progress import answer_bar
    from app.commands.serve import say
    from app.errors import RequestFailed
    from app.local import running
    from app.machine import machine
    from app.prompt_sets import encode, read_prompts
    from app.proof import Judge, Subject, plan_trials, transformers_text, verdict
    from app.proof import prove as compare
    from app.proof_report import as_json, explain, sentence, table
    from engine.request import RequestError
    from models.loading import choose_placement
    from models.reference import PlainModel

    try:
        conversations = read_prompts(prompts, limit)
        placement = choose_placement(settings.device, settings.weights)
    except (ValueError, OSError) as error:
        fail(describe(error))
    reference = reference or ("transformers" if placement.weights == "fp32" else "ar")
    if reference not in ("transformers", "ar"):
        fail(f"reference {reference!r} is not transformers or ar")
    if reference == "transformers" and placement.weights != "fp32":
        fail(f"weights are {placement.weights} here, so transformers' own text is another; add --weights fp32")
    concurrent = max(settings.max_num_seqs, concurrency)
    resolved, loaded = load(settings.model_copy(update={"max_num_seqs": concurrent}))
    engine, tokenizer = loaded.engine, loaded.tokenizer
    names = list(engine.schedules) if schedules is None else schedules.split(",")
    if unknown := [name for name in names if name not in engine.schedules]:
        fail(f"schedule {unknown[0]!r} is not one of {', '.join(engine.schedules)}")

    def load_plain() -> PlainModel:
        return PlainModel.load(resolved.target, placement, num_tokens=engine.vocab_size)

    plain = load_plain() if reference == "transformers" else None
    written = None if plain is None else transformers_text(plain, engine.stop_tokens)
    say(f"reference at temperature 0: {reference} ({placement.weights} weights); above it: ar with the same seed")
    try:
        subject = Subject(engine, [encode(tokenizer, messages) for messages in conversations], max_tokens, seed)
        trials = plan_trials(names, concurrency, plain_is_reference=plain is None)
        judge = Judge(lambda: plain or load_plain(), tolerance)
        with running(engine), answer_bar(len(subject.prompts) * (len(trials) + 2)) as on_answer:
            results = compare(subject, trials, judge, written, on_answer)
    except RequestError as error:
        fail(str(error))
    except RequestFailed as error:
        typer.echo(f"graftserve: {error}", err=True)
        raise typer.Exit(1) from None

    word = verdict(results)
    console = Console(highlight=False)
    console.print(table(results))
    for line in explain(results, lambda ids: tokenizer.decode(ids)):  # type: ignore[attr-defined]
        typer.echo(line)
    typer.echo(sentence(results))
    record = {
        "verdict": word,
        "model": engine.model_id,
        "reference": reference,
        "prompts": len(subject.prompts),
        "max_tokens": max_tokens,
        "concurrency": concurrency,
        "seed": seed,
        "machine": machine(placement),
        "settings": settings.model_dump(mode="json"),
        "results": [as_json(result) for result in results],
    }
    line = json.dumps(record, ensure_ascii=False)
    if json_file is not None:
        json_file.write_text(line + "\n", "utf-8")
    typer.echo(line)
    raise typer.Exit(1 if word == "FAIL" else 0)
