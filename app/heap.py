"""Memory that went back to the allocator goes back to the system, but not at every step.

glibc takes a block of at least `M_MMAP_THRESHOLD` bytes straight from the system and gives it back when it is freed. By
itself it raises that threshold, up to 32 MB, whenever such a block is freed: after a few long prompts, tens of megabytes of
logits are cut out of the heap, between small things that stay, and the holes are kept. In a server under mixed load that was
550 MB of free memory after eight minutes; with the threshold held it is 150 MB, from the first minute on.

Whoever sets that threshold must set `M_TRIM_THRESHOLD` too, else glibc gives back the end of the heap whenever 128 kB of it
are free: every forward then takes its activations from the system anew, a page at a time, and decoding is a third slower.
"""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
_LARGE_BYTES = 16 * 2**20  # above the logits of eight sequences with ten rows each, below those of a chunk of a prompt
_KEPT_BYTES = 64 * 2**20  # free memory at the end of a heap that is not given back
_SET_BY_USER = ("MMAP_THRESHOLD", "TRIM_THRESHOLD")  # parts of MALLOC_MMAP_THRESHOLD_, glibc.malloc.mmap_threshold, …


def map_large_blocks() -> bool:
    """From now on this process takes large blocks from the system and gives them back; whether it was done.

    Not done where somebody has set a threshold in the environment, and with allocators other than glibc's.
    """
    environment = (*os.environ, os.environ.get("GLIBC_TUNABLES", ""))
    if any(name in entry.upper() for name in _SET_BY_USER for entry in environment):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGE_BYTES) == 1 and mallopt(_TRIM_THRESHOLD, _KEPT_BYTES) == 1)
