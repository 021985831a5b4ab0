"""The training loop: interrupted or not it ends in the same place, and it never goes on from something else."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distill import train as train_module
from distill.batches import Batch, Texts
from distill.beginnings import begin_head, begin_lm
from distill.data import DataPlan
from distill.dialogue import Kind
from distill.loss import Teaching
from distill.shards import shard_path, write
from distill.students import HeadStudent, LMStudent, Prediction
from distill.train import LOG, STATE, Progress, TrainPlan, read_log, read_state, train
from tests.distill_world import made_up_shard, toy_target, write_toy_data

LENGTH, STEPS = 48, 12
PER_STEP = 2 * LENGTH
PLAN = TrainPlan(tokens=STEPS * PER_STEP, warmup_steps=3, learning_rate=5e-3, evaluate_every=4 * PER_STEP)
Make = Callable[[], nn.Module]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    folder = tmp_path_factory.mktemp("data")
    write_toy_data(folder, DataPlan(tokens=2 * 16 * LENGTH, length=LENGTH, texts=16))
    return Texts(folder, held_out=6, seed=0)


@pytest.fixture(scope="module", params=["head", "lm"])
def make(request: pytest.FixtureRequest, texts: Texts) -> Make:
    """A student as it begins, each time anew."""
    target, ids = toy_target(), texts.frequent_ids(150)
    if request.param == "lm":
        begun: nn.Module = LMStudent(begin_lm(target, ids, [0, 5]), ids)
    else:
        head, tail = begin_head(target, texts, ids, [2], num_layers=3, rank=4, seed=0)
        begun = HeadStudent(head, target.get_input_embeddings().weight.detach(), depths=2, tail=tail)
    return lambda: copy.deepcopy(begun)


def quietly(_progress: Progress) -> None:
    pass


def interrupt_after(steps: int) -> Callable[[Progress], None]:
    def report(progress: Progress) -> None:
        if progress.step == steps:
            raise KeyboardInterrupt

    return report


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_stopped_and_resumed_is_as_if_never_stopped(make: Make, texts: Texts, tmp_path: Path) -> None:
    """Bit for bit: otherwise no figure of an interrupted run could be repeated."""
    whole, first, second, other = make(), make(), make(), make()
    straight = train(whole, texts, PLAN, tmp_path / "whole", quietly)
    stopped = train(first, texts, PLAN, tmp_path / "parts", quietly, until=lambda progress: progress.step >= 5)
    assert (stopped.step, stopped.tokens) == (5, 5 * PER_STEP)
    assert not same_weights(first, whole), "negative control: there was something left to learn"
    resumed = train(second, texts, PLAN, tmp_path / "parts", quietly)
    assert same_weights(second, whole)
    assert (resumed.step, resumed.tokens, resumed.loss) == (straight.step, straight.tokens, straight.loss)
    assert (resumed.agreement, resumed.divergence) == (straight.agreement, straight.divergence)
    train(other, texts, replace(PLAN, seed=1, learning_rate=4e-3), tmp_path / "other", quietly)
    assert not same_weights(other, whole), "negative control"


def test_killed_and_resumed_is_as_if_never_killed(make: Make, texts: Texts, tmp_path: Path) -> None:
    """It goes back to what was saved last; what was noted since then is noted again and not twice."""
    whole, killed, resumed = make(), make(), make()
    train(whole, texts, PLAN, tmp_path / "whole", quietly)
    # Nothing is saved after step 5, whose state a stop leaves behind; the evaluation at step 9 is noted before the end.
    train(killed, texts, PLAN, tmp_path / "killed", quietly, until=lambda progress: progress.step >= 5)
    with pytest.raises(KeyboardInterrupt):
        train(killed, texts, PLAN, tmp_path / "killed", interrupt_after(10))
    assert [line["step"] for line in read_log(tmp_path / "killed")] == [0, 4, 5, 9]
    with (tmp_path / "killed" / LOG).open("a") as file:
        file.write('{"step": 10, "tok')  # and the disk was full
    train(resumed, texts, PLAN, tmp_path / "killed", quietly)
    assert same_weights(resumed, whole)
    assert [line["step"] for line in read_log(tmp_path / "killed")] == [0, 4, 5, 9, 12]


@pytest.fixture(scope="module")
def lm(texts: Texts) -> Make:
    ids = texts.frequent_ids(150)
    begun = LMStudent(begin_lm(toy_target(), ids, [0]), ids)
    return lambda: copy.deepcopy(begun)


def test_killed_before_anything_was_saved_begins_again(lm: Make, texts: Texts, tmp_path: Path) -> None:
    """The log of the first attempt would otherwise stand in front of the second one's."""
    with pytest.raises(KeyboardInterrupt):
        train(lm(), texts, PLAN, tmp_path, interrupt_after(6))
    assert [line["step"] for line in read_log(tmp_path)] == [0, 4] and read_state(tmp_path) is None
    train(lm(), texts, PLAN, tmp_path, quietly)
    assert [line["step"] for line in read_log(tmp_path)] == [0, 4, 8, 12]


