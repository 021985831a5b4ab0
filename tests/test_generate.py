"""``graftserve generate``: what is printed is the engine's text, whoever is given credit for it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from app.build import build
from app.cli import application
from app.config import Settings
from app.local import Question, ask_all, running
from app.prompt_sets import encode, read_prompts
from app.protocol import Message
from app.token_authors import TokenAuthors
from app.tree_view import colors, draw
from engine.request import Delta, FinishReason
from engine.sequence import TreeRecord
from engine.text import TextStream
from models.toy import byte_tokenizer
from tree.tree import TokenTree

TinyModel = Callable[..., PreTrainedModel]

OPTIONS = ("--weights", "fp32", "--device", "cpu", "--max-model-len", "200", "--schedule", "treegraft", "--max-tokens", "40")
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither settings nor colors of the machine that runs the tests."""
    for name in [name for name in os.environ if name.upper().startswith("GRAFTSERVE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GRAFTSERVE_COSTS", "none")  # nothing is measured
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


def generate(model_folder: Path, prompt: str, *arguments: str) -> Result:
    return CliRunner().invoke(application(), ["generate", prompt, "--target", str(model_folder), *OPTIONS, *arguments])


@cache
def engine_text(model_folder: Path, prompt: str) -> str:
    settings = Settings(target=str(model_folder), weights="fp32", device="cpu", max_model_len=200)
    loaded = build(settings, lambda line: None)
    ids = encode(loaded.tokenizer, [Message.model_validate({"role": "user", "content": prompt})])
    with running(loaded.engine):
        (answer,) = ask_all(loaded.engine, [Question(ids, 40)])
    return answer.text


def test_standard_output_is_the_engines_text_and_nothing_else(model_folder: Path) -> None:
    """Wrapped lines, expanded tabs or a swallowed control character would make a piped answer another text."""
    result = generate(model_folder, "héllo")
    assert result.exit_code == 0, result.stderr
    printed = result.stdout_bytes.decode()
    assert printed == engine_text(model_folder, "héllo") + "\n"
    assert "\x1b[" not in printed
    assert "treegraft: 40 tokens in" in result.stderr and "medium" in result.stderr and "■" not in result.stderr


def test_colors_change_nothing_but_the_color(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The colored answer is the same text; and a terminal gets colors at all (control of the test above)."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    result = generate(model_folder, "héllo")
    printed = result.stdout_bytes.decode()
    assert ESCAPE.search(printed)
    assert ESCAPE.sub("", printed) == engine_text(model_folder, "héllo") + "\n"
    assert "■ medium" in ESCAPE.sub("", result.stderr)


def test_no_color_is_honored(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NO_COLOR is a promise to people who cannot read colored text."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    result = generate(model_folder, "héllo")
    assert not ESCAPE.search(result.stdout_bytes.decode()) and not ESCAPE.search(result.stderr)


def test_trees_are_drawn_below_the_text(model_folder: Path) -> None:
    """`--show-tree` shows the last trees, the newest one last."""
    result = generate(model_folder, "héllo", "--show-tree", "3")
    assert result.exit_code == 0, result.stderr
    text, drawn = engine_text(model_folder, "héllo") + "\n", result.stdout_bytes.decode()
    assert drawn.startswith(text)
    assert drawn.count("drafted nodes verified") == 3 and drawn.count("← the target's own token") == 3


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--temperature", "3"], "temperature"),
        (["--raw", "--system", "be brief"], "--raw"),
        (["--schedule", "nothing"], "nothing"),
        (["--target", "no/such/folder"], "no/such/folder"),
        (["--max-model-len", "4"], "context holds 4 tokens"),
    ],
)
def test_a_mistake_is_one_line_with_status_2(model_folder: Path, arguments: list[str], named: str) -> None:
    """A traceback would hide what the user has to change."""
    result = generate(model_folder, "hello", *arguments)
    assert result.exit_code == 2 and result.stdout == ""
    assert named in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


def test_a_split_character_belongs_to_the_drafter_that_completed_it() -> None:
    """Bytes printed apart would be two broken characters on the terminal."""
    tokenizer = byte_tokenizer()
    authors = TokenAuthors(tokenizer.decode)
    smile = tuple("a🙂".encode())
    first = authors.split(Delta("r", smile[:3], ("ngram", "ngram", "ngram"), "a"))
    last = authors.split(Delta("r", smile[3:], ("medium", "target"), "🙂", FinishReason.LENGTH))
    assert first == [("a", "ngram")]
    assert last == [("🙂", "target")]


@given(st.data())
def test_pieces_joined_are_the_text(data: st.DataObject) -> None:
    """For any bytes, any blocks and any stop string, which holds text back, the engine's text comes out unchanged."""
    tokenizer = byte_tokenizer()
    ids = data.draw(st.lists(st.sampled_from([*"ab🙂é".encode(), 0xFF, 9, 13, 256]), max_size=20))
    engine = TextStream(tokenizer.decode, data.draw(st.sampled_from([(), ("ab",), ("ba🙂", "éé")])))
    authors = TokenAuthors(tokenizer.decode)
    printed: list[tuple[str, str]] = []
    while ids and not engine.stopped:
        block, ids = ids[: (size := data.draw(st.integers(1, 5)))], ids[size:]
        text = "".join(engine.push(token).text for token in block if not engine.stopped)
        is_last = engine.stopped or not ids
        if is_last:
            text += engine.finish()
        creators = tuple(data.draw(st.sampled_from(["ngram", "medium"])) for _ in block)
        printed += authors.split(Delta("r", tuple(block), creators, text, FinishReason.STOP if is_last else None))
    assert "".join(text for text, _ in printed) == engine.text
    assert all(text for text, _ in printed)


def test_a_drawn_tree_says_who_proposed_whom_and_what_was_taken() -> None:
    """The drawing is how a person checks what a schedule does; it must not lie about any of these."""
    tree = TokenTree(ord("r"))
    a = tree.add(0, ord("a"), -0.5, "small")
    b = tree.add(a, ord("b"), -0.25, "medium")
    tree.add(0, ord("c"), -1.5, "small")
    tree.add(b, ord("x"), -3.0, "small")
    tree.rescore(a, -0.1, "medium")
    tree.refresh()
    record = TreeRecord(tree, nodes=(0, a, b, 3), path=(a, b), extra=ord("z"))
    console = Console(width=120, force_terminal=True, color_system=None, highlight=False, no_color=True)
    with console.capture() as capture:
        console.print(draw(record, byte_tokenizer().decode, colors(["small", "medium"])))
    lines = [line.rstrip() for line in ESCAPE.sub("", capture.get()).splitlines()]
    assert lines == [
        "'r'  3 of 4 drafted nodes verified, 2 accepted",
        "├── 'a'  0.90 small, scored by medium",
        "│   └── 'b'  0.78 medium",
        "│       └── 'z'  ← the target's own token",
        "└── 'c'  0.22 small",
    ]
    drawing = draw(record, byte_tokenizer().decode, colors(["small", "medium"]))
    bold = ["bold" in str(child.label.style) for child in drawing.children]  # type: ignore[union-attr]
    assert bold == [True, False], "the accepted path is bold, its siblings are not"


def test_prompts_are_read_from_text_and_json_lines(tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast) -> None:
    """Known sets of prompts come in these shapes; a line that is none of them must be named."""
    lines = tmp_path / "a.txt"
    lines.write_text("one\n\ntwo\n")
    assert [conversation[-1].text for conversation in read_prompts(lines)] == ["one", "two"]
    objects = tmp_path / "a.jsonl"
    objects.write_text(
        '{"prompt": "p"}\n{"turns": ["t", "u"]}\n'
        '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "m"}]}\n'
    )
    assert [conversation[-1].text for conversation in read_prompts(objects)] == ["p", "t", "m"]
    assert len(read_prompts(objects, limit=2)) == 2
    assert len(read_prompts(None)) == 20
    assert all(encode(byte_tokenizer, conversation) for conversation in read_prompts(None))
    for bad in ("{", '{"question": "q"}', '{"messages": []}', '{"messages": [{"role": "king", "content": "x"}]}'):
        objects.write_text(f'{{"prompt": "p"}}\n{bad}\n')
        with pytest.raises(ValueError, match="a.jsonl:2"):
            read_prompts(objects)
