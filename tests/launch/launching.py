"""Start the real launcher with scripted ranks, and read the notes of the ranks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import scripted

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
DEADLINE_S = 200.0
AT_ONCE_S = 4.0
"""Shorter than 4.3 s, after which orphans are killed: shows that the exit was orderly."""
GONE_S = 20.0
"""Orphans are killed within 5 s; the rest is a margin for a busy machine."""


class Launched:
    """A running `python -m launch` in its own process group, as a shell would start it."""

    def __init__(
        self,
        folder: Path,
        script: Mapping[str, str],
        *options: str,
        num_ranks: int = 1,
        entry: str = "scripted:main",
    ) -> None:
        folder.mkdir()
        self.folder = folder
        arguments = [str(folder), json.dumps(script)]
        self.streams = {name: folder / f"{name}.txt" for name in ("stdout", "stderr")}
        path = [str(HERE), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        with self.streams["stdout"].open("wb") as out, self.streams["stderr"].open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "launch", f"--nproc-per-node={num_ranks}", *options,
                 "--entry", entry, "--", *arguments],
                stdout=out, stderr=err, stdin=subprocess.DEVNULL, cwd=ROOT, process_group=0,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            )  # fmt: skip

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill all remaining processes."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pid in self.pids():
            if alive(pid):
                os.kill(pid, signal.SIGKILL)

    def end(self, timeout_s: float = DEADLINE_S) -> int:
        """The launcher's exit code, or TimeoutExpired."""
        return self.process.wait(timeout_s)

    @property
    def out(self) -> str:
        return self.streams["stdout"].read_text()

    @property
    def err(self) -> str:
        return self.streams["stderr"].read_text()

    def notes(self, what: str, **fields: Any) -> list[dict[str, Any]]:
        """The ranks' notes so far with the name `what` and the given fields."""
        return [
            note
            for note in scripted.read(self.folder / "notes.jsonl")
            if note["what"] == what and all(note[key] == fields[key] for key in fields)
        ]

    def wait_notes(self, what: str, num: int, **fields: Any) -> list[dict[str, Any]]:
        """Wait until there are `num` such notes."""
        return scripted.wait_for(lambda: self.notes(what, **fields), num)

    def pids(self) -> set[int]:
        """Pids of all processes that have written notes, and of the fork servers."""
        notes = scripted.read(self.folder / "notes.jsonl")
        return {note["pid"] for note in notes} | {n["server"] for n in notes if "server" in n}


def alive(pid: int) -> bool:
    """Whether a process is running and not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def wait_gone(pids: set[int], timeout_s: float) -> set[int]:
    """Wait for processes to exit; returns those still alive after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while (left := {pid for pid in pids if alive(pid)}) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return left


def listening(pid: int) -> dict[str, str]:
    """Addresses, by inode, of the TCP sockets on which a process listens."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since the folder was listed
            target = os.readlink(entry)
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    return {inode: address for inode, address in listeners().items() if inode in inodes}


def listeners() -> dict[str, str]:
    """Addresses, by inode, of all listening TCP sockets.

    Compare inodes and not ports: another process may reuse a freed port immediately.
    """
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                found[fields[9]] = fields[1].partition(":")[0]
    return found
