"""An entry point whose rank dies at once, and records what its launcher and fork server hold."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from benchmarks.chaos_run import children


def main(argv: list[str]) -> int:
    """Arguments: a file to append to, and the number of the attempt that succeeds."""
    attempt, server = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.getppid()
    launcher = int(Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[1])
    line = {"attempt": attempt, "launcher": _held(launcher), "server": _held(server)}
    with Path(argv[0]).open("a") as file:
        file.write(json.dumps(line) + "\n")
    if attempt < int(argv[1]):
        os._exit(1)
    return 0


def _held(pid: int) -> dict[str, Any]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    return {"descriptors": len(os.listdir(f"/proc/{pid}/fd")), "children": len(children(pid)),
            "threads": int(status["Threads"]), "kib": int(status["VmRSS"].split()[0])}
