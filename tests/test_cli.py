"""The command line: every setting has an option, the order of sources holds, and a mistake costs one line."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from app.cli import application
from app.config import EMBEDDED, Settings
from app.target import with_local_target

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of the machine that runs the tests, and a terminal wide enough for one option per line."""
    for name in [name for name in os.environ if name.upper().startswith("GRAFTSERVE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "200")


def run(*arguments: str) -> tuple[int, str, str]:
    """Status, standard output and standard error of a command."""
    result = CliRunner().invoke(application(), arguments)
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize("command", ["serve", "config"])
def test_every_setting_has_an_option(command: str) -> None:
    """A setting without an option could be tried out only by editing a file."""
    status, shown, _ = run(command, "--help")
    assert status == 0
    assert not [name for name in Settings.model_fields if f"--{name.replace('_', '-')} " not in shown]


def test_the_default_target_is_the_embedded_one() -> None:
    """`serve` without arguments is what a newcomer types first."""
    status, shown, _ = run("config")
    assert status == 0
    assert f'target = "{EMBEDDED}"' in shown.splitlines()


def test_command_line_over_environment_over_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With another order a container's environment could not be overridden for one run."""
    file = tmp_path / "settings.toml"
    file.write_text('port = 1\nhost = "file"\nmax_num_seqs = 3\ntarget = "file"\n')
    monkeypatch.setenv("GRAFTSERVE_PORT", "2")
    monkeypatch.setenv("GRAFTSERVE_HOST", "environment")
    _, shown, _ = run("config", "--config", str(file), "--port", "4")
    lines = shown.splitlines()
    assert {"port = 4", 'host = "environment"', "max_num_seqs = 3", 'target = "file"'} <= set(lines)


def test_printed_settings_are_a_file_that_gives_the_same_settings(tmp_path: Path) -> None:
    """The printed record is worthless as a bug report if it cannot be run again."""
    _, shown, _ = run("config", "--target", 'C:\\models\\"odd" näme', "--small", "none", "--stall-s", "2.5",
        "--define", '{"mine": {"policy": "eagle", "options": {"width": 3}, "description": "it\'s mine"}}')
    file = tmp_path / "settings.toml"
    file.write_text(shown)
    assert 'small = "none"' in shown.splitlines()
    assert run("config", "--config", str(file))[1] == shown


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--port", "many"], ["port", "'many'"]),
        (["--port", "99999", "--weights", "int3"], ["port", "99999", "weights", "int3", "fp32"]),
        (["--budget", "0"], ["budget", "'0'"]),
        (["--config", "/no/such/file.toml"], ["/no/such/file.toml: no such file"]),
    ],
)
def test_a_bad_setting_is_one_line_that_names_it(arguments: list[str], named: list[str]) -> None:
    """Else the reader searches a traceback of somebody else's library for the word they mistyped."""
    status, shown, complaint = run("config", *arguments)
    assert (status, shown) == (2, "")
    assert complaint.count("\n") == 1
    assert all(word in complaint for word in named), complaint


def test_an_unknown_environment_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelled variable that is ignored shows only when the limit it should have set is exceeded."""
    monkeypatch.setenv("GRAFTSERVE_PROT", "1")
    status, _, complaint = run("config")
    assert status == 2 and "GRAFTSERVE_PROT" in complaint


def test_a_port_in_use_is_known_before_the_models_load() -> None:
    """Else the user waits for the weights only to learn that an old server still runs."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "app", "serve", "--port", port, "--target", "/no/such/model"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    lines = done.stderr.strip().splitlines()
    assert port in lines[-1] and "in use" in lines[-1] and "--port" in lines[-1]
    assert len(lines) == 2, done.stderr  # the first says what is being started


def test_only_the_embedded_name_is_replaced_by_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A target that was named must never be exchanged for the default."""
    monkeypatch.setattr("app.target.embedded_target", lambda progress: tmp_path)
    named = Settings(target="some/model", small="ngram", medium=None)
    assert with_local_target(named, print) == named
    embedded = named.model_copy(update={"target": EMBEDDED})
    assert with_local_target(embedded, print) == named.model_copy(update={"target": str(tmp_path)})
