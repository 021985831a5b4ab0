"""Programs of the machine that some tests need: skipped without them, or failed where GRAFTSERVE_REQUIRE_TOOLS=1 says so.

REQUIRE_TOOLS=1 does the same. The first one is taken out of the environment at once: to a server started by a test it would
be a misspelled setting.
"""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

import pytest

REQUIRED = "1" in (os.environ.pop("GRAFTSERVE_REQUIRE_TOOLS", ""), os.environ.get("REQUIRE_TOOLS"))


def tool(*names: str, hint: str) -> str:
    """The path of the first of the programs that is there; `hint` says how to get one."""
    for name in names:
        if found := shutil.which(name):
            return found
    _go_without(f"{names[0]} is not on this machine ({hint})")


def _go_without(message: str) -> NoReturn:
    if REQUIRED:
        pytest.fail(message)
    pytest.skip(message)
