"""The run's cache of compiled code; discarded if a process died during a compilation."""

from __future__ import annotations

import os
import platform
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from trainer.distributed import torch_private
from trainer.distributed.world import World
from trainer.storage.files import make_folder, remove_folder

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def use(folder: Path, world: World) -> None:
    """Collective. Set torch's compile cache to a subfolder of `folder`; call before compiling.

    The ranks of a host share it. A TORCHINDUCTOR_CACHE_DIR set by the user takes precedence.

    While a rank compiles, a file `NAME.compiling-RANK` exists next to the cache. One that an
    earlier attempt has left tells that it ended during a compilation: the cache may contain files
    that can't be loaded, and is deleted.
    """
    default = torch_private.default_compile_cache()
    chosen = os.environ.get(VARIABLE, default) != default
    place = folder / f"{platform.node()}-torch{torch.__version__}"
    if world.local_rank == 0 and not chosen:
        make_folder(folder)
        _remove_incomplete(place)
    world.barrier()
    if chosen:
        return
    os.environ[VARIABLE] = str(place.absolute())
    mark = folder / f"{place.name}.compiling-{world.rank}"

    def begin(_: Any) -> None:
        with suppress(OSError):  # the disk is full: nothing is cached either
            mark.touch()

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


def _remove_incomplete(place: Path) -> None:
    """Delete a cache that has a mark, and the rest of an interrupted deletion."""
    marks = list(place.parent.glob(f"{place.name}.compiling-*"))
    if marks and place.exists():
        with suppress(FileNotFoundError):  # another launcher on this host did it, as in tests
            place.rename(place.with_name(f"{place.name}.gone-{secrets.token_hex(4)}"))
    for mark in marks:
        mark.unlink(missing_ok=True)
    for gone in place.parent.glob(f"{place.name}.gone-*"):
        remove_folder(gone)
