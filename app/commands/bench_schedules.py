"""``graftserve bench schedules``: tokens per second of every schedule relative to plain decoding, and what explains them.

All schedules, plain decoding (`ar`) among them, answer the same prompts with the same seeds in one run, taking turns after
every prompt (or group of prompts, if several are answered at once); who begins changes with every one. The first is answered
once more in front, as a warm-up. A speed-up is printed only if the texts are those of `ar`, up to near ties (see `app.proof`).

transformers takes part in a process of its own, unmodified and in float32: its `generate`, also with prompt lookup or with an
assistant model. Its weights may differ from ours in how they are rounded, and then so does its text: only its speed is
compared.

    graftserve bench schedules --limit 5
    graftserve bench schedules --schedules small,treegraft --prompts questions.jsonl --concurrency 4 --repeats 5
    graftserve bench schedules --prompts questions.jsonl --transformers --transformers-limit 20 --log long-run.jsonl
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.commands.options import describe, fail
from app.config import Settings

if TYPE_CHECKING:
    from app.decode_bench.report import Results
    from scheduler.cost import LatencyModel


def schedules(
    settings: Settings,
    prompts: Annotated[Path | None, typer.Option(metavar="FILE", help=".txt or .jsonl; none: 20 built in.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use the first prompts only.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 128,
    temperature: Annotated[float, typer.Option()] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the first prompt; the next one has the next seed.")] = 1,
    schedules: Annotated[str | None, typer.Option(metavar="NAME,…", help="None: all. ar always takes part.")] = None,
    transformers: Annotated[bool, typer.Option("--transformers", help="Time transformers' own generate too.")] = False,
    transformers_lookup: Annotated[
        bool, typer.Option("--transformers-lookup", help="Time its generate with prompt lookup too.")
    ] = False,
    lookup_tokens: Annotated[int, typer.Option(min=1, help="Tokens that its prompt lookup copies at a time.")] = 10,
    transformers_assisted: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Time its generate assisted by MODEL too.")
    ] = None,
    transformers_limit: Annotated[
        int | None, typer.Option(min=1, help="Ask transformers so many prompts only, spread evenly over all.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Answers in flight.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Times that all prompts are asked.")] = 3,
    log: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write each measurement there, or go on where FILE ends.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result there too.")] = None,
    plots: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Draw the results there, as PNG files.")] = None,
) -> None:
    """Measure the speed of every schedule, in one interleaved run."""
    from app.commands.loading import load
    from app.decode_bench.methods import THEIRS, Theirs
    from app.decode_bench.plain_process import PlainProcessFailed
    from app.decode_bench.record import as_json
    from app.decode_bench.report import Results
    from app.decode_bench.run import Plan, answer_all, open_log, questions_of
    from app.decode_bench.turns import differences
    from app.errors import RequestFailed
    from app.machine import machine
    from app.measure import finish
    from app.prompt_sets import read_prompt_set
    from app.proof import Judge
    from engine.engine import Engine
    from engine.request import RequestError
    from models.loading import choose_placement
    from models.reference import PlainModel
    from models.sampling import ParamError, SamplingParams
    from scheduler.registry import PLAIN

    theirs = Theirs(transformers, lookup_tokens if transformers_lookup else None, transformers_assisted)
    if theirs.names and (temperature > 0 or concurrency > 1):
        fail("transformers answers one prompt at a time and at temperature 0; leave out --concurrency and --temperature")
    for file in (log, json_file, plots):
        if file is not None and not file.parent.is_dir():  # known before the measuring, not after it
            fail(f"{file}: there is no folder {file.parent}")
    if plots is not None and plots.exists() and not plots.is_dir():
        fail(f"{plots}: is no folder")
    try:
        asked = read_prompt_set(prompts, limit)
        placement = choose_placement(settings.device, settings.weights)
        SamplingParams(temperature=temperature, seed=seed)
        if transformers_assisted is not None:
            _check_model(transformers_assisted)
    except (ValueError, OSError, ParamError) as error:
        fail(describe(error))
    # Without the prefix cache: whoever answers a prompt second would not have to read it.
    changes = {"max_num_seqs": max(settings.max_num_seqs, concurrency), "prefix_cache": False}
    resolved, loaded = load(settings.model_copy(update=changes))
    engine = loaded.engine
    names = [PLAIN, *dict.fromkeys(n for n in (schedules.split(",") if schedules else engine.schedules) if n != PLAIN)]
    if unknown := [name for name in names if name not in engine.schedules]:
        fail(f"schedule {unknown[0]!r} is not one of {', '.join(engine.schedules)}")

    plan = Plan(names, max_tokens, temperature, seed, concurrency, repeats, theirs, transformers_limit)
    here = machine(placement)
    try:
        questions = questions_of(loaded, asked, plan)
        run_log = None if log is None else open_log(log, resolved, loaded, questions, plan, here)
    except (RequestError, ValueError, OSError) as error:
        fail(describe(error))
    try:
        with nullcontext() if run_log is None else run_log:  # an empty log is false
            methods = answer_all(resolved, loaded, questions, plan, run_log)
    except RequestError as error:
        fail(str(error))
    except (RequestFailed, PlainProcessFailed) as error:
        typer.echo(f"graftserve: {error}", err=True)
        raise typer.Exit(1) from None

    judge = Judge(lambda: PlainModel.load(resolved.target, placement, num_tokens=engine.vocab_size))
    compared = [method for method in methods if method.name not in THEIRS]
    found = {method.name: differences(method, methods[0], questions, judge) for method in compared}
    results = Results(methods, found, concurrency, [prompt.category for prompt in asked])
    _show(
        results,
        f"{engine.model_id}, {placement.weights}, {len(questions)} prompts, {concurrency} at once, T={temperature:g}, "
        f"{repeats} repeats",
    )
    if plots is not None:
        context = sum(len(question.prompt) + question.max_tokens // 2 for question in questions) // len(questions)
        assert isinstance(engine, Engine), "models can be measured in this very process only"
        _draw(results, {} if engine.auto is None else engine.auto.costs.profile.models, context, plots)
    record = {
        "prompts": len(questions),
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "concurrency": concurrency,
        "repeats": repeats,
        "transformers_limit": transformers_limit,
        "transformers_lookup_tokens": theirs.lookup,
        "transformers_assistant": theirs.assistant,
        "categories": results.categories,
        "commits": [here["commit"]] if run_log is None else run_log.commits,  # more than one if a run was gone on with
        "model": engine.model_id,
        "settings": settings.model_dump(mode="json"),
        "methods": [as_json(results, method) for method in methods],
    }
    finish("schedules", placement, record, json_file)
    raise typer.Exit(1 if results.refused else 0)


def _check_model(name: str) -> None:
    """ValueError or OSError for what is no model that transformers knows."""
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(name)
    except (ValueError, OSError) as error:
        raise ValueError(f"--transformers-assisted {name}: {describe(error)}") from error


def _show(results: Results, title: str) -> None:
    from app.commands.serve import say
    from app.decode_bench.methods import THEIRS
    from app.decode_bench.report import fallback_lines, tables
    from app.measure import show

    typer.echo(title)
    if any(method.name in THEIRS for method in results.methods):
        typer.echo("transformers: its unmodified generate in float32; its speed is compared, not its text")
    for table in tables(results):
        show(*table)
    for line in fallback_lines(results):
        typer.echo(line)
    if results.refused:
        say("texts differ from plain decoding; see the JSON line, and `graftserve prove`")


def _draw(results: Results, costs: Mapping[str, LatencyModel], context: int, folder: Path) -> None:
    from app.commands.serve import say
    from app.decode_bench.charts import draw_all

    try:
        files = draw_all(results, costs, context, folder)
    except OSError as error:  # the figures of a long run are worth more than their drawing
        say(f"{folder}: nothing is drawn: {describe(error)}")
    else:
        say(f"drawn: {', '.join(map(str, files))}")
