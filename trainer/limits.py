"""What a process needs of the system before anything starts: enough open files, a folder to be
in, one that torch can write to, times that it can wait for."""

from __future__ import annotations

import errno
import os
import resource
import socket

from trainer.errors import ConfigError

LONGEST_S = 1e9
"""The longest time that one can wait for (thirty years): clocks count in nanoseconds."""

FILES, FILES_A_RANK = 48, 8
"""Open files that a process needs, and for each rank more: its sockets, pipes and descriptors of
processes. Measured: 28 in a launcher of two ranks, 39 in a rank, some more while it saves or
draws."""


def allow_files(num_ranks: int, elsewhere: int = 0) -> None:
    """Make sure that a launcher or rank may open the files that it needs.

    Args:
        num_ranks: of this host.
        elsewhere: ranks on other hosts. How many files these take depends on how they are
            connected, so the limit is raised for them as far as the system lets it, no more.

    Raises:
        ConfigError: the system allows fewer, so that it would fail at some place or other.
    """
    needed = FILES + FILES_A_RANK * num_ranks
    wanted = needed + FILES_A_RANK * elsewhere
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(f"a process may open {hard} files at most here (ulimit -n {hard}), and "
                          f"with {num_ranks} ranks it needs {needed}: raise the limit, for "
                          f"example by ulimit -n {max(1024, needed)}")
    reach = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, reach), hard))


def check_current_folder() -> None:
    """To be called before torch is imported, whose libraries abort the process for want of it.

    Raises:
        ConfigError: it has been deleted, or may not be read.
    """
    try:
        os.getcwd()
    except OSError as error:
        raise ConfigError(f"the current folder is gone ({error.strerror}): cd to another one, or "
                          "to the same path once more") from error


def check_environment() -> None:
    """Raises: ConfigError: a variable names what isn't there."""
    check_cache_folder()
    check_interface()


def check_cache_folder() -> None:
    """To be called before torch compiles, or makes an optimizer: for both it makes the folder of
    its cache, where the user has named one.

    Raises:
        ConfigError: that can't be made, or written to.
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
        raise ConfigError(f"environment variable {name} is {place!r}, where torch keeps compiled "
                          f"code: {error.strerror}; name a folder that can be written, or unset "
                          "it") from error


def check_interface() -> None:
    """Before ranks meet: gloo talks through the network interface that the user has named.

    Raises:
        ConfigError: there is none of this name.
    """
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "")
    here = [name for _, name in socket.if_nameindex()]
    if os.environ.get("WORLD_SIZE", "1") != "1" and not (
            set(filter(None, chosen.split(","))) <= set(here)):
        raise ConfigError(f"environment variable GLOO_SOCKET_IFNAME is {chosen!r}; unset it, or "
                          f"use an interface of this host: {', '.join(here)}.")
