"""Whole answers: tokens per second of every schedule relative to plain decoding, and what explains them.

All schedules, plain decoding (`ar`) among them, answer the same prompts with the same seeds in one run, taking turns after
every group of prompts; who begins changes with every group. The first group is answered once more in front, as a warm-up.
A speed-up is printed only if the texts are those of `ar`, up to near ties (see `app.proof`).

`transformers` does not take part: two threads that compute in one process slow each other down (see `models.threads`).
`bench.forward` compares with it.

    python -m bench.decode --limit 5
    python -m bench.decode --schedules small,treegraft --prompts questions.jsonl --concurrency 4 --repeats 5
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from app.commands.loading import load
from app.commands.options import describe, fail, takes_settings
from app.commands.serve import say
from app.config import Settings
from app.errors import RequestFailed
from app.local import Question, ask_all, running
from app.measure import finish, show, spread
from app.prompt_sets import encode, read_prompts
from app.proof import Difference, Judge, Outcome
from engine.request import DrafterCount, RequestError, RequestStats
from models.loading import choose_placement
from models.reference import PlainModel
from models.sampling import ParamError, SamplingParams
from scheduler.registry import PLAIN

Work = tuple[list[Outcome], list[RequestStats]]  # of one group of prompts


@dataclass(slots=True)
class Method:
    """One way to answer, and what it took. Lists have one entry per repeat."""

    name: str
    answer: Callable[[Sequence[Question]], Work] = field(repr=False)
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    outcomes: list[list[Outcome]] = field(default_factory=list)
    stats: list[RequestStats] = field(default_factory=list)  # of all answers

    def ask(self, group: Sequence[Question]) -> None:
        """Answer a group and add it to the current repeat."""
        start = time.perf_counter()
        outcomes, stats = self.answer(group)
        self.seconds[-1] += time.perf_counter() - start
        self.tokens[-1] += sum(len(outcome.token_ids) for outcome in outcomes)
        self.outcomes[-1] += outcomes
        self.stats += stats

    def next_repeat(self) -> None:
        """Open the lists' next entries."""
        self.seconds.append(0.0)
        self.tokens.append(0)
        self.outcomes.append([])

    def speeds(self) -> list[float]:
        """Tokens per second of each repeat."""
        return [tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds, strict=True)]

    def total(self, name: str) -> float:
        """Sum of a count over all answers."""
        return float(sum(getattr(stats, name) for stats in self.stats))

    def drafters(self) -> dict[str, DrafterCount]:
        """Counts by drafter over all answers."""
        totals: dict[str, DrafterCount] = {}
        for stats in self.stats:
            for name, count in stats.drafters.items():
                total = totals.setdefault(name, DrafterCount())
                total.drafted += count.drafted
                total.accepted += count.accepted
                total.forwards += count.forwards
        return totals


