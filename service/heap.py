"""What malloc may keep of freed memory, and what garbage collections look at, process-wide.

glibc raises its mmap threshold, to 32 MiB, with every larger block that is freed: from then on such
blocks come from the arena of the thread that asked, and stay in it. A service whose answers are
decoded in a pool of threads so holds every thread's largest blocks for good.
"""

from __future__ import annotations

import ctypes
import gc
import os

MMAP_BYTES = 4 << 20
"""Blocks from here on are mapped, and go back when freed. Below are the bodies of decoding, 40 to
640 KB, which would pay for their pages at every request (docs/notes/fast_path.md)."""

TRIM_BYTES = 2 * MMAP_BYTES
"""What may lie free at an arena's end; glibc's own ratio."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_NAMES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def bound_heap() -> bool:
    """Fix both thresholds of glibc's malloc; return whether they are ours now.

    False: another C library, or the environment has settings of its own, which stand.
    Source: mallopt(3)
    """
    if any(name in os.environ for name in _NAMES):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, MMAP_BYTES) and mallopt(_M_TRIM_THRESHOLD, TRIM_BYTES))


def settle() -> None:
    """Take what there is now, once everything is loaded, out of garbage collections for good.

    A full collection of the 218,000 objects of modules, schemas and tables holds up every answer
    for 100 ms, and nothing of it is ever garbage.
    """
    gc.collect()
    gc.freeze()
