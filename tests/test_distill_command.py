"""``graftserve distill`` on a folder of its user's: what it leaves behind, that it goes on, and what its mistakes cost."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from app.commands.distill import distill
from distill.shards import read, shard_paths
from distill.train import read_log
from models.draft_files import is_drafter_folder, read_info
from models.toy import byte_tokenizer, tiny_causal_lm
from tests.distill_world import TOKENIZER, VOCAB, short_turns, toy_target

SMALL = ("--length", "32", "--texts", "16", "--data-tokens", "1000", "--held-out", "4", "--vocab", "100", "--device", "cpu")
PER_STEP = 2 * 32


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No settings of the machine that runs the tests, and texts that hold answers although they are short."""
    for name in [name for name in os.environ if name.upper().startswith("GRAFTSERVE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GRAFTSERVE_COSTS", "none")  # nothing is measured
    monkeypatch.setenv("COLUMNS", "300")
    with short_turns(message=4, answer=12):
        yield


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "toy-target"
    toy_target().save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def run(out: Path, target: Path, *arguments: str, tokens: int = 3 * PER_STEP) -> Result:
    program = typer.Typer()
    program.command()(distill)
    options = ("--target", str(target), "--tokens", str(tokens), *SMALL)
    return CliRunner().invoke(program, [str(out), *options, *arguments])


def refused(result: Result) -> str:
    """The one line of a command that ended because of what its user asked for."""
    assert result.exit_code == 2, (result.stderr, result.exception)
    lines = [line for line in result.stderr.splitlines() if line.startswith("graftserve: ")]
    assert len(lines) == 1 and "Traceback" not in result.stderr, result.stderr
    return lines[0]


def test_a_folder_with_everything_in_it_and_a_second_call_goes_on(target: Path, tmp_path: Path) -> None:
    """The default student; then the same command again, for longer."""
    out = tmp_path / "drafters" / "mine"
    first = run(out, target)
    assert first.exit_code == 0, (first.stderr, first.exception)
    assert "192 of 192 tokens (done); agreement by depth" in first.stderr and first.stdout == ""
    names = {"config.json", "model.safetensors", "README.md", "curves.svg", "log.jsonl"}
    assert {path.name for path in out.iterdir()} == names | {"training.pt", "data"}
    assert is_drafter_folder(out)
    info = read_info(out)
    assert (info.family, info.num_layers, info.target) == ("head", 3, "toy-target")
    assert (info.training["tokens"], info.training["steps"], info.training["data_tokens"]) == (192, 3, 1024)
    log = read_log(out)
    assert [line["step"] for line in log] == [0, 3]
    assert info.training["agreement"] == [round(value, 4) for value in log[-1]["agreement"]]
    card = (out / "README.md").read_text()
    assert "# Drafter for toy-target" in card and "192 tokens read, 3 steps" in card and "1,024 tokens that" in card
    ElementTree.parse(out / "curves.svg")

    stamps = [path.stat().st_mtime_ns for path in shard_paths(out / "data")]
    second = run(out, target, tokens=5 * PER_STEP)
    assert second.exit_code == 0, (second.stderr, second.exception)
    assert [line["step"] for line in read_log(out)] == [0, 3, 5]
    assert [path.stat().st_mtime_ns for path in shard_paths(out / "data")] == stamps, "the data was there"
    assert "320 tokens read, 5 steps" in (out / "README.md").read_text()


def test_two_students_share_data_and_given_texts_come_in(target: Path, tmp_path: Path) -> None:
    """The data is what takes long; and a text of the user's is counted as what it is."""
    given = [tmp_path / name for name in ("a.txt", "b.txt")]
    for path in given:
        path.write_text("All work and no play makes Jack a dull boy. é " * 3, "utf-8")
    texts = [argument for path in given for argument in ("--text", str(path))]
    for student in ("head:3", "lm:2"):
        out = tmp_path / student.replace(":", "-")
        result = run(out, target, "--student", student, "--data", str(tmp_path / "data"), *texts)
        assert result.exit_code == 0, (result.stderr, result.exception)
        assert not (out / "data").exists()
        length = len("\n".join(path.read_text("utf-8") for path in given).encode())
        training = read_info(out).training
        assert training["extra_tokens"] == length // 32 * 32
        assert training["data_tokens"] + training["extra_tokens"] == sum(
            read(path).tokens.numel() for path in shard_paths(tmp_path / "data")
        )
        assert f"{training['extra_tokens']} tokens of given text" in (out / "README.md").read_text()


@pytest.mark.parametrize("student", ["head", "head:0", "tree:3", "lm:-1", "head:3 ", ""])
def test_a_student_of_no_kind_is_refused(student: str, tmp_path: Path) -> None:
    """Before the target is loaded: here there is none."""
    line = refused(run(tmp_path / "out", tmp_path / "no-model", "--student", student))
    assert f"student = {student!r}: expected head:N or lm:N" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("student", "named"), [("head:1", "heads of 3 layers, not of 1"), ("lm:7", "7 layers of a model with 6")]
)
def test_a_student_that_the_target_cannot_have_is_refused_before_writing(
    student: str, named: str, target: Path, tmp_path: Path
) -> None:
    """It used to be found out when all data had been written, hours later."""
    assert named in refused(run(tmp_path / "out", target, "--student", student))
    assert not (tmp_path / "out" / "data").exists()


