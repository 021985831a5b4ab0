"""One run of `graftserve distill`, from a target to a folder with a drafter in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from distill.batches import Texts
from distill.beginnings import begin_head, begin_lm, head_layers, recorded_layers, spread_layers
from distill.card import model_card
from distill.data import DataPlan, count_tokens, write_data
from distill.students import HeadStudent, LMStudent
from distill.train import LOG, Progress, TrainPlan, read_log, read_state, train
from drafters.vocab import tokenizer_hash
from models.draft_files import DrafterInfo, is_drafter_folder, save_drafter

Show = Callable[[str, int, int, str], None]
"""(stage, done, total, remark): called whenever there is something to show."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What `graftserve distill` was asked for; see its help for each value."""

    family: Literal["head", "lm"]
    num_layers: int
    data_tokens: int = 1_000_000
    tokens: int = 4_000_000
    minutes: float | None = None
    vocab: int = 8192
    depths: int = 3
    rank: int = 64
    learning_rate: float = 2e-3
    regression: float = 0.0
    length: int = 512
    texts: int = 64
    held_out: int = 32
    seed: int = 0


def make_drafter(
    load: Callable[[], nn.Module],
    tokenizer: Any,
    name: str,
    recipe: Recipe,
    out: Path,
    data: Path,
    extra_text: str,
    show: Show,
) -> str:
    """Write what data is missing, train, and store the drafter in `out`. Returns a line about what was made.

    `load` gives a fresh copy of the target in float32. ValueError and OSError for what the user can mend, where possible
    before anything is written; ArithmeticError if training diverges.
    """
    if (out / "config.json").exists() and not is_drafter_folder(out):
        raise ValueError(f"{out} holds a config.json that is not a drafter's; give another folder")
    out.mkdir(parents=True, exist_ok=True)
    (out / LOG).touch()  # whether a folder can be written to should be known before hours of work
    target = load()
    config: Any = target.config.get_text_config()  # type: ignore[operator, union-attr]
    layers = recorded_layers(config.num_hidden_layers)
    _chosen_layers(recipe, layers, config.num_hidden_layers)  # likewise whether there is such a student
    identity = tokenizer_hash(tokenizer)
    extra = tokenizer.encode(extra_text, add_special_tokens=False) if extra_text else []
    stops: Any = target.generation_config.eos_token_id  # type: ignore[union-attr]
    stops = frozenset(stops if isinstance(stops, list) else [] if stops is None else [stops])
    _write(load, tokenizer, recipe, data, layers, identity, stops, extra, show)

    texts = Texts(data, held_out=recipe.held_out, seed=recipe.seed)
    if texts.shards[0].final.shape[-1] != config.hidden_size:
        raise ValueError(f"{data} holds data of a target whose hidden size is not {config.hidden_size}; give another folder")
    device = next(target.parameters()).device
    student, ids = _student(target, texts, _draft_ids(texts, recipe, out), recipe, layers)
    num_parameters = sum(p.numel() for p in student.parameters() if p.requires_grad)
    plan = TrainPlan(
        tokens=recipe.tokens, learning_rate=recipe.learning_rate, regression=recipe.regression, seed=recipe.seed
    )
    del target

    def report(progress: Progress) -> None:
        hits = " ".join(f"{value:.3f}" for value in progress.agreement)
        show("training", progress.tokens, plan.tokens, f"loss {progress.loss:.2f}, agreement {hits}")

    begun_s: float | None = None  # what earlier calls took

    def is_over(progress: Progress) -> bool:
        nonlocal begun_s
        begun_s = progress.seconds if begun_s is None else begun_s
        return recipe.minutes is not None and progress.seconds - begun_s >= recipe.minutes * 60

    progress = train(student.to(device), texts, plan, out, report, until=is_over)
    module = student.head if isinstance(student, HeadStudent) else student.model
    num_given = len(extra) // recipe.length * recipe.length  # what is left at the end was dropped
    info = DrafterInfo(
        family=recipe.family,
        target=name,
        tokenizer_hash=identity,
        num_layers=recipe.num_layers,
        training={
            "draft_vocab": len(ids),
            "parameters": num_parameters,
            "data_tokens": count_tokens(data) - num_given,
            "extra_tokens": num_given,
            "tokens": progress.tokens,
            "steps": progress.step,
            "agreement": [round(value, 4) for value in progress.agreement],
        },
        head=student.head.config if isinstance(student, HeadStudent) else None,
    )
    save_drafter(out, info, module, ids)
    (out / "README.md").write_text(model_card(info, read_log(out)))
    state = "done" if progress.tokens >= plan.tokens else "not finished; the same command goes on"
    hits = " / ".join(f"{value:.3f}" for value in progress.agreement)
    return f"{out}: {progress.tokens:,} of {plan.tokens:,} tokens ({state}); agreement by depth {hits}"


def _write(
    load: Callable[[], nn.Module],
    tokenizer: Any,
    recipe: Recipe,
    data: Path,
    layers: tuple[int, ...],
    identity: str,
    stops: frozenset[int],
    extra: list[int],
    show: Show,
) -> None:
    """Complete the data folder. The target that writes is packed for it and cannot be trained from, so it is its own copy."""
    done = 0

    def report(count: int) -> None:
        nonlocal done
        done += count
        show("writing data", min(done, recipe.data_tokens), recipe.data_tokens, f"{done:,} tokens")

    write_data(
        load,
        tokenizer,
        data,
        DataPlan(recipe.data_tokens, recipe.length, recipe.texts, recipe.seed),
        layers=layers,
        stops=stops,
        tokenizer_hash=identity,
        extra_text=extra,
        report=report,
    )


def _chosen_layers(recipe: Recipe, recorded: tuple[int, ...], num_layers: int) -> list[int]:
    """The target's layers that an LM student begins as, or that a head is fed with. ValueError if there are none such."""
    if recipe.family == "lm":
        return spread_layers(num_layers, recipe.num_layers)
    return list(head_layers(recorded, num_layers, recipe.num_layers))


def _draft_ids(texts: Texts, recipe: Recipe, out: Path) -> torch.Tensor:
    """The draft vocabulary, int64 ascending. A run in `out` keeps the one it began with, whatever data has come since."""
    ids = texts.frequent_ids(recipe.vocab)
    state = read_state(out)
    if state is None:
        return ids
    student = state["student"]
    begun: torch.Tensor | None = student.get("head.id_map", student.get("ids"))
    if begun is None or len(begun) != len(ids):
        raise ValueError(f"{out} holds a run with another vocab than {len(ids)} ids; give another folder")
    return begun


def _student(
    target: nn.Module, texts: Texts, ids: torch.Tensor, recipe: Recipe, layers: tuple[int, ...]
) -> tuple[HeadStudent | LMStudent, torch.Tensor]:
    count = target.config.get_text_config().num_hidden_layers  # type: ignore[operator, union-attr]
    chosen = _chosen_layers(recipe, layers, count)
    if recipe.family == "lm":
        return LMStudent(begin_lm(target, ids, chosen), ids), ids
    texts.use_layers([layers.index(layer) for layer in chosen])
    head, tail = begin_head(target, texts, ids, chosen, num_layers=recipe.num_layers, rank=recipe.rank, seed=recipe.seed)
    embedding = target.get_input_embeddings().weight.detach().clone()  # type: ignore[operator]
    return HeadStudent(head, embedding, depths=recipe.depths, tail=tail), ids
