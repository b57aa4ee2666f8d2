"""Two hosts in network namespaces, with a link that can be cut."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator

import pytest


class Hosts:
    """Addresses 10.213.N.1 and .2; `cut` takes the link down, `join` up again."""

    def __init__(self) -> None:
        tag = os.getpid()
        self.names = [f"host{number}-{tag}" for number in range(2)]
        self.addresses = [f"10.213.{tag % 250}.{number}" for number in (1, 2)]

    def enter(self, number: int) -> list[str]:
        return ["ip", "netns", "exec", self.names[number]]

    def cut(self) -> None:
        assert _ip("-n", self.names[1], "link", "set", "veth1", "down")

    def join(self) -> None:
        assert _ip("-n", self.names[1], "link", "set", "veth1", "up")


@contextlib.contextmanager
def two_hosts() -> Iterator[Hosts]:
    hosts = Hosts()
    try:
        for name in hosts.names:
            if not _ip("netns", "add", name):
                pytest.skip("network namespaces cannot be created here (needs root and ip)")
            assert _ip("-n", name, "link", "set", "lo", "up")
        assert _ip("link", "add", "veth0", "netns", hosts.names[0], "type", "veth",
                   "peer", "name", "veth1", "netns", hosts.names[1])
        for number, name in enumerate(hosts.names):
            end = f"veth{number}"
            assert _ip("-n", name, "address", "add", f"{hosts.addresses[number]}/24", "dev", end)
            assert _ip("-n", name, "link", "set", end, "up")
        yield hosts
    finally:
        for name in hosts.names:
            _ip("netns", "del", name)


def _ip(*words: str) -> bool:
    try:
        return subprocess.run(["ip", *words], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False
