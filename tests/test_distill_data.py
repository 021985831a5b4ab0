"""The data that a target writes: a function of target and seed, whole or not there, and never of another target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from distill import data as data_module
from distill.data import DataPlan, count_tokens
from distill.dialogue import Kind, Turns
from distill.shards import TOP, Shard, check_manifest, read, shard_path, shard_paths, write
from distill.writing import _draw, conversations, readings, write_shard
from models.lockstep import LockstepLM
from tests.distill_world import RECORDED, STOPS, TOKENIZER, made_up_shard, short_turns, toy_target, write_toy_data

LENGTH, TEXTS = 64, 6
PLAN = DataPlan(tokens=3 * LENGTH * TEXTS, length=LENGTH, texts=TEXTS, seed=5)


def a_shard(lm: LockstepLM, seed: int) -> Shard:
    with short_turns():
        writers = conversations(TOKENIZER, Turns.of(TOKENIZER, STOPS), TEXTS, seed)
        return write_shard(lm, writers, layers=RECORDED, seed=seed, progress=lambda count: None)


def same(a: Shard, b: Shard) -> bool:
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in Shard.__slots__)


@pytest.fixture(scope="module")
def lm() -> LockstepLM:
    return LockstepLM(toy_target(), num_texts=TEXTS, max_length=LENGTH, capture=RECORDED)


def test_a_shard_is_a_function_of_model_and_seed(lm: LockstepLM) -> None:
    """An interrupted run must write what an uninterrupted one had written."""
    first = a_shard(lm, 7)
    other = a_shard(lm, 8)
    torch.manual_seed(1)  # the global random state is nobody's business
    torch.rand(3)
    again = a_shard(lm, 7)
    fresh = a_shard(LockstepLM(toy_target(), num_texts=TEXTS, max_length=LENGTH, capture=RECORDED), 7)
    assert same(first, again) and same(first, fresh)
    assert not torch.equal(first.tokens, other.tokens), "negative control"


def test_a_shard_says_what_the_target_thinks_of_its_text(lm: LockstepLM) -> None:
    """Shifted by one position, or divided by the temperature, the teaching would be of something else."""
    shard = a_shard(lm, 7)
    with torch.inference_mode():
        wanted = toy_target()(shard.tokens.long(), output_hidden_states=True)
    lps = wanted.logits.log_softmax(-1)
    own = lps.gather(2, shard.top_ids.long())
    assert float((own - shard.top_lps.float()).abs().mean()) < 0.03
    assert torch.all(shard.top_lps[..., :-1] >= shard.top_lps[..., 1:]), "likeliest first"
    assert float((shard.features[:, :, 0].float() - wanted.hidden_states[3]).abs().mean()) < 0.03
    assert float((shard.final.float() - wanted.hidden_states[-1]).abs().mean()) < 0.03
    answered = shard.kinds[:, 1:] == Kind.ANSWER
    assert answered.float().mean() > 0.3, "a text without answers teaches nothing"
    # Half of the answers are the likeliest tokens; of those drawn at 0.7, many are.
    likeliest = (shard.tokens[:, 1:] == shard.top_ids[:, :-1, 0])[answered].float().mean()
    assert 0.4 < likeliest < 1.0


def test_tokens_are_drawn_by_their_temperature() -> None:
    """20,000 draws of four tokens: a share off by 0.02 comes in less than one of 10^8 cases, and the seed is fixed."""
    lps = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(20_000, -1)
    noise = torch.Generator().manual_seed(0)
    assert torch.all(_draw(lps, torch.zeros(20_000), noise) == 0)
    for temperature in (1.0, 0.7):
        drawn = _draw(lps, torch.full((20_000,), temperature), noise)
        shares = torch.bincount(drawn, minlength=4) / 20_000
        wanted = (lps[0] / temperature).softmax(-1)
        assert float((shares - wanted).abs().max()) < 0.02, (temperature, shares, wanted)
    mixed = torch.tensor([0.0, 1.0]).repeat(10_000)
    drawn = _draw(lps, mixed, noise)
    assert torch.all(drawn[::2] == 0) and not torch.all(drawn[1::2] == 0)


def test_given_text_is_cut_and_all_of_it_is_taught(lm: LockstepLM) -> None:
    """A reader gets the text as it is; what is left at its end is dropped, as the help of --text has it."""
    tokens = [index % 200 for index in range(2 * LENGTH + 9)]
    cut = readings(tokens, LENGTH)
    shard = write_shard(lm, cut, layers=RECORDED, seed=0, progress=lambda count: None)
    assert shard.tokens.flatten().tolist() == tokens[: 2 * LENGTH]
    assert torch.all(shard.kinds == Kind.ANSWER)
    assert shard.top_ids.shape == (2, LENGTH, TOP)


def test_a_folder_is_filled_and_given_texts_come_first(tmp_path: Path) -> None:
    """Every token is reported once, so that the bar ends where it should."""
    given = [index % 200 for index in range(2 * LENGTH)]
    reported = write_toy_data(tmp_path, PLAN, extra=given)
    paths = shard_paths(tmp_path)
    assert [read(path).tokens.shape[0] for path in paths] == [2, TEXTS, TEXTS]
    assert read(paths[0]).tokens.flatten().tolist() == given
    assert sum(reported) == count_tokens(tmp_path) == (2 + 2 * TEXTS) * LENGTH


def test_an_interrupted_run_writes_the_missing_shards_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hours of writing must survive, and what comes later must be what would have come."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    write_toy_data(whole, PLAN)
    calls = 0

    def interrupted(*arguments: Any, **named: Any) -> Shard:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return write_shard(*arguments, **named)

    monkeypatch.setattr(data_module, "write_shard", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_toy_data(broken, PLAN)
    assert shard_paths(broken) == [shard_path(broken, 0)]
    stamp = shard_path(broken, 0).stat().st_mtime_ns
    reported = write_toy_data(broken, PLAN)
    assert calls == 4, "two shards were missing"
    assert reported[0] == LENGTH * TEXTS and sum(reported) == PLAN.tokens
    assert shard_path(broken, 0).stat().st_mtime_ns == stamp
    for index in range(3):
        assert shard_path(broken, index).read_bytes() == shard_path(whole, index).read_bytes()
    write_toy_data(broken, PLAN)
    assert calls == 4, "nothing is missing"


def test_a_shard_is_there_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a shard under its name would be taken for a whole one by the next run."""
    shard = made_up_shard(torch.arange(24).view(2, 12))
    path = shard_path(tmp_path, 0)

    whole = Path.write_bytes

    def full_disk(where: Path, data: bytes) -> int:
        whole(where, data[: len(data) // 2])
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full_disk)
        with pytest.raises(OSError, match="no space"):
            write(shard, path)
    assert shard_paths(tmp_path) == []
    write(shard, path)
    assert same(read(path), shard)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    """Its user can delete that one file instead of all."""
    path = shard_path(tmp_path, 3)
    write(made_up_shard(torch.arange(24).view(2, 12)), path)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match="shard-00003.safetensors is damaged"):
        read(path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"plan": DataPlan(tokens=384, length=32, texts=TEXTS, seed=5)}, "length = 64, this run has 32"),
        ({"plan": DataPlan(tokens=384, length=LENGTH, texts=4, seed=5)}, "texts = 6, this run has 4"),
        ({"plan": DataPlan(tokens=384, length=LENGTH, texts=TEXTS, seed=6)}, "seed = 5, this run has 6"),
        ({"layers": (1, 2)}, r"layers = \[2\], this run has \[1, 2\]"),
        ({"tokenizer_hash": "other"}, "this run has 'other'"),
        ({"extra": [1] * LENGTH}, "extra_tokens = 0, this run has 64"),
    ],
)
def test_data_of_something_else_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    """A student would be taught by a mixture of two targets."""
    plan = DataPlan(tokens=1, length=LENGTH, texts=TEXTS, seed=5)
    write_toy_data(tmp_path, plan)
    with pytest.raises(ValueError, match=named) as caught:
        write_toy_data(tmp_path, **{"plan": plan, **changes})
    assert str(tmp_path) in str(caught.value)
    assert len(shard_paths(tmp_path)) == 1


