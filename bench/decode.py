"""Whole answers: tokens per second of every schedule relative to plain decoding, and what explains them.

All schedules, plain decoding (`ar`) among them, answer the same prompts with the same seeds in one run, taking turns after
every prompt (or group of prompts, if several are answered at once); who begins changes with every one. The first is answered
once more in front, as a warm-up. A speed-up is printed only if the texts are those of `ar`, up to near ties (see `app.proof`).

With `--transformers` its own `generate`, unmodified and in float32, takes turns too, in a process of its own. Its weights may
differ from ours in how they are rounded, and then so does its text: only its speed is compared.

    python -m bench.decode --limit 5
    python -m bench.decode --schedules small,treegraft --prompts questions.jsonl --concurrency 4 --repeats 5
    python -m bench.decode --prompts questions.jsonl --transformers --transformers-limit 20 --log long-run.jsonl
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import drafters
from app.commands.loading import load
from app.commands.options import describe, fail, takes_settings
from app.commands.serve import say
from app.config import Settings
from app.errors import RequestFailed
from app.local import Question, ask_all, running
from app.machine import machine
from app.measure import finish, show
from app.prompt_sets import encode, read_prompt_set
from app.proof import Judge, Outcome
from app.serving import LoadedEngine
from bench.decode_report import TRANSFORMERS, Results, as_json, category_tables, drafter_rows, table
from bench.plain_process import PlainProcess, PlainProcessFailed
from bench.run_log import RunLog, file_states
from bench.turns import Method, Work, differences, measure
from engine.request import FinishReason, RequestError
from models.loading import choose_placement
from models.reference import PlainModel
from models.sampling import ParamError, SamplingParams
from scheduler.registry import PLAIN


@takes_settings
def main(
    settings: Settings,
    prompts: Annotated[Path | None, typer.Option(metavar="FILE", help=".txt or .jsonl; none: 20 built in.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use the first prompts only.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option()] = 0.0,
    seed: Annotated[int, typer.Option()] = 1,
    schedules: Annotated[str | None, typer.Option(metavar="NAME,…", help="None: all. ar always takes part.")] = None,
    transformers: Annotated[bool, typer.Option("--transformers", help="Time transformers' own generate too.")] = False,
    transformers_limit: Annotated[
        int | None, typer.Option(min=1, help="Ask transformers so many prompts only, spread evenly over all.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Answers in flight.")] = 1,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    log: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write each measurement there, or go on where FILE ends.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE")] = None,
) -> None:
    """Measure the speed of every schedule."""
    if transformers and (temperature > 0 or concurrency > 1):
        fail("transformers answers one prompt at a time and at temperature 0; leave out --concurrency and --temperature")
    for file in (log, json_file):
        if file is not None and not file.parent.is_dir():  # known before the measuring, not after it
            fail(f"{file}: there is no folder {file.parent}")
    try:
        asked = read_prompt_set(prompts, limit)
        placement = choose_placement(settings.device, settings.weights)
        SamplingParams(temperature=temperature, seed=seed)
    except (ValueError, OSError, ParamError) as error:
        fail(describe(error))
    # Without the prefix cache: whoever answers a prompt second would not have to read it.
    changes = {"max_num_seqs": max(settings.max_num_seqs, concurrency), "prefix_cache": False}
    resolved, loaded = load(settings.model_copy(update=changes))
    engine = loaded.engine
    names = [PLAIN, *dict.fromkeys(n for n in (schedules.split(",") if schedules else engine.schedules) if n != PLAIN)]
    if unknown := [name for name in names if name not in engine.schedules]:
        fail(f"schedule {unknown[0]!r} is not one of {', '.join(engine.schedules)}")

    methods = [_ours(loaded, name, concurrency) for name in names]
    here = machine(placement)
    commits = [here["commit"]]
    try:
        questions = []
        for index, prompt in enumerate(asked):
            ids = encode(loaded.tokenizer, prompt.messages)
            sampling = SamplingParams(temperature=temperature, seed=seed + index)
            questions.append(Question(ids, min(max_tokens, max(engine.max_model_len - len(ids), 1)), sampling))
        with ExitStack() as stack:
            run_log = None
            chosen = spread_evenly(len(questions), transformers_limit) if transformers else None
            if log is not None:
                what = _identity(resolved, loaded, names, questions, concurrency, chosen, here)
                run_log = stack.enter_context(_open_log(log, what, here["commit"]))
                commits = run_log.commits
            if chosen is not None:
                process = stack.enter_context(_plain_process(loaded, resolved))
                methods.append(_transformers(process, engine.stop_tokens, chosen))
            stack.enter_context(running(engine))
            measure(methods, questions, concurrency=concurrency, repeats=repeats, log=run_log)
    except RequestError as error:
        fail(str(error))
    except (RequestFailed, PlainProcessFailed) as error:
        typer.echo(f"graftserve: {error}", err=True)
        raise typer.Exit(1) from None

    judge = Judge(lambda: PlainModel.load(resolved.target, placement, num_tokens=engine.vocab_size))
    compared = [method for method in methods if method.name != TRANSFORMERS]
    found = {method.name: differences(method, methods[0], questions, judge) for method in compared}
    results = Results(methods, found, concurrency, [prompt.category for prompt in asked])
    _show(
        results,
        f"{engine.model_id}, {placement.weights}, {len(questions)} prompts, {concurrency} at once, T={temperature:g}, "
        f"{repeats} repeats",
    )
    options = {
        "prompts": len(questions),
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "concurrency": concurrency,
        "repeats": repeats,
        "transformers_limit": transformers_limit,
        "categories": results.categories,
        "commits": commits,  # more than one if a run was gone on with
    }
    methods_json = [as_json(results, method) for method in methods]
    record = {**options, "model": engine.model_id, "settings": settings.model_dump(mode="json"), "methods": methods_json}
    finish("decode", placement, record, json_file)
    raise typer.Exit(1 if results.refused else 0)


def spread_evenly(total: int, number: int | None) -> frozenset[int]:
    """`number` of the indices below `total`, at equal distances, the first one among them; all if `number` is None."""
    number = total if number is None else min(number, total)
    return frozenset(i * total // number for i in range(number))


def _ours(loaded: LoadedEngine, schedule: str, concurrency: int) -> Method:
    def answer(group: Sequence[Question]) -> Work:
        asked = [Question(q.prompt, q.max_tokens, q.sampling, schedule) for q in group]
        start = time.perf_counter()
        answers = ask_all(loaded.engine, asked, concurrency=concurrency)
        seconds = time.perf_counter() - start
        outcomes = tuple(Outcome(a.token_ids, str(a.finish_reason)) for a in answers)
        return Work(seconds, outcomes, tuple(a.stats for a in answers))

    return Method(schedule, answer)


def _transformers(process: PlainProcess, stop_tokens: frozenset[int], groups: frozenset[int]) -> Method:
    """One prompt at a time, so that a group is a prompt. Its seconds are its own, without the way through the pipes."""

    def answer(group: Sequence[Question]) -> Work:
        (question,) = group
        ids, seconds = process.generate(question.prompt, question.max_tokens)
        reason = FinishReason.STOP if ids[-1] in stop_tokens else FinishReason.LENGTH
        return Work(seconds, (Outcome(tuple(ids), str(reason)),))

    return Method(TRANSFORMERS, answer, groups)


def _plain_process(loaded: LoadedEngine, resolved: Settings) -> PlainProcess:
    say("loading the model once more for transformers' generate (float32)")
    engine = loaded.engine
    return PlainProcess.start(
        resolved.target,
        resolved.device,
        threads=torch.get_num_threads(),
        num_tokens=engine.vocab_size,
        stop_tokens=engine.stop_tokens,
    )


def _identity(
    resolved: Settings,
    loaded: LoadedEngine,
    names: Sequence[str],
    questions: Sequence[Question],
    concurrency: int,
    transformers: frozenset[int] | None,
    here: dict[str, Any],
) -> dict[str, Any]:
    """What measurements must have in common to stand in one log; only `repeats` may grow."""
    asked = repr([(q.prompt, q.max_tokens, q.sampling) for q in questions])
    set_to = resolved.model_dump(mode="json")
    shipped = Path(drafters.__file__).parent / "pretrained"
    named = [Path(value) for value in set_to.values() if isinstance(value, str)]  # those that are paths, that is
    return {
        "settings": set_to,
        "schedules": {name: str(loaded.engine.schedules[name]) for name in names},
        "transformers": None if transformers is None else sorted(transformers),
        "concurrency": concurrency,
        "prompts": {"number": len(questions), "tokens and sampling": hashlib.sha256(asked.encode()).hexdigest()[:16]},
        "model files": file_states(path for path in [*named, shipped] if path.exists()),
        "machine": {name: value for name, value in here.items() if name != "commit"},
    }


def _open_log(file: Path, identity: dict[str, Any], commit: str | None) -> RunLog:
    try:
        log = RunLog.open(file, identity, commit)
    except (ValueError, OSError) as error:
        fail(describe(error))
    if len(log):
        say(f"{len(log)} measurements are in {file} already")
    return log


def _show(results: Results, title: str) -> None:
    where = "prompts" if results.concurrency == 1 else "repeats"
    lines = [title, f"tokens/s: median (range) of repeats; times: median and 10-90 % of {where}"]
    if results.other():
        lines.append("transformers: its unmodified generate in float32; its speed is compared, not its text")
    show("\n".join(lines), *table(results))
    rows = [line for method in results.methods for line in drafter_rows(method)]
    if rows:
        titles = ("schedule", "drafter", "drafted", "accepted", "forwards", "forwards/step")
        show("drafted nodes sent to verification, accepted ones, drafter forwards", titles, rows)
    for category_table in category_tables(results):
        show(*category_table)
    if results.refused:
        say("texts differ from plain decoding; see the JSON line, and `graftserve prove`")


if __name__ == "__main__":
    typer.run(main)
