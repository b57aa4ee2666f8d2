"""Start the real launcher with scripted ranks, and read the notes of the ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import scripted
from machine import alive

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
DEADLINE_S = 200.0


class Launched:
    """A running `python -m launch` in its own process group, as a shell would start it."""

    def __init__(self, folder: Path, script: Mapping[str, str], *options: str, num_ranks: int = 1,
                 entry: str = "scripted:main") -> None:
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
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path)})

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pid in self.pids():
            if alive(pid):
                os.kill(pid, signal.SIGKILL)

    def end(self, timeout_s: float = DEADLINE_S) -> int:
        return self.process.wait(timeout_s)

    @property
    def out(self) -> str:
        return self.streams["stdout"].read_text()

    @property
    def err(self) -> str:
        return self.streams["stderr"].read_text()

    def notes(self, what: str, **fields: Any) -> list[dict[str, Any]]:
        """The ranks' notes so far with the name `what` and the given fields."""
        return [note for note in scripted.read(self.folder / "notes.jsonl")
                if note["what"] == what and all(note[key] == fields[key] for key in fields)]

    def wait_notes(self, what: str, num: int, **fields: Any) -> list[dict[str, Any]]:
        return scripted.wait_for(lambda: self.notes(what, **fields), num)

    def pids(self) -> set[int]:
        """Pids of all processes that have written notes, and of the fork servers."""
        notes = scripted.read(self.folder / "notes.jsonl")
        return {note["pid"] for note in notes} | {n["server"] for n in notes if "server" in n}
