"""Memory that was freed goes back to the system, but not at every step: large blocks at once, others when nobody asks.

glibc takes a block of at least `M_MMAP_THRESHOLD` bytes straight from the system and gives it back when it is freed. By
itself it raises that threshold, up to 32 MB, whenever such a block is freed: after a few long prompts, tens of megabytes of
logits are cut out of the heap, between small things that stay, and the holes are kept. In a server under mixed load that was
550 MB of free memory after eight minutes; with the threshold held it is 150 MB, from the first minute on.

Whoever sets that threshold must set `M_TRIM_THRESHOLD` too, else glibc gives back the end of the heap whenever 128 kB of it
are free: every forward then takes its activations from the system anew, a page at a time, and decoding is a third slower.
So up to 64 MB at the end of the heap are kept, and holes in it; when nobody asks for anything, they are given back too.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable
from typing import NoReturn, Protocol

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
_LARGE_BYTES = 16 * 2**20  # above the logits of eight sequences with ten rows each, below those of a chunk of a prompt
_KEPT_BYTES = 64 * 2**20  # free memory at the end of a heap that is not given back
_SET_BY_USER = ("MMAP_THRESHOLD", "TRIM_THRESHOLD")  # parts of MALLOC_MMAP_THRESHOLD_, glibc.malloc.mmap_threshold, …


class Works(Protocol):
    """What has or has not something to do."""

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...


def map_large_blocks() -> bool:
    """From now on this process takes large blocks from the system and gives them back; whether it was done.

    Not done where somebody has set a threshold in the environment, and with allocators other than glibc's.
    """
    mallopt = _of_libc("mallopt")
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGE_BYTES) == 1 and mallopt(_TRIM_THRESHOLD, _KEPT_BYTES) == 1)


def give_back() -> bool:
    """Give all free memory of the heap to the system; whether there was any. A few milliseconds, from any thread.

    Not done where :func:`map_large_blocks` would not.
    """
    malloc_trim = _of_libc("malloc_trim")
    return malloc_trim is not None and bool(malloc_trim(0) == 1)


async def give_back_at_rest(engine: Works, *, after_s: float = 2.0, look_every_s: float = 0.5) -> NoReturn:
    """Whenever `engine` has had nothing to do for so long, give its free memory back, once."""
    has_worked, idle_s = True, 0.0  # loading leaves free memory, too
    while True:
        await asyncio.sleep(look_every_s)
        if engine.num_running or engine.num_waiting:
            has_worked, idle_s = True, 0.0
            continue
        idle_s += look_every_s
        if has_worked and idle_s >= after_s:
            await asyncio.to_thread(give_back)  # it waits for the allocator, the event loop should not
            has_worked = False


def _of_libc(name: str) -> Callable[..., int] | None:
    """A function of the C library, unless it has none of that name or the user manages the heap himself."""
    environment = (*os.environ, os.environ.get("GLIBC_TUNABLES", ""))
    if os.name != "posix" or any(part in entry.upper() for part in _SET_BY_USER for entry in environment):
        return None
    function: Callable[..., int] | None = getattr(ctypes.CDLL(None), name, None)
    return function
