"""Training a student: the loop, its log, and how it goes on after an interruption.

What a step does is a function of the data, the plan and the step's number, so a run that was interrupted and resumed ends with
the same weights as one that was not (on the same machine and thread count).
"""

from __future__ import annotations

import contextlib
import json
import pickle
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from distill.batches import Batch, Texts
from distill.loss import agreement, divergence, regression
from distill.students import Prediction

STATE, LOG = "training.pt", "log.jsonl"
_EVALUATION_BATCH = 8


class Student(Protocol):
    """What can be trained: a module that predicts at several depths."""

    depths: int

    def predict(self, batch: Batch, generator: torch.Generator) -> list[Prediction]:
        """One prediction per depth; `generator` chooses where it is asked, if it is not asked everywhere."""


@dataclass(frozen=True, slots=True)
class TrainPlan:
    """What a run consists of."""

    tokens: int  # tokens read in all, each as often as it is read
    texts: int = 2  # per step
    learning_rate: float = 2e-3
    warmup_steps: int = 50
    depth_decay: float = 0.8  # weight of a depth's loss against that of the depth above it
    regression: float = 0.0  # weight of the distance to the target's own hidden state, against the divergence
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0
    evaluate_every: int = 250_000  # tokens
    save_every_s: float = 120.0


@dataclass(slots=True)
class Progress:
    """How far a run has come; what the log's lines hold."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss: float = float("nan")  # moving average
    agreement: tuple[float, ...] = ()  # on the held-out texts, by depth
    divergence: tuple[float, ...] = ()


def train(
    student: nn.Module,
    texts: Texts,
    plan: TrainPlan,
    folder: Path,
    report: Callable[[Progress], None],
    *,
    until: Callable[[Progress], bool] = lambda _: False,
) -> Progress:
    """Train to the end of the plan, or until `until` says so; the state lies in `folder` and a later call goes on from there.

    `report` is called after every step. Raises ValueError if `folder` holds the state of another plan or student, and
    ArithmeticError if the loss or its gradient is no longer a number.
    """
    folder.mkdir(parents=True, exist_ok=True)
    device = next(student.parameters()).device
    trained = [p for p in student.parameters() if p.requires_grad]
    optimizers = _optimizers(trained, plan)
    base = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    progress = _resume(student, optimizers, plan, folder)
    noted = _forget_later(folder, progress)
    if not progress.agreement:
        _evaluate(student, texts, progress, device)
        _note(folder, progress)
        noted = progress.step
    saved, next_look = time.monotonic(), progress.tokens + plan.evaluate_every
    while progress.tokens < plan.tokens and not until(progress):
        start = time.monotonic()
        _set_rate(optimizers, base, plan, progress)
        batch = texts.training_batch(progress.step, plan.texts).to(device)
        with _low_precision(device):
            predictions = student.predict(batch, _places(plan, progress.step))  # type: ignore[operator]
        loss = _loss(predictions, plan)
        if not torch.isfinite(loss):
            raise ArithmeticError(f"the loss is {loss.item()} at step {progress.step}; try a smaller learning rate")
        if loss.requires_grad:  # else there is no answer in these texts
            loss.backward()
            size = nn.utils.clip_grad_norm_(trained, plan.clip)
            if not torch.isfinite(size):  # one such step, saved, would spoil every later run
                raise ArithmeticError(f"the gradient is {size.item()} at step {progress.step}; try a smaller learning rate")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        progress.step += 1
        progress.tokens += batch.num_tokens
        progress.seconds += time.monotonic() - start
        value = loss.item()
        progress.loss = value if progress.step == 1 else 0.98 * progress.loss + 0.02 * value
        report(progress)
        if progress.tokens >= next_look or progress.tokens >= plan.tokens:
            next_look += plan.evaluate_every
            _evaluate(student, texts, progress, device)
            _note(folder, progress)
            noted = progress.step
        if time.monotonic() - saved > plan.save_every_s:
            _save(student, optimizers, plan, progress, folder)
            saved = time.monotonic()
    if noted != progress.step:  # stopped early: the log should end with what is stored
        _evaluate(student, texts, progress, device)
        _note(folder, progress)
    _save(student, optimizers, plan, progress, folder)
    return progress


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The evaluations of a run, oldest first."""
    path = folder / LOG
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def read_state(folder: Path) -> dict[str, Any] | None:
    """What an interrupted or finished run has saved, on the CPU; None if there is nothing. ValueError if it is damaged."""
    path = folder / STATE
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = next(iter(str(error).splitlines()), "too short")
        raise ValueError(f"{path} is damaged ({reason}); delete it to train from the beginning") from error
    return state


