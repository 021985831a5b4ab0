"""Memory that went back to the allocator goes back to the system: large blocks are mapped one by one.

glibc takes a block of at least `M_MMAP_THRESHOLD` bytes straight from the system and gives it back when it is freed. By
itself it raises that threshold, up to 32 MB, whenever such a block is freed: after the first long prompt, megabytes of logits
and scores are cut out of the heap, between small things that stay, and the holes are kept. In a server under mixed load that
was 550 MB of free memory after eight minutes, and still growing; with the threshold held it is 200 MB, from the first
minute on. A forward of a few rows makes no block as large as this threshold, so decoding does not pay for it.
"""

from __future__ import annotations

import ctypes
import os

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h
_LARGE_BYTES = 4 * 2**20
_SET_BY_USER = ("MALLOC_MMAP_THRESHOLD_", "glibc.malloc.mmap_threshold")


def map_large_blocks() -> bool:
    """From now on this process takes large blocks from the system and gives them back; whether it was done.

    Not done where somebody has set the threshold in the environment, and with allocators other than glibc's.
    """
    environment = (*os.environ, os.environ.get("GLIBC_TUNABLES", ""))
    if any(name in entry for name in _SET_BY_USER for entry in environment):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    return mallopt is not None and mallopt(_MMAP_THRESHOLD, _LARGE_BYTES) == 1
