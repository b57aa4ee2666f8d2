"""The cache of compiled code, kept with the run; not trusted after an end amid a compile."""

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

from trainer.durable import make_folder, remove_folder
from trainer.world import World

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def use(folder: Path, world: World) -> None:
    """Collective. Cache in `folder`, shared by the ranks of a host; unless the user chose a place.

    While a rank compiles there is a file `NAME.compiling-RANK` beside the cache. One that an
    earlier attempt has left tells of an end in the middle (a kill, a failed compile), after which
    files may be there that can't be loaded: then the cache is made anew. Before the first compile.
    """
    # Here, since this takes seconds where nothing has imported it; and torch sets its own default.
    from torch._dynamo.callback import callback_handler
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    chosen = os.environ.get(VARIABLE, default_cache_dir()) != default_cache_dir()
    place = folder / f"{platform.node()}-torch{torch.__version__}"
    if world.local_rank == 0 and not chosen:
        make_folder(folder)
        _remove_doubtful(place)
    world.barrier()
    if chosen:
        return
    os.environ[VARIABLE] = str(place.absolute())
    mark = folder / f"{place.name}.compiling-{world.rank}"

    def begin(_: Any) -> None:
        with suppress(OSError):  # a full disk: nothing is cached either
            mark.touch()

    def end(_: Any) -> None:
        if sys.exc_info()[1] is None:
            mark.unlink(missing_ok=True)

    callback_handler.register_start_callback(begin)
    callback_handler.register_end_callback(end)


@contextmanager
def restored() -> Iterator[None]:
    """What `use` sets within, in the whole process, is put back."""
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


def _remove_doubtful(place: Path) -> None:
    """Remove a cache that bears a mark, and what is left of such a removal."""
    marks = list(place.parent.glob(f"{place.name}.compiling-*"))
    if marks and place.exists():
        with suppress(FileNotFoundError):  # two launchers of one host, as in tests
            place.rename(place.with_name(f"{place.name}.gone-{secrets.token_hex(4)}"))
    for mark in marks:
        mark.unlink(missing_ok=True)
    for gone in place.parent.glob(f"{place.name}.gone-*"):
        remove_folder(gone)