def test_a_finished_run_stays_as_it_is_and_a_longer_one_goes_on(lm: Make, texts: Texts, tmp_path: Path) -> None:
    """The same command again must not train further; a larger number of tokens must."""
    first, again = lm(), lm()
    train(first, texts, PLAN, tmp_path, quietly)
    log = read_log(tmp_path)
    train(again, texts, PLAN, tmp_path, quietly)
    assert same_weights(first, again) and read_log(tmp_path) == log
    longer = train(lm(), texts, replace(PLAN, tokens=16 * PER_STEP), tmp_path, quietly)
    assert longer.step == 16
    assert [line["step"] for line in read_log(tmp_path)] == [0, 4, 8, 12, 16]


def test_the_log_ends_with_the_weights_that_are_stored(lm: Make, texts: Texts, tmp_path: Path) -> None:
    """The card is made of the last line; of older weights it would tell too little or too much."""
    progress = train(lm(), texts, PLAN, tmp_path, quietly, until=lambda progress: progress.step >= 6)
    last = read_log(tmp_path)[-1]
    assert (last["step"], last["tokens"]) == (6, 6 * PER_STEP)
    assert tuple(last["agreement"]) == progress.agreement and last["loss"] == pytest.approx(progress.loss, abs=1e-4)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"learning_rate": 1e-3}, "learning_rate = 0.005, not 0.001"),
        ({"texts": 3}, "texts = 2, not 3"),
        ({"seed": 4}, "seed = 0, not 4"),
        ({"regression": 0.5}, "regression = 0.0, not 0.5"),
    ],
)
def test_the_state_of_another_plan_is_refused(
    change: dict[str, Any], named: str, lm: Make, texts: Texts, tmp_path: Path
) -> None:
    """A run that is half of one kind and half of another has figures that nobody can repeat."""
    short = replace(PLAN, tokens=PER_STEP)
    train(lm(), texts, short, tmp_path, quietly)
    with pytest.raises(ValueError, match=named):
        train(lm(), texts, replace(short, **change), tmp_path, quietly)


def test_the_state_of_another_student_is_refused(lm: Make, texts: Texts, tmp_path: Path) -> None:
    """The weights of another shape used to be a traceback, other depths a log that cannot be drawn."""
    short = replace(PLAN, tokens=PER_STEP)
    train(lm(), texts, short, tmp_path, quietly)
    ids = texts.frequent_ids(150)
    with pytest.raises(ValueError, match="another kind of student"):
        train(LMStudent(begin_lm(toy_target(), ids, [0, 1]), ids), texts, short, tmp_path, quietly)
    deeper = lm()
    deeper.depths = 2  # type: ignore[assignment]
    with pytest.raises(ValueError, match="depths = 1, not 2"):
        train(deeper, texts, short, tmp_path, quietly)