def test_another_given_text_of_the_same_length_is_refused(tmp_path: Path) -> None:
    """Its user would believe that the drafter had learned from it."""
    plan = DataPlan(tokens=1, length=LENGTH, texts=TEXTS)
    write_toy_data(tmp_path, plan, extra=[1] * LENGTH)
    write_toy_data(tmp_path, plan, extra=[1] * LENGTH)
    with pytest.raises(ValueError, match="extra_hash"):
        write_toy_data(tmp_path, plan, extra=[2] * LENGTH)


def test_a_given_text_shorter_than_one_training_text_is_refused(tmp_path: Path) -> None:
    """All of it would be dropped without a word."""
    with pytest.raises(ValueError, match=f"63 tokens, fewer than one training text of length = {LENGTH}"):
        write_toy_data(tmp_path, PLAN, extra=[1] * (LENGTH - 1))
    assert not list(tmp_path.iterdir())


def test_more_data_can_be_written_later(tmp_path: Path) -> None:
    """The number of tokens is not part of what the data is."""
    write_toy_data(tmp_path, DataPlan(tokens=1, length=LENGTH, texts=TEXTS, seed=5))
    first = shard_path(tmp_path, 0).read_bytes()
    write_toy_data(tmp_path, PLAN)
    assert len(shard_paths(tmp_path)) == 3 and shard_path(tmp_path, 0).read_bytes() == first


def test_a_manifest_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Nothing should be written into such a folder, and its user should know which file to look at."""
    check_manifest(tmp_path, {"a": 1})
    assert json.loads((tmp_path / "data.json").read_text()) == {"a": 1}
    for content in ('{"a":', "[1]"):
        (tmp_path / "data.json").write_text(content)
        with pytest.raises(ValueError, match="data.json is not"):
            check_manifest(tmp_path, {"a": 1})
