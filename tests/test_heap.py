"""Large blocks go back to the system, small ones do not: seen in glibc's own account, in processes of their own."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from app import heap

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator is not glibc's")

PROGRAM = """
import ctypes, json, sys
from app.heap import give_back, map_large_blocks

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
Account = type("Account", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_size_t) for name in names]})
libc.mallinfo2.restype = Account

said = map_large_blocks() if sys.argv[1] == "held" else None
for _ in range(3):
    libc.free(libc.malloc(24_000_000))
before = libc.mallinfo2().hblkhd
block = libc.malloc(24_000_000)
mapped = libc.mallinfo2().hblkhd - before
libc.free(block)
libc.free(libc.malloc(8_000_000))
kept = libc.mallinfo2().keepcost
gave = give_back()
print(json.dumps({"said": said, "mapped": mapped, "kept": kept, "gave": gave, "left": libc.mallinfo2().keepcost}))
"""


def ran(how: str, **environment: str) -> dict[str, Any]:
    """What `map_large_blocks` said; bytes mapped for 24 MB after others like it; bytes kept at the heap's end after 8 MB, and
    what `give_back` said and left of them.
    """
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_large_blocks_are_mapped_and_others_kept() -> None:
    """Activations that came from the system at every step would cost a third of the speed."""
    found = ran("held")
    assert found["said"] is True and found["mapped"] >= 24_000_000
    assert found["kept"] >= 8_000_000
    assert found["gave"] is True and found["left"] < 1_000_000


def test_negative_control_without_it_large_blocks_stay_in_the_heap() -> None:
    """glibc has learned from the first ones to cut the next one out of the heap."""
    assert ran("left alone")["mapped"] == 0


def test_negative_control_with_one_threshold_of_two_what_was_used_is_given_back() -> None:
    found = ran("held", MALLOC_MMAP_THRESHOLD_=str(16 * 2**20))
    assert found["said"] is False and found["kept"] < 1_000_000


@pytest.mark.parametrize(
    "variable",
    [
        "MALLOC_MMAP_THRESHOLD_=33554432",
        "MALLOC_TRIM_THRESHOLD_=33554432",
        "GLIBC_TUNABLES=glibc.malloc.mmap_threshold=33554432",
    ],
)
def test_who_sets_a_threshold_is_obeyed(variable: str) -> None:
    name, _, value = variable.partition("=")
    found = ran("held", **{name: value})
    assert found["said"] is False and found["gave"] is False


class Worker:
    """Something to do, or nothing."""

    num_running = 0
    num_waiting = 0


def test_free_memory_goes_back_once_whenever_the_work_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """After loading and after every burst of work; never while somebody runs or waits, nor again and again at rest."""
    worker, given = Worker(), list[bool]()
    monkeypatch.setattr(heap, "give_back", lambda: given.append(True))

    async def live() -> list[int]:
        task = asyncio.create_task(heap.give_back_at_rest(worker, after_s=0.04, look_every_s=0.01))
        seen = []
        for running, waiting in ((0, 0), (1, 0), (0, 2), (0, 0), (0, 0)):
            worker.num_running, worker.num_waiting = running, waiting
            await asyncio.sleep(0.4)
            seen.append(len(given))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return seen

    assert asyncio.run(live()) == [1, 1, 1, 2, 2]


def test_a_pause_between_two_requests_is_no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Giving back at each of them would take the activations from the system anew for every request."""
    worker, given = Worker(), list[bool]()
    monkeypatch.setattr(heap, "give_back", lambda: given.append(True))

    async def live() -> None:
        worker.num_running = 1
        task = asyncio.create_task(heap.give_back_at_rest(worker, after_s=1.0, look_every_s=0.01))
        for _ in range(10):
            await asyncio.sleep(0.05)
            worker.num_running = 1 - worker.num_running
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(live())
    assert not given
