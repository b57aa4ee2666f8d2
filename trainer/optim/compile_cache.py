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

from trainer.distributed.world import World
from trainer.storage.files import make_folder, remove_folder

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def use(folder: Path, world: World) -> None:
    """Collective. Set torch's compile cache to a subfolder of `folder`; call before compiling.

    The ranks of a host share it. A TORCHINDUCTOR_CACHE_DIR set by the user takes precedence.

    While a rank compiles, a file `NAME.compiling-RANK` exists next to the cache. If an earlier
    attempt has left one, it was killed or failed during a compilation, and the cache may contain
    files that can't be loaded. Then the cache is deleted.
    """
    # Imported here, since the import takes seconds and torch sets its own default during it.
    from torch._dynamo.callback import callback_handler
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    chosen = os.environ.get(VARIABLE, default_cache_dir()) != default_cache_dir()
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

    callback_handler.register_start_callback(begin)
    callback_handler.register_end_callback(end)


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
        if (dynamo := sys.modules.get("torch._dynamo.callback")) is not None:
            handler = dynamo.callback_handler
            for callbacks in (handler.start_callbacks, handler.end_callbacks):
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
