"""Checks of the system before a process starts: open files, folders, environment variables."""

from __future__ import annotations

import errno
import os
import resource
import socket

from trainer.errors import ConfigError

LONGEST_S = 1e9
"""Upper limit of times in seconds (thirty years): clocks count in 64-bit nanoseconds."""

FILES, FILES_A_RANK = 48, 8
"""Open files that a process needs, and further ones for each rank (sockets, pipes, process
descriptors). Measured: 28 in a launcher of two ranks, 39 in a rank, some more while it saves or
draws."""


def allow_files(num_ranks: int, elsewhere: int = 0) -> None:
    """Raise the limit of open files to what a launcher or rank needs.

    Args:
        num_ranks: ranks on this host.
        elsewhere: ranks on other hosts. The number of files for these depends on how they are
            connected. For them the limit is raised as far as the system allows, without an error.

    Raises:
        ConfigError: the system allows too few files, so that the process would fail later.
    """
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
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, reach), hard))


def check_current_folder() -> None:
    """Check the current folder. Call this before importing torch.

    Without a current folder torch's libraries abort the process.

    Raises:
        ConfigError: the current folder has been deleted, or can't be read.
    """
    try:
        os.getcwd()
    except OSError as error:
        raise ConfigError(f"the current folder is gone ({error.strerror}): cd to another one, or "
                          "to the same path again") from error


def check_environment() -> None:
    """Raise `ConfigError` if an environment variable names something that doesn't exist."""
    check_cache_folder()
    check_interface()


def check_cache_folder() -> None:
    """Check the user's TORCHINDUCTOR_CACHE_DIR.

    Call this before torch compiles or creates an optimizer: both create this folder.

    Raises:
        ConfigError: the folder can't be created or written.
    """
    name = "TORCHINDUCTOR_CACHE_DIR"
    place = os.environ.get(name)
    if place is None:
        return
    try:
        os.makedirs(place, exist_ok=True)
        if not os.access(place, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), place)
    except OSError as error:
        raise ConfigError(f"environment variable {name} is {place!r}, torch's folder for "
                          f"compiled code: {error.strerror}; use a folder that can be written, or "
                          "unset it") from error


def check_interface() -> None:
    """Check the user's GLOO_SOCKET_IFNAME. Call this before the rendezvous of the ranks.

    Raises:
        ConfigError: there is no such network interface.
    """
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "")
    here = [name for _, name in socket.if_nameindex()]
    if os.environ.get("WORLD_SIZE", "1") != "1" and not (
            set(filter(None, chosen.split(","))) <= set(here)):
        raise ConfigError(f"environment variable GLOO_SOCKET_IFNAME is {chosen!r}; unset it, or "
                          f"use an interface of this host: {', '.join(here)}.")
