"""File operations that a power cut can't undo: write, make a folder, publish names."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

CHUNK = 1 << 20
"""Bytes handled at a time: small enough to stay in cache, large enough to release the GIL for."""


def write_file(
    path: Path, content: Iterable[memoryview], seen: Callable[[memoryview], object] = len
) -> None:
    """Write a new file of bytes through to the disk; `seen` gets each part before it is written.

    Its pages leave the cache afterwards, where the system can do that: only then does reading
    the file back say anything about the disk.

    Raises:
        OSError: the file exists, the disk is full or fails.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for view in content:
            for start in range(0, len(view), CHUNK):
                part = view[start : start + CHUNK]
                seen(part)
                while part:
                    part = part[os.write(fd, part) :]
        os.fsync(fd)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def free_bytes(folder: Path) -> int:
    """What may still be written in a folder, which needn't exist yet."""
    while not folder.exists():
        folder = folder.parent
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, durably; does nothing if it is there."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        fsync_folder(folder.parent)


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder durable: what was created, renamed, removed there."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems can't
            raise
    finally:
        os.close(fd)


def remove_folder(folder: Path) -> None:
    """Remove a folder and what it holds, or a link to one; it may be gone, or go meanwhile."""
    with suppress(FileNotFoundError):
        if folder.is_symlink():
            folder.unlink()
            return
        for entry in [*os.scandir(folder)]:
            if entry.is_dir(follow_symlinks=False):
                remove_folder(Path(entry.path))
            else:
                with suppress(FileNotFoundError):
                    os.unlink(entry.path)
        folder.rmdir()