def _optimizers(trained: list[nn.Parameter], plan: TrainPlan) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(trained, lr=plan.learning_rate, betas=(0.9, 0.95), weight_decay=plan.weight_decay, fused=True)]


def _set_rate(optimizers: list[torch.optim.Optimizer], base: list[list[float]], plan: TrainPlan, progress: Progress) -> None:
    """A short warm-up, then a straight line down to nothing at the end of the plan."""
    factor = min(1.0, (progress.step + 1) / plan.warmup_steps) * max(1.0 - progress.tokens / plan.tokens, 0.0)
    for optimizer, rates in zip(optimizers, base, strict=True):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor


def _places(plan: TrainPlan, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(plan.seed * 1_000_003 + step)


def _loss(predictions: list[Prediction], plan: TrainPlan) -> torch.Tensor:
    total = torch.zeros((), device=predictions[0].logits.device)
    for prediction in predictions:
        if not len(prediction.logits):
            continue  # no answer in these texts
        term = divergence(prediction.logits, prediction.teaching).mean()
        if plan.regression:
            term = term + plan.regression * regression(prediction.hidden, prediction.teaching).mean()
        total = total + plan.depth_decay**prediction.depth * term
    return total


@torch.no_grad()
def _evaluate(student: nn.Module, texts: Texts, progress: Progress, device: torch.device) -> None:
    """Agreement and divergence on the held-out texts, always at the same places."""
    depths = student.depths
    hits, nats, asked = [0.0] * depths, [0.0] * depths, [0] * depths  # type: ignore[operator]
    generator = torch.Generator().manual_seed(0)
    student.eval()
    for batch in texts.held_out_batches(_EVALUATION_BATCH):
        with _low_precision(device):
            predictions = student.predict(batch.to(device), generator)  # type: ignore[operator]
        for found in predictions:
            hits[found.depth] += float(agreement(found.logits, found.teaching).sum())
            nats[found.depth] += float(divergence(found.logits, found.teaching).sum())
            asked[found.depth] += len(found.logits)
    student.train()
    progress.agreement = tuple(hit / max(n, 1) for hit, n in zip(hits, asked, strict=True))
    progress.divergence = tuple(nat / max(n, 1) for nat, n in zip(nats, asked, strict=True))


def _note(folder: Path, progress: Progress) -> None:
    line = {name: getattr(progress, name) for name in ("step", "tokens", "agreement", "divergence")}
    line |= {"seconds": round(progress.seconds, 1), "loss": None if progress.loss != progress.loss else round(progress.loss, 4)}
    with (folder / LOG).open("a") as file:
        file.write(json.dumps(line) + "\n")


def _forget_later(folder: Path, progress: Progress) -> int:
    """Drop what a killed run noted after it last saved: it will be noted again. Returns the step of the last line, or -1."""
    path = folder / LOG
    kept, last = [], -1
    lines = path.read_text().splitlines() if path.exists() and progress.agreement else []
    for line in lines:
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):  # half a line, from a full disk
            break
        if step > progress.step:
            break
        kept.append(line + "\n")
        last = step
    if path.exists():
        partial = path.with_suffix(".part")
        partial.write_text("".join(kept))
        partial.rename(path)
    return last


def _save(
    student: nn.Module, optimizers: list[torch.optim.Optimizer], plan: TrainPlan, progress: Progress, folder: Path
) -> None:
    partial = folder / (STATE + ".part")
    torch.save(
        {
            "plan": asdict(plan),
            "progress": asdict(progress),
            "student": student.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        },
        partial,
    )
    partial.rename(folder / STATE)


def _resume(student: nn.Module, optimizers: list[torch.optim.Optimizer], plan: TrainPlan, folder: Path) -> Progress:
    state = read_state(folder)
    if state is None:
        return Progress()
    for name, value in asdict(plan).items():
        # Training longer, or saving and looking more or less often, is still the same run.
        if name not in ("tokens", "evaluate_every", "save_every_s") and state["plan"].get(name) != value:
            raise ValueError(f"{folder} holds a run with {name} = {state['plan'].get(name)}, not {value}; give another folder")
    found: dict[str, Any] = state["progress"]
    if len(found["agreement"]) != student.depths:
        raise ValueError(
            f"{folder} holds a run with depths = {len(found['agreement'])}, not {student.depths}; give another folder"
        )
    try:
        student.load_state_dict(state["student"])
    except RuntimeError as error:
        raise ValueError(f"{folder} holds the run of another kind of student; give another folder") from error
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    found |= {name: tuple(found[name]) for name in ("agreement", "divergence")}
    return Progress(**found)


def _low_precision(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """bfloat16 products where the hardware has them; elsewhere they would be slower than float32."""
    if device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch.bfloat16)
