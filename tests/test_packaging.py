"""What the wheel holds, and what happens when a stranger owns one of our package names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from app.cli import PACKAGES

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """File names inside a wheel built by the installed hatchling, without an index."""
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = target.glob("graftserve-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_the_wheel_holds_the_runtime_packages_and_nothing_else(wheel_names: list[str]) -> None:
    """A shipped `tests` or `bench` would be importable everywhere; a forgotten package fails only at the user's."""
    tops = {name.split("/")[0] for name in wheel_names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)


def test_every_module_of_the_folders_is_in_the_wheel(wheel_names: list[str]) -> None:
    """A subpackage left out (`tree/policies`, `app/routes`) would be missed only after installing the wheel."""
    in_folders = {path.relative_to(ROOT).as_posix() for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert {name for name in wheel_names if name.endswith(".py")} == in_folders


def test_the_drafters_of_the_embedded_model_are_in_the_wheel(wheel_names: list[str]) -> None:
    """An installed server without them would silently fall back to stand-ins."""
    for role in ("small", "medium"):
        assert {f"drafters/pretrained/{role}/{file}" for file in ("config.json", "model.safetensors")} <= set(wheel_names)
    assert sum(file.stat().st_size for file in (ROOT / "drafters" / "pretrained").rglob("*")) < 40e6


def test_the_pages_are_in_the_wheel(wheel_names: list[str]) -> None:
    """Files that are no modules are easily left out, and the playground would be 404 after installing."""
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "app" / "static").iterdir()}
    assert "app/static/index.html" in pages
    assert pages <= set(wheel_names)


def test_every_folder_with_modules_is_a_package() -> None:
    """Without an `__init__.py` a folder becomes a namespace that a stranger's folder of the same name can join."""
    folders = {path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert not [folder for folder in folders if not (folder / "__init__.py").is_file()]


def test_every_dependency_is_pinned() -> None:
    """An unpinned dependency gives tomorrow's installation another behavior than today's tests saw."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert not [line for line in pins if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9A-Za-z.]*", line)]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = sum(project["optional-dependencies"].values(), project["dependencies"])
    names = {_normal(re.split(r"[^A-Za-z0-9._-]", entry)[0]) for entry in wanted}
    assert names <= {_normal(pin.split("==")[0]) for pin in pins}


def test_a_stranger_that_owns_a_package_name_is_named(tmp_path: Path) -> None:
    """With dm-tree installed, `import tree` would silently be dm-tree, and fail much later in words that mislead."""
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "__init__.py").write_text("raise SystemExit('imported the stranger')")
    done = _graftserve(tmp_path, "version", path=[tmp_path, ROOT])
    assert done.returncode == 1
    assert "'tree'" in done.stderr and str(tmp_path / "tree") in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


def test_without_a_stranger_the_guard_is_silent(tmp_path: Path) -> None:
    """Negative control: a guard that always refuses would pass the test above."""
    done = _graftserve(tmp_path, "version", path=[ROOT])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("graftserve ")


def _graftserve(folder: Path, *arguments: str, path: list[Path]) -> subprocess.CompletedProcess[str]:
    """Run the command line as the console script would, in ``folder``, with ``path`` before every installed package."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [sys.executable, "-c", "from app.cli import main; main()", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
