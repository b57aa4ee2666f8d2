"""Settings of glibc's memory allocator: keep freed memory in the process for the next step."""

from __future__ import annotations

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3)
LARGEST = 32 << 20  # largest threshold in bytes for blocks that are mapped separately
NEVER = -1
SETTINGS = ("TRIM_THRESHOLD", "MMAP_THRESHOLD", "MMAP_MAX", "TOP_PAD")
_kept = False  # whether freed memory currently stays in this process


def keep_freed() -> bool:
    """Keep the memory that a step frees for the next step; False if the C library is not glibc, or
    the user has set allocator options. By default glibc returns more than 64 MiB of contiguous free
    memory to the system, which provides it again with a page fault for each 4 KiB. Blocks of more
    than 32 MiB are still mapped separately."""
    global _kept
    users = any(f"MALLOC_{name}_" in os.environ for name in SETTINGS) or (
        "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""))
    _kept = not users and _set(M_MMAP_THRESHOLD, LARGEST) and _set(M_TRIM_THRESHOLD, NEVER)
    return _kept


def give_back() -> None:
    """Undo `keep_freed`, if it did anything: return free memory to the system, now and in future.
    (glibc no longer adapts the thresholds; with the initial ones it would map 128 KiB.)"""
    global _kept
    if _kept and _set(M_TRIM_THRESHOLD, 2 * LARGEST):
        ctypes.CDLL(None).malloc_trim(0)
    _kept = False


def _set(parameter: int, value: int) -> bool:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(parameter, value) == 1
