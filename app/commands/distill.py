"""``graftserve distill``: make a drafter for a target. Interrupted with Ctrl-C, it goes on where it was when called again."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from app.commands.options import describe, fail


def distill(
    out: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the drafter, its log and its curves go.")],
    target: Annotated[str, typer.Option(help="Target model: 'embedded', a folder or a hub id.")] = "embedded",
    student: Annotated[
        str, typer.Option(metavar="head:N|lm:N", help="Family and number of layers: head:3, head:8, lm:6 or another lm.")
    ] = "head:3",
    data: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Training data; none: FOLDER/data.")] = None,
    data_tokens: Annotated[int, typer.Option(min=1, help="Tokens the target writes, if they are not there yet.")] = 1_000_000,
    text: Annotated[list[Path] | None, typer.Option(metavar="FILE", help="Text to learn from as well; repeatable.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to train on, each as often as it is read.")] = 4_000_000,
    minutes: Annotated[float | None, typer.Option(min=0, help="Stop training after these; a later call goes on.")] = None,
    vocab: Annotated[int, typer.Option(min=1, help="Most frequent target ids that the drafter can propose.")] = 8192,
    depths: Annotated[int, typer.Option(min=1, max=8, help="Steps a head is unrolled in training.")] = 3,
    rank: Annotated[
        int, typer.Option(min=0, help="Rank of the difference between a head's layers and the target's; 0: train all of them.")
    ] = 64,
    learning_rate: Annotated[float, typer.Option(min=0.0, help="At its highest.")] = 2e-3,
    regression: Annotated[float, typer.Option(min=0.0, help="Weight of the distance to the target's hidden state.")] = 0.0,
    length: Annotated[int, typer.Option(min=16, help="Tokens per training text.")] = 512,
    texts: Annotated[int, typer.Option(min=1, help="Texts the target writes at once.")] = 64,
    held_out: Annotated[int, typer.Option(min=1, help="Texts kept for evaluation.")] = 32,
    seed: Annotated[int, typer.Option(help="Of data and training.")] = 0,
    device: Annotated[str, typer.Option(help="Torch device; auto: a GPU if there is one.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; none: torch's choice.")] = None,
) -> None:
    """Train a drafter for a target, on text that the target writes itself."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    from app.commands.loading import local_target
    from app.commands.serve import say
    from app.distill_plot import training_panels
    from app.plots import draw
    from distill.run import Recipe, make_drafter
    from distill.train import read_log
    from models.loading import choose_placement, load_model, load_tokenizer

    match = re.fullmatch(r"(head|lm):([1-9]\d*)", student)
    if match is None:
        fail(f"student = {student!r}: expected head:N or lm:N")
    if threads is not None:
        torch.set_num_threads(threads)
    disable_progress_bar()
    recipe = Recipe(
        family=match[1],  # type: ignore[arg-type]
        num_layers=int(match[2]),
        data_tokens=data_tokens,
        tokens=tokens,
        minutes=minutes,
        vocab=vocab,
        depths=depths,
        rank=rank,
        learning_rate=learning_rate,
        regression=regression,
        length=length,
        texts=texts,
        held_out=held_out,
        seed=seed,
    )
    try:
        extra = "\n".join(map(_read_text, text or ()))
        source = local_target(target)
        placement = choose_placement(device, "fp32")
        tokenizer = load_tokenizer(source)
        with _bars() as bars:
            made = make_drafter(
                lambda: load_model(source, placement),
                tokenizer,
                Path(source).name,
                recipe,
                out,
                data or out / "data",
                extra,
                bars,
            )
        draw(training_panels(read_log(out)), out / "curves.svg", f"{student} for {Path(source).name}")
    except (ValueError, ArithmeticError, OSError) as error:
        fail(describe(error))
    say(made)


def _read_text(path: Path) -> str:
    """A text file's content. ValueError that names it if it is none, or empty."""
    try:
        content = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a text in UTF-8: {error.reason} at byte {error.start}") from error
    if not content.strip():
        raise ValueError(f"{path}: an empty text")
    return content


@contextmanager
def _bars() -> Iterator[Callable[[str, int, int, str], None]]:
    """Progress bars on standard error, one per stage: (stage, done, total, remark)."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

    left, right = TextColumn("{task.description}"), TextColumn("{task.fields[remark]}")
    columns = (left, BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), right)
    with Progress(*columns, console=Console(stderr=True)) as progress:
        tasks: dict[str, TaskID] = {}

        def show(stage: str, done: int, total: int, remark: str) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total, remark=remark)
            progress.update(tasks[stage], completed=done, total=total, remark=remark)

        yield show