@pytest.mark.parametrize(
    ("content", "named"),
    [(None, "no such file"), (b"\xff\xfe\x00", "not a text in UTF-8"), (b" \n", "an empty text")],
)
def test_a_bad_text_is_named(content: bytes | None, named: str, tmp_path: Path) -> None:
    """Of several files, which one? And before the target is loaded."""
    good, bad = tmp_path / "good.txt", tmp_path / "bad.txt"
    good.write_text("a text")
    if content is not None:
        bad.write_bytes(content)
    line = refused(run(tmp_path / "out", tmp_path / "no-model", "--text", str(good), "--text", str(bad)))
    assert str(bad) in line and named in line


def test_a_text_shorter_than_one_training_text_is_refused(target: Path, tmp_path: Path) -> None:
    """It would be dropped whole."""
    (tmp_path / "short.txt").write_text("too short")
    line = refused(run(tmp_path / "out", target, "--text", str(tmp_path / "short.txt")))
    assert "the given text has 9 tokens, fewer than one training text of length = 32" in line


def test_a_folder_that_cannot_be_written_is_refused_before_writing_data(target: Path, tmp_path: Path) -> None:
    """Hours of data elsewhere and then nowhere to put the drafter."""
    (tmp_path / "file").write_text("")
    line = refused(run(tmp_path / "file" / "out", target, "--data", str(tmp_path / "data")))
    assert str(tmp_path / "file") in line
    assert not (tmp_path / "data").exists()


def test_a_models_folder_is_not_written_over(target: Path, tmp_path: Path) -> None:
    """Both keep their weights in model.safetensors: the target would be gone."""
    before = (target / "model.safetensors").read_bytes()
    assert "holds a config.json that is not a drafter's" in refused(run(target, target))
    assert (target / "model.safetensors").read_bytes() == before


def test_a_target_without_a_chat_template_is_told_what_to_do(tmp_path: Path) -> None:
    """Base models have none; they learn from given texts."""
    base = tmp_path / "base"
    toy_target().save_pretrained(base)
    byte_tokenizer(chat_template=None).save_pretrained(base)
    line = refused(run(tmp_path / "out", base))
    assert "no chat template; give texts of your own with --text" in line
    (tmp_path / "text.txt").write_text("".join(map(chr, range(32, 126))) * 12)
    given = run(tmp_path / "given", base, "--text", str(tmp_path / "text.txt"), "--data-tokens", "1", "--student", "lm:1")
    assert given.exit_code == 0, (given.stderr, given.exception)
    assert read_info(tmp_path / "given").training["data_tokens"] == 0


@pytest.mark.parametrize(
    ("again", "named"),
    [
        (("--student", "lm:2"), "another kind of student"),
        (("--seed", "1"), "seed = 0"),
        (("--learning-rate", "0.5"), "learning_rate = 0.002, not 0.5"),
        (("--vocab", "99"), "another vocab than 99 ids"),
        (("--length", "64"), "length = 32, this run has 64"),
        (("--held-out", "32"), "write more"),
    ],
)
def test_what_does_not_fit_the_run_in_the_folder_is_refused(
    again: tuple[str, ...], named: str, target: Path, one_step: Path
) -> None:
    """Each of these used to go on, or to end in a traceback of somebody else's."""
    before = {path.name: path.stat().st_mtime_ns for path in one_step.iterdir() if path.is_file()}
    assert named in refused(run(one_step, target, "--student", "lm:1", *again, tokens=PER_STEP))
    del before["log.jsonl"]  # touched, to see whether it can be
    assert all((one_step / name).stat().st_mtime_ns == stamp for name, stamp in before.items())


@pytest.fixture(scope="module")
def one_step(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "lm"
    with short_turns(message=4, answer=12):
        assert run(out, target, "--student", "lm:1", tokens=PER_STEP).exit_code == 0
    return out


def test_data_of_a_target_of_another_size_is_refused(tmp_path: Path, one_step: Path) -> None:
    """As many layers and the same tokenizer: the sizes are all that tells the two targets apart."""
    wide = tmp_path / "wide"
    tiny_causal_lm("llama", VOCAB, 1, layers=6, hidden=64).save_pretrained(wide)
    TOKENIZER.save_pretrained(wide)
    line = refused(run(tmp_path / "out", wide, "--data", str(one_step / "data"), "--student", "lm:1"))
    assert "data of a target whose hidden size is not 64" in line


def test_a_damaged_shard_costs_one_line(target: Path, tmp_path: Path) -> None:
    """And when it is deleted, as the line says, the same command writes it anew."""
    arguments = ("--student", "lm:1", "--data-tokens", "1")
    assert run(tmp_path, target, *arguments).exit_code == 0
    (shard,) = shard_paths(tmp_path / "data")
    good = shard.read_bytes()
    shard.write_bytes(good[:-9])
    assert re.search(r"shard-00000.safetensors is damaged .*; delete it", refused(run(tmp_path, target, *arguments)))
    shard.unlink()
    assert run(tmp_path, target, *arguments).exit_code == 0
    assert shard.read_bytes() == good


def test_threads_and_random_state_are_left_as_asked(target: Path, tmp_path: Path, one_step: Path) -> None:
    """Two runs of the same command give the same drafter, whatever was computed before in the same process."""
    torch.manual_seed(99)
    torch.rand(5)
    again = run(tmp_path / "lm", target, "--student", "lm:1", "--threads", str(torch.get_num_threads()), tokens=PER_STEP)
    assert again.exit_code == 0
    assert (tmp_path / "lm" / "model.safetensors").read_bytes() == (one_step / "model.safetensors").read_bytes()
    lines = [json.loads(line) for line in (one_step / "log.jsonl").read_text().splitlines()]
    assert [line["agreement"] for line in read_log(tmp_path / "lm")] == [line["agreement"] for line in lines]
