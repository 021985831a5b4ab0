"""Who may import whom, read from the import statements themselves (under TYPE_CHECKING and in functions too)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

MAY_IMPORT: dict[str, set[str]] = {
    "app": {"distill", "engine", "scheduler", "drafters", "verify", "tree", "models"},
    "distill": {"drafters", "tree", "models"},
    "engine": {"scheduler", "drafters", "verify", "tree", "models"},
    "scheduler": {"tree"},
    "verify": {"tree"},
    "drafters": {"tree", "models"},
    "tree": set(),
    "models": set(),
}
OURS = {*MAY_IMPORT, "bench", "deploy", "tests"}

ONLY_IN: dict[str, set[str]] = {
    "transformers": {"app", "models"},
    "fastapi": {"app"},
    "starlette": {"app"},
    "uvicorn": {"app"},
    "prometheus_client": {"app"},
    "matplotlib": {"app"},
    "typer": {"app"},
    "pydantic_settings": {"app"},
    "opentelemetry": {"app"},
}
READS_ENVIRONMENT = {"models/embedded.py"}  # besides app/


def imports(source: str) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything a module imports; relative imports come out as '.'."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, "." if node.level else node.module or ""


def forbidden_imports(package: str, source: str) -> list[str]:
    """Every import of ``source``, a module of ``package``, that points against the table, as 'line: reason'."""
    found = []
    for line, name in imports(source):
        top = name.split(".")[0]
        if name == ".":
            found.append(f"{line}: relative import")
        elif top in OURS and top != package and top not in MAY_IMPORT[package]:
            found.append(f"{line}: {package} may not import {name}")
        elif package not in ONLY_IN.get(top, {package}):
            found.append(f"{line}: {top} belongs in {', '.join(sorted(ONLY_IN[top]))} only")
    return found


def environment_reads(source: str) -> list[int]:
    """Lines that touch os.environ or os.getenv, however they were imported."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv"}
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if (isinstance(node, ast.Attribute) and node.attr in names)
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and names & {alias.name for alias in node.names})
    ]


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_point_one_way(package: str) -> None:
    """An arrow against the table starts a cycle: parts could no longer be read, tested or replaced alone."""
    files = modules(package)
    assert files, f"{package} holds no modules"
    wrong = [f"{path}:{entry}" for path in files for entry in forbidden_imports(package, path.read_text())]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_environment_is_read_at_the_edge_only(package: str) -> None:
    """A setting read deep inside would be missing from the printed configuration and could not be set in a test."""
    if package == "app":
        return
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in modules(package)
        if path.relative_to(ROOT).as_posix() not in READS_ENVIRONMENT
        for line in environment_reads(path.read_text())
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("tree", "from models.sampling import SamplingParams"),
        ("scheduler", "import verify.greedy"),
        ("models", "def late():\n    from tree.tree import TokenTree"),
        ("verify", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from drafters.base import Drafter"),
        ("engine", "from app.config import Settings"),
        ("engine", "from transformers import AutoTokenizer"),
        ("engine", "import prometheus_client as metrics"),
        ("drafters", "from . import base"),
        ("app", "from tests.conftest import engine"),
    ],
)
def test_a_forbidden_import_is_seen(package: str, source: str) -> None:
    """Negative control: a walker that sees nothing would pass every tree."""
    assert len(forbidden_imports(package, source)) == 1


@pytest.mark.parametrize(
    "source", ["import os\nos.environ['A']", "from os import getenv", "import os as o\no.getenv('A')"]
)
def test_a_read_of_the_environment_is_seen(source: str) -> None:
    """Negative control of the environment rule."""
    assert environment_reads(source)
