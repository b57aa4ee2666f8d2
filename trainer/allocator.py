"""The C library's memory allocator: what a step frees is kept for the next one."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of mallopt(3)."""
LARGEST = 32 << 20
"""Bytes: the most that glibc takes as a threshold for blocks of their own."""
NEVER = -1

_kept = False
"""Whether freed memory stays this process's now."""

_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_",
             "MALLOC_TOP_PAD_")  # fmt: skip


def keep_freed(environment: Mapping[str, str] = os.environ) -> bool:
    """From now on memory that is freed stays this process's (glibc only).

    A step frees its activations and gradients, and the next one needs as many. Left alone, glibc
    hands freed memory of more than 64 MiB in a row back to the system each time, which then gives
    page after page of it again, zeroed: a fault for each 4 KiB. Blocks of more than 32 MiB still
    come and go one by one.

    Returns:
        False if nothing was changed: another C library, or settings of the user's for this one.
    """
    global _kept
    _kept = (not _is_set(environment) and _set(M_MMAP_THRESHOLD, LARGEST)
             and _set(M_TRIM_THRESHOLD, NEVER))
    return _kept


def give_back() -> None:
    """The end of `keep_freed`: what is free goes to the system, now and from now on.

    Nothing where nothing was kept: from a first setting on glibc no longer learns its thresholds,
    and with those of its start each array of more than 128 KiB comes from the system.
    """
    global _kept
    if _kept and _set(M_TRIM_THRESHOLD, 2 * LARGEST):
        ctypes.CDLL(None).malloc_trim(0)
    _kept = False


def _is_set(environment: Mapping[str, str]) -> bool:
    """Whether the user has settings for the allocator."""
    return (any(name in environment for name in _SETTINGS)
            or "glibc.malloc." in environment.get("GLIBC_TUNABLES", ""))


def _set(parameter: int, value: int) -> bool:
    """Set one of the allocator's parameters, where it is glibc's."""
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(parameter, value) == 1
