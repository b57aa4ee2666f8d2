"""Before a process starts: open files, encoding, folders."""

from __future__ import annotations

import os
import resource
import sys
import tempfile
from pathlib import Path

from trainer.errors import ConfigError

LONGEST_S = 1e9  # upper limit of times (thirty years): clocks count in 64-bit nanoseconds
MOST_FILES = 1 << 16


def allow_files() -> None:
    """Raise the limit of open files to the hard limit, up to `MOST_FILES`: ranks and loader workers
    have sockets, pipes and shared memory open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


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
