"""Which thread computes in parallel, and why only one may.

libgomp gives every thread that enters a parallel region a team of helpers of its own. With two teams there are more threads
than processors; helpers then no longer spin between regions but sleep, and each of the thousand regions of a forward waits for
a wake-up: on two cores a one-row forward of SmolLM2 takes 41 ms instead of 25, eight rows 45 instead of 31. So whatever runs
before the thread that serves, on other threads, runs without a team.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_helpers() -> Iterator[None]:
    """Let torch compute on the calling thread alone inside the block; afterwards as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def num_processors() -> int:
    """Processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
