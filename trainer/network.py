"""This host's network: the interface that leads to an address, and this process's connections."""

from __future__ import annotations

import array
import contextlib
import dataclasses
import os
import socket
import stat
import struct
import sys
from collections.abc import Collection, Iterator

SIOCGIFCONF = 0x8912  # linux/sockios.h: the IPv4 addresses of all interfaces
IFREQ_BYTES = 40  # struct ifreq of a 64-bit Linux: 16 bytes of name, then a sockaddr


@dataclasses.dataclass(frozen=True, kw_only=True)
class Connection:
    """A connected TCP socket of this process; `inode` tells it from a later one on the same fd."""

    inode: int
    local_port: int
    peer_port: int


def connections() -> dict[int, Connection]:
    """This process's connected (so: not listening) TCP sockets, by inode."""
    return {found.inode: found for found, _ in _open_connections()}


def shut_down(inodes: Collection[int]) -> int:
    """Shut these connections both ways, so that their peers see the end at once.

    A shutdown acts on the connection itself: also when another thread sits in a call on it, and
    also when a forked child still holds a copy of it (closing it would do neither).

    Returns:
        how many were still open and have been shut.
    """
    count = 0
    for found, connection in _open_connections():
        if found.inode not in inodes:
            continue
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # the peer closed it in this very moment, which is what we want
        count += 1
    return count


def duplicates(inodes: Collection[int]) -> list[int]:
    """File descriptors of these connections, to watch them; to be closed by the caller.

    No socket objects: those would make the connections blocking ones for their owners too.
    """
    return [os.dup(found.fileno()) for made, found in _open_connections() if made.inode in inodes]


def let_go(inodes: Collection[int]) -> None:
    """In a fork: give up its copies of these connections. A copy keeps a connection open when the
    process dies that uses it, so that its peer would wait on.

    The numbers stay taken: whatever thinks of them as its own can't close another file by them.
    """
    with contextlib.suppress(OSError):  # a limit of open files
        nowhere = os.open(os.devnull, os.O_RDWR)
        for name in os.listdir("/dev/fd"):
            with contextlib.suppress(OSError):  # the listing's own is closed by now
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode) and status.st_ino in inodes:
                    os.dup2(nowhere, int(name), inheritable=False)
        os.close(nowhere)


def loopback() -> str | None:
    """The name of the loopback interface, or None where there is none."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)


def use_interface(host: str, port: int, *, on_one_host: bool) -> str | None:
    """Let gloo and NCCL talk through the loopback, or the interface that leads to `host`, unless
    the user chose one; its name, None: left to torch.

    Between hosts, gloo would announce the address of the host's name, often 127.0.0.1.
    """
    name = loopback() if on_one_host else interface_towards(host, port)
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # =: this name, not a prefix
    return os.environ.get("GLOO_SOCKET_IFNAME")


def interface_towards(host: str, port: int) -> str | None:
    """The name of the interface from which packets to `host` leave, or None if that can't be told.

    The kernel is asked for its route (connecting a UDP socket sends nothing). Linux only.
    """
    if sys.platform != "linux":
        return None
    try:
        ways = ways_to(host, port)
    except OSError:
        return None
    names = _interface_names()
    for own, _ in ways:
        family = socket.AF_INET6 if ":" in own else socket.AF_INET
        packed = socket.inet_pton(family, own.partition("%")[0])
        if packed in names:
            return names[packed]
    return None


def ways_to(host: str, port: int) -> list[tuple[str, str]]:
    """(own address, host's address) for each address of `host` to which a route leads.

    The two are equal where the host is this one.

    Raises:
        OSError: the name is unknown.
    """
    ways = []
    for family, kind, protocol, _, target in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)
                ways.append((probe.getsockname()[0], str(target[0])))
        except OSError:
            continue  # no route for this family; the next one may have one
    return ways


def _interface_names() -> dict[bytes, str]:
    """Each address of this host (4 or 16 bytes) → the name of its interface."""
    import fcntl  # Unix only, like this function

    names: dict[bytes, str] = {}
    records = array.array("B", bytes(IFREQ_BYTES * 256))
    request = struct.pack("iL", len(records), records.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        filled, _ = struct.unpack("iL", fcntl.ioctl(any_socket, SIOCGIFCONF, request))
    for start in range(0, filled, IFREQ_BYTES):
        record = records[start:start + IFREQ_BYTES].tobytes()
        names.setdefault(record[20:24], record[:16].partition(b"\0")[0].decode())
    try:
        with open("/proc/net/if_inet6") as lines:
            for line in lines:
                fields = line.split()
                names.setdefault(bytes.fromhex(fields[0]), fields[5])
    except FileNotFoundError:
        pass  # a kernel without IPv6
    return names


def _open_connections() -> Iterator[tuple[Connection, socket.socket]]:
    for name in os.listdir("/dev/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            # A duplicate can't be closed and reused by another thread while we look at it.
            with socket.socket(fileno=os.dup(int(name))) as found:
                if found.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                if found.type != socket.SOCK_STREAM:
                    continue
                peer_port = found.getpeername()[1]
                connection = Connection(inode=os.fstat(found.fileno()).st_ino,
                                        local_port=found.getsockname()[1], peer_port=peer_port)
                yield connection, found
        except OSError:
            continue  # closed meanwhile, not a socket, or not connected
