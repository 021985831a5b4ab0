"""Programs that pip cannot install: a test that needs one is skipped where it is missing, unless skipping is forbidden."""

from __future__ import annotations

import os
import shutil

import pytest

MUST_HAVE = "REQUIRE_TOOLS"  # set to 1 in continuous integration, where a skipped test would go unnoticed


def required_tool(name: str, package: str) -> str:
    """Path of a program; skips the test, or fails it under REQUIRE_TOOLS=1, where it is not installed."""
    path = shutil.which(name)
    if path is not None:
        return path
    missing = f"{name} is not installed; on Debian: apt-get install --no-install-recommends {package}"
    if os.environ.get(MUST_HAVE) == "1":
        pytest.fail(missing)
    pytest.skip(missing)
