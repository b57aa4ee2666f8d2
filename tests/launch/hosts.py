"""Two hosts in network namespaces, with a link that can be cut, and launchers on them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PATH = os.pathsep.join([str(ROOT), str(ROOT / "tests/support")])
DEADLINE_S = 200.0
PORT = 29400


class Hosts:
    """Two hosts with addresses 10.213.N.1 and .2; `cut` takes the link down, `join` up again."""

    def __init__(self) -> None:
        tag = os.getpid()
        self.names = [f"host{number}-{tag}" for number in range(2)]
        self.addresses = [f"10.213.{tag % 250}.{number}" for number in (1, 2)]

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


class Node:
    """A launcher on a host with its own run folder. Its context kills all its processes."""

    def __init__(self, host: str | None, run: Path, *arguments: str) -> None:
        self.run = run
        self._enter = [] if host is None else ["ip", "netns", "exec", host]
        self.path = ""
        """Folder searched first for modules."""
        self._arguments = arguments
        self.err = run.with_name(f"{run.name}.stderr")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        kept = {k: v for k, v in os.environ.items() if "SOCKET_IFNAME" not in k}
        with self.err.open("ab") as err:
            self.process = subprocess.Popen(
                [*self._enter, sys.executable, "-m", "launch", *self._arguments,
                 f"--run-dir={self.run}"],
                stdout=err, stderr=err, stdin=subprocess.DEVNULL, cwd=ROOT, process_group=0,
                env={**kept, "PYTHONPATH": f"{self.path}{os.pathsep}{PATH}"},
            )  # fmt: skip

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Send SIGKILL to every process of this node."""
        self.signal(signal.SIGKILL)
        if self.process is not None:
            self.process.wait(DEADLINE_S)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every process of this node."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def pids(self) -> list[int]:
        """Pids of the launcher and of its descendants: fork server, ranks, their loader workers."""
        found = []
        marker = f"--run-dir={self.run}".encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with contextlib.suppress(OSError):
                    if marker in (entry / "cmdline").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
        return sorted(found)

    def end(self) -> int:
        assert self.process is not None
        return self.process.wait(DEADLINE_S)

    def printed(self, text: str) -> int:
        """How often the launcher or a rank has printed a text."""
        return self.err.read_text(errors="replace").count(text) if self.err.exists() else 0

    def step(self) -> int:
        """The newest step in this node's metrics.jsonl."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            last = (self.run / "metrics.jsonl").read_text().splitlines()[-1]
            return int(json.loads(last)["step"])
        return 0

    def events(self, **fields: Any) -> list[dict[str, Any]]:
        path = self.run / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        events = [json.loads(line) for line in lines]
        return [e for e in events if all(e.get(k) == v for k, v in fields.items())]


def wait_until(condition: Callable[[], Any], what: str, *nodes: Node) -> None:
    """Wait until a condition is true, for at most `DEADLINE_S`."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline_s:
            logs = "\n".join(f"--- {n.err.name}\n{n.err.read_text()[-3000:]}" for n in nodes)
            raise AssertionError(f"{what}: not within {DEADLINE_S:g} s\n{logs}")
        time.sleep(0.02)


def _ip(*words: str) -> bool:
    try:
        return subprocess.run(["ip", *words], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False
