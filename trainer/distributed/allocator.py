"""Settings of glibc's memory allocator: keep freed memory in the process for the next step."""

from __future__ import annotations

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3)."""
LARGEST = 32 << 20
"""Largest threshold in bytes that glibc accepts for blocks that are mapped separately."""
NEVER = -1

_kept = False
"""Whether freed memory currently stays in this process."""


def keep_freed() -> bool:
    """Keep freed memory in this process from now on (glibc only).

    A step frees its activations and gradients, and the next step needs the same amount. By default
    glibc returns more than 64 MiB of contiguous free memory to the system each time. The system
    then provides it again as zeroed pages, with a page fault for each 4 KiB. Blocks of more than
    32 MiB are still mapped and unmapped separately.

    Returns:
        False if nothing was changed: another C library, or the user has set allocator options.
    """
    global _kept
    users = any(name.startswith("MALLOC_") for name in os.environ) or (
        "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""))
    _kept = not users and _set(M_MMAP_THRESHOLD, LARGEST) and _set(M_TRIM_THRESHOLD, NEVER)
    return _kept


def give_back() -> None:
    """Undo `keep_freed`: return free memory to the system, now and in future.

    Does nothing if `keep_freed` did nothing: after the first setting glibc no longer adapts its
    thresholds, and with the initial ones each array of more than 128 KiB is mapped separately.
    """
    global _kept
    if _kept and _set(M_TRIM_THRESHOLD, 2 * LARGEST):
        ctypes.CDLL(None).malloc_trim(0)
    _kept = False


def _set(parameter: int, value: int) -> bool:
    """Set an allocator parameter. Returns False if the C library isn't glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(parameter, value) == 1
