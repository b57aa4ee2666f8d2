"""The run's cache of compiled code; discarded if a process died during a compilation, and if it
came with the run folder from elsewhere."""

from __future__ import annotations

import os
import platform
import secrets
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from trainer.distributed import torch_private
from trainer.distributed.world import World
from trainer.storage.files import (
    make_subfolder,
    open_regular,
    read_text,
    remove_folder,
    replace_text,
)

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def use(folder: Path, world: World) -> None:
    """Collective. Set torch's compile cache to a subfolder of `folder`; call before compiling.

    The ranks of a host share it. A TORCHINDUCTOR_CACHE_DIR set by the user takes precedence. torch
    runs the code in it, so one that this user has not made on this host, but that came with the run
    folder, is deleted.

    While a rank compiles, a file `NAME.compiling-RANK` exists next to the cache. One that an
    earlier attempt has left tells that it ended during a compilation: the cache may contain files
    that can't be loaded, and is deleted.
    """
    default = torch_private.default_compile_cache()
    chosen = os.environ.get(VARIABLE, default) != default
    place = folder / f"{platform.node()}-torch{torch.__version__}"
    if world.local_rank == 0 and not chosen:
        make_subfolder(folder)
        _remove_unusable(place)
        _make(place)
    world.barrier()
    if chosen:
        return
    os.environ[VARIABLE] = str(place.absolute())
    mark = folder / f"{place.name}.compiling-{world.rank}"

    def begin(_: Any) -> None:
        with suppress(OSError):  # the disk is full: nothing is cached either
            os.close(open_regular(mark, os.O_WRONLY | os.O_CREAT))

    def end(_: Any) -> None:
        if sys.exc_info()[1] is None:
            mark.unlink(missing_ok=True)

    callbacks = torch_private.compilation_callbacks()
    callbacks.register_start_callback(begin)
    callbacks.register_end_callback(end)


@contextmanager
def restored() -> Iterator[None]:
    """Context manager that undoes what `use` sets in this process within the block."""
    chosen = os.environ.get(VARIABLE)
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)
        if chosen is not None:
            os.environ[VARIABLE] = chosen
        if "torch._dynamo.callback" in sys.modules:
            registry = torch_private.compilation_callbacks()
            for callbacks in (registry.start_callbacks, registry.end_callbacks):
                callbacks[:] = [c for c in callbacks if c.__module__ != __name__]


def _make(place: Path) -> None:
    """Make the folder of the cache, for this user alone, and record it as made here."""
    if not place.exists():
        with suppress(OSError):  # the disk is full: the next attempt makes another one
            place.mkdir(0o700)
            replace_text(_record(place), _identity(place))


def _record(place: Path) -> Path:
    return place.with_name(f"{place.name}.made")


def _identity(place: Path) -> str:
    """What a copy of a folder doesn't have, and nobody can know beforehand: the inode number."""
    status = place.stat()
    return f"{platform.node()} {status.st_uid} {status.st_ino}\n"


def _is_made_here(place: Path) -> bool:
    """Whether this user has made the folder on this host, and only this user can write to it."""
    with suppress(OSError, UnicodeError), tempfile.TemporaryFile(dir=place.parent) as own:
        status = place.lstat()
        # Not the process's user id: a network file system may map it.
        return (stat.S_ISDIR(status.st_mode) and status.st_uid == os.fstat(own.fileno()).st_uid
                and not status.st_mode & 0o022 and read_text(_record(place)) == _identity(place))
    return False


def _remove_unusable(place: Path) -> None:
    """Delete a cache that has a mark or was not made here, and the rest of an interrupted deletion.
    """
    marks = list(place.parent.glob(f"{place.name}.compiling-*"))
    if os.path.lexists(place) and (marks or not _is_made_here(place)):
        with suppress(FileNotFoundError):  # another launcher on this host did it, as in tests
            place.rename(place.with_name(f"{place.name}.gone-{secrets.token_hex(4)}"))
    for mark in marks:
        mark.unlink(missing_ok=True)
    for gone in place.parent.glob(f"{place.name}.gone-*"):
        remove_folder(gone)
