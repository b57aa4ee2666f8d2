"""Durable file operations: the written data survives a power cut."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.errors import FileDamaged

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk."""
DISK_FULL_WAIT_S = 15.0
"""Seconds that a write which can't be left out waits for space on a full disk."""
CHUNK = 1 << 20
"""Bytes per read or write: fits the CPU cache, and is worth releasing the GIL for."""
LARGEST_RECORD = 1 << 31
"""Largest file that is read as a whole, in bytes."""


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file, and return its descriptor. Raises FileDamaged for anything else: a pipe
    would block, a device has no end. To be written, it must not be a link either, which may lead
    to any other file of the user."""
    if flags & (os.O_WRONLY | os.O_RDWR):
        flags |= os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY, 0o666)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
    except OSError as error:
        if error.errno == errno.ELOOP:
            refuse_link(path)
        # A folder that is a link to itself; a socket or a pipe; a folder.
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise
    raise FileDamaged(f"{display_path(path)}: this is no regular file; remove it")


def read_file(path: Path, offset: int = 0, *, most: int = LARGEST_RECORD) -> bytes:
    """Read a regular file of up to `most` bytes from an offset on. Raises FileDamaged, OSError."""
    with open(open_regular(path), "rb") as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise FileDamaged(f"{display_path(path)}: it has {size:,} bytes, and up to {most:,} "
                              "are read; move it away")
        file.seek(offset)
        return file.read(max(0, size - offset))  # files of /proc have more than their size


def write_file(
    path: Path, content: Iterable[Any], on_chunk: Callable[[memoryview], object] = len, *,
    mode: int = 0o666,
) -> None:
    """Write buffers to a new file and fsync it, passing each chunk to `on_chunk` before it is
    written. Its pages are dropped from the page cache: reading it back is to verify the disk."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        for buffer in content:
            view = memoryview(buffer)
            if view.nbytes:  # an empty one can't be cast
                view = view.cast("B")
            for start in range(0, len(view), CHUNK):
                part = view[start : start + CHUNK]
                on_chunk(part)
                while part:
                    part = part[os.write(fd, part) :]
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def read_chunks(path: Path, on_chunk: Callable[[memoryview], object]) -> None:
    buffer = memoryview(bytearray(CHUNK))
    with open(open_regular(path), "rb", buffering=0) as file:
        left = os.fstat(file.fileno()).st_size
        while count := file.readinto(buffer[:left]):
            on_chunk(buffer[:count])
            left -= count


def make_folder(folder: Path) -> None:
    """Create a folder and its parents durably, if missing."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        fsync_folder(folder.parent)


def make_subfolder(folder: Path) -> None:
    """As `make_folder`, for a folder inside a run folder; see `check_folder`."""
    check_folder(folder)
    make_folder(folder)


def check_folder(path: Path) -> None:
    """Raises FileDamaged if there is something else than a folder, such as a link: what is written
    or deleted there would be outside of the run folder."""
    refuse_link(path)
    if path.exists() and not path.is_dir():
        raise FileDamaged(f"{display_path(path)}: this is no folder; remove it")


def refuse_link(path: Path) -> None:
    """Raises FileDamaged if a path is a symbolic link; its parents may be links."""
    if path.is_symlink():
        raise FileDamaged(f"{display_path(path)}: this is a symbolic link, which isn't followed; "
                          "remove it (a mount or a linked --run-dir works)")


def fsync_folder(folder: Path) -> None:
    """Make the creations, renames and removals in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems
            raise
    finally:
        os.close(fd)


def remove_folder(folder: Path) -> None:
    """Remove a folder with its content, or what is in its place; another process may do so too."""
    with suppress(FileNotFoundError):
        if folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder)
        else:
            folder.unlink()


def when_not_full(
    write: Callable[[], None], warn: Callable[[str], object], *, wait_s: float | None = None
) -> None:
    """Call `write`; on a full disk try again, for up to `wait_s` seconds (`DISK_FULL_WAIT_S`)."""
    wait_s, warned = DISK_FULL_WAIT_S if wait_s is None else wait_s, False
    deadline_s = time.monotonic() + wait_s
    while True:
        try:
            return write()
        except OSError as problem:
            # A failed save is reported by an error whose cause is that of the disk.
            numbers = {problem.errno, getattr(problem.__cause__, "errno", None)}
            if numbers.isdisjoint(DISK_FULL) or time.monotonic() >= deadline_s:
                raise
            if not warned:
                warn(f"{problem}; waiting up to {wait_s:g} s for free space")
            warned = True
        time.sleep(min(3.0, wait_s / 5))


def read_text(path: Path) -> str:
    """Read a text, without a byte order mark; bytes that are not UTF-8 become surrogates."""
    return read_file(path).decode("utf-8-sig", errors="surrogateescape")


def replace_json(path: Path, value: Mapping[str, Any]) -> None:
    """As `replace_text`, for a JSON object."""
    replace_text(path, json.dumps(value, indent=2) + "\n")


def replace_text(path: Path, text: str, *, mode: int = 0o666) -> None:
    """As `replace_bytes`; surrogates (of file names) keep their bytes."""
    replace_bytes(path, [text.encode(errors="surrogateescape")], mode=mode)


def replace_bytes(
    path: Path, content: Iterable[Any], on_chunk: Callable[[memoryview], object] = len, *,
    keep_other: bool = False, mode: int = 0o666,
) -> None:
    """As `write_file`, atomically, in place of a file; with `keep_other` only if it is missing."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    aside.unlink(missing_ok=True)
    try:
        write_file(aside, content, on_chunk, mode=mode)
        if keep_other:
            with suppress(FileExistsError):
                os.link(aside, path)
        else:
            aside.rename(path)
        fsync_folder(path.parent)
    finally:
        aside.unlink(missing_ok=True)


def display_path(path: str | os.PathLike[str]) -> str:
    """A path for messages: relative to the current folder if it lies inside it."""
    path = os.fspath(path)
    with suppress(OSError):  # the current folder may be gone
        path = path.removeprefix(os.getcwd() + os.sep)
    return path