@takes_settings
def main(
    settings: Settings,
    prompts: Annotated[Path | None, typer.Option(metavar="FILE", help=".txt or .jsonl; none: 20 built in.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use the first prompts only.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option()] = 0.0,
    seed: Annotated[int, typer.Option()] = 1,
    schedules: Annotated[str | None, typer.Option(metavar="NAME,…", help="None: all. ar always takes part.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Answers in flight.")] = 1,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE")] = None,
) -> None:
    """Measure the speed of every schedule."""
    try:
        conversations = read_prompts(prompts, limit)
        placement = choose_placement(settings.device, settings.weights)
        SamplingParams(temperature=temperature, seed=seed)
    except (ValueError, OSError, ParamError) as error:
        fail(describe(error))
    changes = {"max_num_seqs": max(settings.max_num_seqs, concurrency)}
    resolved, loaded = load(settings.model_copy(update=changes))
    engine = loaded.engine
    names = [PLAIN, *(name for name in (schedules.split(",") if schedules else engine.schedules) if name != PLAIN)]
    if unknown := [name for name in names if name not in engine.schedules]:
        fail(f"schedule {unknown[0]!r} is not one of {', '.join(engine.schedules)}")

    def ours(schedule: str) -> Method:
        def answer(group: Sequence[Question]) -> Work:
            asked = [Question(q.prompt, q.max_tokens, q.sampling, schedule) for q in group]
            answers = ask_all(engine, asked, concurrency=concurrency)
            return [Outcome(a.token_ids, str(a.finish_reason)) for a in answers], [a.stats for a in answers]

        return Method(schedule, answer)

    methods = [ours(name) for name in names]
    try:
        questions = []
        for index, messages in enumerate(conversations):
            ids = encode(loaded.tokenizer, messages)
            sampling = SamplingParams(temperature=temperature, seed=seed + index)
            questions.append(Question(ids, min(max_tokens, max(engine.max_model_len - len(ids), 1)), sampling))
        with running(engine):
            measure(methods, questions, concurrency=concurrency, repeats=repeats)
    except RequestError as error:
        fail(str(error))
    except RequestFailed as error:
        typer.echo(f"graftserve: {error}", err=True)
        raise typer.Exit(1) from None

    judge = Judge(lambda: PlainModel.load(resolved.target, placement, num_tokens=engine.vocab_size))
    found = {method.name: differences(method, methods[0], questions, judge) for method in methods}
    show(
        f"{engine.model_id}, {placement.weights}, {len(questions)} prompts, {concurrency} at once, T={temperature:g}, "
        f"{repeats} repeats: median (range)",
        ("schedule", "tokens/s", "times ar", "if drafts were free", "tokens/step", "draft s", "verify s", "text"),
        [row(method, methods[0], found[method.name]) for method in methods],
    )
    show(
        "drafted nodes sent to verification, accepted ones, drafter forwards",
        ("schedule", "drafter", "drafted", "accepted", "forwards", "forwards/step"),
        [line for method in methods for line in _drafter_rows(method)],
    )
    is_refused = any(not item.is_near_tie for items in found.values() for item in items)
    if is_refused:
        say("texts differ from plain decoding; see the JSON line, and `graftserve prove`")
    options = {
        "prompts": len(questions),
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "concurrency": concurrency,
        "repeats": repeats,
    }
    methods_json = [as_json(method, found[method.name]) for method in methods]
    record = {**options, "model": engine.model_id, "settings": settings.model_dump(mode="json"), "methods": methods_json}
    finish("decode", placement, record, json_file)
    raise typer.Exit(1 if is_refused else 0)


def measure(methods: Sequence[Method], questions: Sequence[Question], *, concurrency: int, repeats: int) -> None:
    """Let the methods take turns over all questions, `repeats` times, after one group of warm-up."""
    groups = [questions[i : i + concurrency] for i in range(0, len(questions), concurrency)]
    for method in methods:
        method.answer(groups[0])
    turn = 0
    for repeat in range(repeats):
        for method in methods:
            method.next_repeat()
        for group in groups:
            for offset in range(len(methods)):
                methods[(turn + offset) % len(methods)].ask(group)
            turn += 1
        say(f"repeat {repeat + 1} of {repeats} done")


def differences(method: Method, plain: Method, questions: Sequence[Question], judge: Judge) -> list[Difference]:
    """Where the method's texts part from those of plain decoding, over all repeats."""
    found = []
    for outcomes in method.outcomes:
        # The first repeat of `plain` is the reference, for its own later repeats too.
        for index, (question, expected, got) in enumerate(zip(questions, plain.outcomes[0], outcomes, strict=True)):
            found.append(judge.weigh(index, question, expected, got))
    return [item for item in found if item is not None]


def row(method: Method, plain: Method, found: Sequence[Difference]) -> tuple[str, ...]:
    """A line of the table. There is no speed-up in it if a text differs by more than a near tie."""
    is_refused = any(not item.is_near_tie for item in found)
    text = "DIFFERS" if is_refused else f"{len(found)} near ties" if found else "equal"
    speeds = method.speeds()
    steps = method.total("num_steps")
    draft_s = method.total("draft_s")
    ratios = [ours / base for ours, base in zip(speeds, plain.speeds(), strict=True)]
    # What is left of the time if drafting took none: no drafter could do better with these trees.
    limit = sum(ratios) / len(ratios) * sum(method.seconds) / max(sum(method.seconds) - draft_s, 1e-9)
    return (
        method.name,
        str(spread(speeds)),
        "refused" if is_refused else str(spread(ratios)),
        "refused" if is_refused else f"{limit:.2f}" if draft_s else "",
        f"{method.total('num_output_tokens') / steps:.2f}" if steps else "",
        f"{draft_s:.2f}" if steps else "",
        f"{method.total('verify_s'):.2f}" if steps else "",
        text,
    )


def as_json(method: Method, found: Sequence[Difference]) -> dict[str, Any]:
    """Raw samples and counts of one method, over all repeats."""
    totals = ("num_steps", "num_output_tokens", "num_verified_nodes", "num_grafts", "draft_s", "verify_s")
    return {
        "name": method.name,
        "seconds": method.seconds,
        "tokens": method.tokens,
        **{name: sum(getattr(stats, name) for stats in method.stats) for name in totals},
        "drafters": {name: asdict(count) for name, count in method.drafters().items()},
        "differences": [{**asdict(item), "is_near_tie": item.is_near_tie} for item in found],
    }


def _drafter_rows(method: Method) -> list[tuple[str, ...]]:
    steps = max(method.total("num_steps"), 1)
    return [
        (method.name, name, str(c.drafted), str(c.accepted), str(c.forwards), f"{c.forwards / steps:.2f}")
        for name, c in method.drafters().items()
    ]


if __name__ == "__main__":
    typer.run(main)
