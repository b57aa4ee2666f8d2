"""A rank that ends the run with a given exit code, in one of several scenarios."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from trainer.distributed.world import LaunchInfo
from trainer.resilience.launcher_channel import leave_launcher
from trainer.resilience.stop_signals import StopSignals


def main(folder: Path, code: int, scenario: str) -> int:
    """`all`: all ranks end by themselves; `signal`: after a signal; `alone`: local rank 0 never
    ends; `late`: the other ranks end only after torchrun's SIGTERM."""
    stop, agent = StopSignals(), os.getppid()
    stop.install()
    stop.shield()
    launch, attempt = LaunchInfo.from_environment(), os.environ["TORCHELASTIC_RESTART_COUNT"]
    _note(folder, f"started {attempt} {launch.rank}")
    if scenario == "late" and launch.local_rank == 0:
        _until(lambda: len((folder / "notes").read_text().splitlines()) == launch.local_size)
    elif scenario in ("signal", "late"):
        _until(lambda: stop.requested)
    elif scenario == "alone" and launch.local_rank == 0:
        _until(lambda: False)
    begun = time.monotonic()
    leave_launcher(code, launch, lambda: stop.senders[agent])
    slow = "late" if time.monotonic() - begun > 4 else "soon"
    _note(folder, f"left {attempt} {launch.rank} {slow}")
    return code


def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)


def _note(folder: Path, line: str) -> None:
    with (folder / "notes").open("a") as notes:
        notes.write(f"{line}\n")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
