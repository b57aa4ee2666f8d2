"""Checks of the system before a process starts: open files, folders."""

from __future__ import annotations

import os
import resource
import sys
import tempfile
from pathlib import Path

from trainer.errors import ConfigError

LONGEST_S = 1e9  # upper limit of times (thirty years): clocks count in 64-bit nanoseconds
FILES, FILES_A_RANK = 48, 8
"""Open files that a process needs, and further ones for each rank (sockets, pipes, pidfds).
Measured: 28 in a launcher of two ranks, 39 in a rank, some more while it saves or draws."""


def allow_files(num_ranks: int, elsewhere: int = 0) -> None:
    """Raise the limit of open files to what a launcher or rank needs for the ranks of this host, or
    refuse a lower hard limit; for ranks `elsewhere`, as far as the system allows."""
    needed = FILES + FILES_A_RANK * num_ranks
    wanted = needed + FILES_A_RANK * elsewhere
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(f"a process may open at most {hard} files here (ulimit -n {hard}), and "
                          f"with {num_ranks} ranks it needs {needed}: raise the limit, for "
                          f"example with ulimit -n {max(1024, needed)}")
    reach = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (reach, hard))


def use_utf8() -> None:
    """Start this program again in Python's UTF-8 mode if the locale has another encoding: paths are
    in files of the run, which another locale reads too."""
    mode = ["-X", "utf8"]
    if sys.getfilesystemencoding() != "utf-8" and sys.orig_argv[1:3] != mode:
        os.execv(sys.executable, [sys.executable, *mode, *sys.orig_argv[1:]])


def check_current_folder(*packages: str) -> None:
    """Refuse a current folder that has been deleted, before torch's libraries abort the process,
    or that has a file of which `python -m` would think that it is one of our `packages`."""
    try:
        files = [os.path.join(os.getcwd(), f"{name}.py") for name in packages]
    except OSError as error:
        raise ConfigError(f"the current folder is gone ({error.strerror}): cd to another one, or "
                          "to the same path again") from error
    if shadows := [file for file in files if os.path.exists(file)]:
        name = Path(shadows[0]).stem
        raise ConfigError(f"{shadows[0]} hides the package {name}: python -m {name} would run this "
                          "file; rename it, or start from another folder")


def check_cache_folder() -> None:
    """Refuse a TORCHINDUCTOR_CACHE_DIR that can't be created or written: torch needs it to compile,
    and even for an optimizer."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    if (place := os.environ.get(name)) is None:
        return
    try:
        os.makedirs(place, exist_ok=True)
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        raise ConfigError(f"environment variable {name} is {place!r}, torch's folder for "
                          f"compiled code: {error.strerror}; use a folder that can be written, or "
                          "unset it") from error
