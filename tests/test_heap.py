"""Large blocks go back to the system: seen in glibc's own account, in processes of their own."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator is not glibc's")

PROGRAM = """
import ctypes, sys
import torch
from app.heap import map_large_blocks

if sys.argv[1] == "held":
    print(map_large_blocks())
else:
    print("-")
names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
Account = type("Account", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_size_t) for name in names]})
mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = Account
for _ in range(3):
    block = torch.ones(4_000_000)  # 16 MB
    del block
before = mallinfo2().hblkhd
block = torch.ones(4_000_000)
print(mallinfo2().hblkhd - before)
"""


def ran(how: str, **environment: str) -> tuple[str, int]:
    """What `map_large_blocks` said, and bytes that are mapped for a block of 16 MB after others of that size were freed."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    said, mapped = done.stdout.split()
    return said, int(mapped)


def test_large_blocks_are_mapped_and_given_back() -> None:
    said, mapped = ran("held")
    assert said == "True" and mapped >= 16_000_000


def test_without_it_they_stay_in_the_heap() -> None:
    """Negative control: glibc has learned from the first blocks to cut the next one out of the heap."""
    assert ran("left alone")[1] == 0


@pytest.mark.parametrize("variable", ["MALLOC_MMAP_THRESHOLD_=33554432", "GLIBC_TUNABLES=glibc.malloc.mmap_threshold=33554432"])
def test_who_sets_the_threshold_is_obeyed(variable: str) -> None:
    name, _, value = variable.partition("=")
    said, mapped = ran("held", **{name: value})
    assert said == "False" and mapped == 0
