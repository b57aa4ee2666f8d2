"""Network interfaces of this host, and open TCP connections of this process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Collection, Iterator

SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface


def connections() -> dict[int, tuple[int, int]]:
    """Connected TCP sockets of this process: inode → (local port, peer's port). The inode
    identifies a connection: file descriptors are reused."""
    return {inode: ports for inode, ports, _ in _open_connections()}


def shut_down(inodes: Collection[int]) -> None:
    """Shut down connections, so that their peers see the end at once. Unlike closing, it works
    while another thread is in a call on the connection, and while a forked child holds a copy."""
    for inode, _, connection in _open_connections():
        if inode in inodes:
            with contextlib.suppress(OSError):  # the peer has just closed it
                connection.shutdown(socket.SHUT_RDWR)


def duplicates(inodes: Collection[int]) -> list[int]:
    """Duplicated file descriptors of connections, which the caller closes. (Socket objects would
    switch the connections to blocking mode for their owners too.)"""
    return [os.dup(found.fileno()) for inode, _, found in _open_connections() if inode in inodes]


def release_inherited(inodes: Collection[int]) -> None:
    """Release inherited copies of connections in a forked child: a copy keeps a connection open
    after the process that uses it has died, so its peer would continue to wait. Inherited code that
    closes the descriptors must not close another file: they are redirected to /dev/null."""
    with contextlib.suppress(OSError):  # the limit of open files
        null_fd = os.open(os.devnull, os.O_RDWR)
        for name in os.listdir("/dev/fd"):
            with contextlib.suppress(OSError):  # the descriptor of the listing is closed by now
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode) and status.st_ino in inodes:
                    os.dup2(null_fd, int(name), inheritable=False)
        os.close(null_fd)


def use_interface(host: str, port: int, *, on_one_host: bool) -> None:
    """Set the network interface of gloo and NCCL, unless the user has: the loopback on one host,
    otherwise the one on the route to `host`. Gloo would announce the address of the host's name,
    which is often 127.0.0.1."""
    name = "lo" if on_one_host else interface_towards(host, port)
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # =: this name, not a prefix


def interface_towards(host: str, port: int) -> str | None:
    """Name of the interface on the route to `host`; None if unknown."""
    names = _interface_names()
    with contextlib.suppress(OSError):  # an unknown name
        for address, _ in routes_to(host, port):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            if name := names.get(socket.inet_pton(family, address.partition("%")[0])):
                return name
    return None


def routes_to(host: str, port: int) -> list[tuple[str, str]]:
    """(local address, remote address) of the route to each reachable address of `host`, equal if it
    is this host. Raises OSError for an unknown name. Connecting a UDP socket sends no packet."""
    routes = []
    for family, kind, protocol, _, target in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)
                routes.append((probe.getsockname()[0], str(target[0])))
        except OSError:
            continue  # no route for this address family; another may have one
    return routes


def _interface_names() -> dict[bytes, str]:
    """Address of this host (4 or 16 bytes) → name of its interface."""
    names: dict[bytes, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no IPv4 address
                request = struct.pack("256s", name.encode())
                names[fcntl.ioctl(any_socket, SIOCGIFADDR, request)[20:24]] = name
    with contextlib.suppress(FileNotFoundError), open("/proc/net/if_inet6") as lines:
        for line in lines:
            fields = line.split()
            names.setdefault(bytes.fromhex(fields[0]), fields[5])
    return names


def _open_connections() -> Iterator[tuple[int, tuple[int, int], socket.socket]]:
    """Inode, (local port, peer's port) and socket of each connection."""
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # closed in the meantime, no socket, or not connected
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            # Another thread cannot close and reuse a duplicate while it is inspected here.
            with socket.socket(fileno=os.dup(int(name))) as found:
                if (found.family in (socket.AF_INET, socket.AF_INET6)
                        and found.type == socket.SOCK_STREAM):
                    ports = found.getsockname()[1], found.getpeername()[1]
                    yield os.fstat(found.fileno()).st_ino, ports, found
