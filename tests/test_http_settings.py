"""Where settings come from, which source wins, and that no misspelling goes unnoticed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from app.config import Settings, load_settings


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith("GRAFTSERVE_"):
            monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "settings.toml"
    path.write_text('target = "from-file"\nport = 1\nmax_num_seqs = 3\nsmall = "none"\n')
    return path


def test_command_line_beats_environment_beats_file_beats_default(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An override that loses against the file it overrides is a long evening."""
    monkeypatch.setenv("GRAFTSERVE_PORT", "2")
    monkeypatch.setenv("GRAFTSERVE_MAX_NUM_SEQS", "4")
    settings = load_settings(file, {"port": 3, "host": None})
    assert (settings.target, settings.port, settings.max_num_seqs) == ("from-file", 3, 4)
    assert (settings.host, settings.max_waiting, settings.small) == ("127.0.0.1", 64, None)


def test_the_file_can_be_named_by_the_environment(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container has no command line to speak of."""
    monkeypatch.setenv("GRAFTSERVE_CONFIG", str(file))
    assert load_settings().target == "from-file"


def test_unknown_keys_are_errors_in_every_source(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelled limit that is ignored is no limit."""
    with pytest.raises(ValueError, match="max_seqs"):
        load_settings(None, {"target": "x", "max_seqs": 3})
    with file.open("a") as stream:
        stream.write("max_seqs = 3\n")
    with pytest.raises(ValueError, match="max_seqs"):
        load_settings(file)
    monkeypatch.setenv("GRAFTSERVE_MAX_SEQS", "3")
    with pytest.raises(ValueError, match="GRAFTSERVE_MAX_SEQS"):
        load_settings(None, {"target": "x"})


def test_files_that_are_missing_or_broken_are_errors(tmp_path: Path) -> None:
    """A server that starts with defaults instead of its file is a server nobody configured."""
    with pytest.raises(FileNotFoundError):
        load_settings(tmp_path / "nothing.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("port = = 3")
    with pytest.raises(ValueError, match=r"broken\.toml"):
        load_settings(broken)


@pytest.mark.parametrize(
    ("key", "value"),
    [("port", 70000), ("budget", 0), ("max_num_seqs", 0), ("stall_s", 0), ("weights", "int8"), ("target", "")],
)
def test_impossible_values_are_errors_that_name_the_key(key: str, value: object) -> None:
    """At the start, not at the first request."""
    with pytest.raises(ValidationError, match=key):
        load_settings(None, {"target": "x", key: value})


def test_settings_cannot_change_after_the_start() -> None:
    """Who reads them later must see what was asked for."""
    settings = Settings(target="x")
    with pytest.raises(ValidationError):
        settings.port = 5


def test_every_setting_is_described() -> None:
    """The descriptions are the documentation."""
    assert [name for name, field in Settings.model_fields.items() if not field.description] == []
