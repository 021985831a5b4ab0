"""From a target to a drafter that serves it: data, training, folder, engine, each family once and in earnest."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file

from app.build import build
from app.config import Settings
from app.local import Answer, Question, ask_all, running
from distill.batches import Texts
from distill.run import Recipe, make_drafter
from distill.train import read_log
from models.draft_files import is_drafter_folder
from tests.distill_world import TOKENIZER, short_turns, toy_target

LENGTH = 64
RECIPE = Recipe(
    family="head",
    num_layers=3,
    data_tokens=3 * 64 * LENGTH,
    tokens=200 * 2 * LENGTH,
    vocab=200,
    depths=2,
    rank=0,
    learning_rate=5e-3,
    length=LENGTH,
    held_out=24,
)
MARGIN = {"head": 0.08, "lm": 0.25}  # a head is begun in closed form and has less to gain


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings of the machine that runs the tests."""
    for name in [name for name in os.environ if name.upper().startswith("GRAFTSERVE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GRAFTSERVE_COSTS", "none")  # nothing is measured


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("distilled")
    toy_target().save_pretrained(path / "target")
    TOKENIZER.save_pretrained(path / "target")
    return path


def distilled(root: Path, out: Path, recipe: Recipe, **changes: Any) -> str:
    with short_turns():
        return make_drafter(
            toy_target, TOKENIZER, "toy", recipe, out, changes.get("data", root / "data"), "", lambda *shown: None
        )


@pytest.fixture(scope="module")
def made(root: Path) -> Callable[[str], Path]:
    @cache
    def make(family: Literal["head", "lm"]) -> Path:
        line = distilled(root, root / family, replace(RECIPE, family=family, num_layers=3 if family == "head" else 2))
        assert "25,600 of 25,600 tokens (done)" in line
        return root / family

    return make


@pytest.mark.parametrize("family", ["head", "lm"])
def test_training_makes_a_drafter_agree_more_often(family: str, made: Callable[[str], Path]) -> None:
    """On texts that it has not seen; anything that is shifted by a token or fed with the wrong layer learns nothing."""
    log = read_log(made(family))
    first, last = log[0], log[-1]
    assert (first["step"], last["step"]) == (0, 200)
    for depth, (before, after) in enumerate(zip(first["agreement"], last["agreement"], strict=True), start=1):
        assert after > before + MARGIN[family], f"depth {depth}: {before:.3f} to {after:.3f}"
    assert all(after < before for before, after in zip(first["divergence"], last["divergence"], strict=True))


def questions(root: Path, count: int = 5) -> list[tuple[int, ...]]:
    """Held-out texts up to their first answer."""
    texts = Texts(root / "data", held_out=RECIPE.held_out, seed=0)
    batch = texts.batch(texts.held_out[:count])
    ends = batch.is_answer.int().argmax(dim=1).tolist()
    return [tuple(tokens[:end].tolist()) for tokens, end in zip(batch.tokens, ends, strict=True)]


def answers(root: Path, drafter: Path, schedule: str) -> list[Answer]:
    settings = Settings(
        target=str(root / "target"), small="ngram", medium=str(drafter), weights="fp32", device="cpu", max_model_len=300
    )
    loaded = build(settings, lambda line: None)
    with running(loaded.engine):
        return ask_all(
            loaded.engine, [Question(prompt, 30, schedule=schedule) for prompt in questions(root)], concurrency=3
        )


@pytest.mark.parametrize("family", ["head", "lm"])
def test_the_drafter_serves_its_target_and_the_text_stays(
    family: str, root: Path, made: Callable[[str], Path]
) -> None:
    """By its folder's name alone, and it is right often enough to show that it learned for this very target."""
    drafter = made(family)
    assert is_drafter_folder(drafter)
    plain = answers(root, drafter, "ar")
    for schedule in ("medium", "treegraft"):
        found = answers(root, drafter, schedule)
        assert [answer.text for answer in found] == [answer.text for answer in plain], schedule
        assert all(not answer.stats.halts for answer in found)
        accepted = sum(answer.stats.num_accepted for answer in found)
        steps = sum(answer.stats.num_spec_steps for answer in found)
        assert accepted > 0.7 * steps, f"{schedule}: {accepted} tokens accepted in {steps} steps"


def test_a_drafter_of_a_shorter_context_gives_up_and_the_answer_goes_on(
    root: Path, made: Callable[[str], Path], tmp_path: Path
) -> None:
    """Positions that it was never made for would be nonsense; a request must not end because its drafter has to."""
    short = tmp_path / "short"
    short.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(made("head") / name, short)
    config = json.loads((short / "config.json").read_text())
    config["head"]["max_positions"] = 40
    (short / "config.json").write_text(json.dumps(config))
    plain, found = answers(root, short, "ar"), answers(root, short, "medium")
    assert [answer.text for answer in found] == [answer.text for answer in plain]
    assert [answer.stats.halts for answer in found] == [{"medium": "context"}] * 5
    assert sum(answer.stats.num_accepted for answer in found) > 0, "it drafted as far as it could"


def test_more_data_does_not_change_the_vocabulary_of_a_run(root: Path, tmp_path: Path) -> None:
    """The ids of a resumed run used to be counted anew: output rows of some tokens then stood for others."""
    begin = replace(RECIPE, data_tokens=16 * LENGTH, texts=16, held_out=4, tokens=2 * 2 * LENGTH, vocab=60)
    more = replace(begin, data_tokens=4 * 16 * LENGTH, tokens=4 * 2 * LENGTH)
    lm = {"family": "lm", "num_layers": 1}
    data = tmp_path / "data"
    distilled(root, tmp_path / "head", begin, data=data)
    distilled(root, tmp_path / "lm", replace(begin, **lm), data=data)
    ids = stored_ids(tmp_path / "head")
    assert len(ids) == 60 and stored_ids(tmp_path / "lm") == ids
    distilled(root, tmp_path / "head", more, data=data)
    distilled(root, tmp_path / "lm", replace(more, **lm), data=data)
    assert stored_ids(tmp_path / "head") == stored_ids(tmp_path / "lm") == ids
    distilled(root, tmp_path / "fresh", replace(more, **lm), data=data)
    assert stored_ids(tmp_path / "fresh") != ids, "negative control: the data would have changed it"
    with pytest.raises(ValueError, match="another vocab than 50 ids"):
        distilled(root, tmp_path / "lm", replace(more, **lm, vocab=50), data=data)


def stored_ids(folder: Path) -> list[int]:
    ids: torch.Tensor = load_file(folder / "model.safetensors")["id_map"]
    return ids.tolist()


def test_minutes_are_those_of_one_call(root: Path, tmp_path: Path) -> None:
    """Called again with the same minutes, it used to stop at once: those of earlier calls were counted in."""
    recipe = replace(RECIPE, family="lm", num_layers=1, minutes=0.001)
    steps = []
    for _ in range(2):
        line = distilled(root, tmp_path, recipe)
        assert "not finished; the same command goes on" in line
        steps.append(read_log(tmp_path)[-1]["step"])
    assert 0 < steps[0] < steps[1]