def test_a_damaged_state_is_named(lm: Make, texts: Texts, tmp_path: Path) -> None:
    """One line that says what to delete."""
    train(lm(), texts, replace(PLAN, tokens=PER_STEP), tmp_path, quietly)
    path = tmp_path / STATE
    for content in (path.read_bytes()[: path.stat().st_size // 2], b"", b"not a state"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="training.pt is damaged.*delete it"):
            train(lm(), texts, PLAN, tmp_path, quietly)


def test_the_learning_rate_rises_falls_and_ends_at_nothing(
    lm: Make, texts: Texts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rate that stays high at the end leaves the noise of the last steps in the weights."""
    kept: list[torch.optim.Optimizer] = []
    real = train_module._optimizers

    def optimizers(*arguments: Any) -> list[torch.optim.Optimizer]:
        kept[:] = real(*arguments)
        return list(kept)

    monkeypatch.setattr(train_module, "_optimizers", optimizers)
    rates: list[float] = []
    train(lm(), texts, PLAN, tmp_path, lambda progress: rates.append(kept[0].param_groups[0]["lr"]))
    down = [1 - step / STEPS for step in range(STEPS)]
    wanted = [min(1.0, (step + 1) / 3) * down[step] * PLAN.learning_rate for step in range(STEPS)]
    assert rates == pytest.approx(wanted)
    assert 2 * rates[-1] == pytest.approx(rates[-2]), "the line meets zero where the plan ends"


class Broken(nn.Module):
    """One weight; from step `since` on the loss, or only its gradient, is no number."""

    depths = 1

    def __init__(self, since: int, what: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(50))
        self._calls, self._since, self._what = itertools.count(-1), since, what  # the first call is an evaluation

    def predict(self, batch: Batch, generator: torch.Generator) -> list[Prediction]:
        row, column = batch.is_answer[:, 1:].nonzero(as_tuple=True)
        teaching = Teaching(batch.top_ids[row, column], batch.top_lps[row, column], batch.final[row, column])
        logits = self.weight.expand(len(row), -1)
        if next(self._calls) >= self._since:
            logits = logits * float("nan") if self._what == "loss" else logits + (self.weight - self.weight.detach()).sqrt()
        return [Prediction(0, batch.final[row, column], logits, teaching)]


@pytest.fixture
def made_up(tmp_path: Path) -> Texts:
    (tmp_path / "data").mkdir()
    write(made_up_shard(torch.arange(80).view(8, 10)), shard_path(tmp_path / "data", 0))
    return Texts(tmp_path / "data", held_out=2, seed=0)


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_no_number_ends_the_run_and_is_not_saved(what: str, made_up: Texts, tmp_path: Path) -> None:
    """Trained on, every later run would go on from weights that are no numbers."""
    plan = TrainPlan(tokens=200, save_every_s=0.0)
    with pytest.raises(ArithmeticError, match=rf"the {what} is (nan|inf) at step 3; try a smaller learning rate"):
        train(Broken(3, what), made_up, plan, tmp_path / "run", quietly)
    state = read_state(tmp_path / "run")
    assert state is not None and state["progress"]["step"] == 3
    assert torch.isfinite(state["student"]["weight"]).all()
    assert train(Broken(99, what), made_up, plan, tmp_path / "run", quietly).step == 10, "negative control: it can be mended"


def test_texts_without_an_answer_are_passed_over(tmp_path: Path) -> None:
    """Two long questions in one batch used to end the run: a loss that depends on nothing has no gradient."""
    (tmp_path / "data").mkdir()
    kinds = torch.full((8, 10), int(Kind.USER), dtype=torch.uint8)
    kinds[:4, 5:] = int(Kind.ANSWER)
    write(made_up_shard(torch.arange(80).view(8, 10), kinds), shard_path(tmp_path / "data", 0))
    texts = Texts(tmp_path / "data", held_out=2, seed=0)
    student = Broken(99, "loss")
    before = student.weight.detach().clone()
    progress = train(student, texts, TrainPlan(tokens=120, texts=1), tmp_path / "run", quietly)
    assert progress.step == 12 and not torch.equal(student.weight, before)
    assert json.loads((tmp_path / "run" / LOG).read_text().splitlines()[-1])["step"] == 12
