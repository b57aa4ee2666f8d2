"""Read from the run folder, after a death, how far the run has come. The events `save` and
`restore` contain the step from which it resumes; `last-step` and `metrics.jsonl`, the newest."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.storage import layout
from trainer.storage.jsonl import CounterFile, newest_step, parse_records

STEP_FINISHED = ("save", "restore", "rollback", "skipped")
"""Events whose `at_step` is finished. For others (a fault, a sample) it is the current step."""


class RunFollower:
    """Tracks the newest finished step of the run, and the newest step it would resume from."""

    def __init__(self) -> None:
        self.reached_step = self.saved_step = 0
        self._known = False  # whether any event has been read
        self._offset = 0
        self._saved_before = 0
        self._attempt: int | None = None

    def update(self, run_folder: str | None) -> None:
        """Read new lines. Files that do not exist (yet) are ignored."""
        if run_folder is None:
            return
        folder = Path(run_folder)
        for line in self._new_lines(folder / layout.EVENTS):
            self._known = True
            name = line.get("event")
            step = line.get("to_step", line.get("at_step" if name in STEP_FINISHED else "step"))
            if not isinstance(step, int):
                continue
            if name in ("restore", "rollback"):  # the step may decrease
                self.reached_step = self.saved_step = step
            elif name == "save":
                self.saved_step = max(self.saved_step, step)
            self.reached_step = max(self.reached_step, step)
        self.reached_step = max(self.reached_step, newest_step(folder / layout.METRICS),
                                CounterFile.read(folder / layout.LAST_STEP))

    def has_advanced(self) -> bool:
        """Whether a later step has been saved since the last call."""
        advanced, self._saved_before = self.saved_step > self._saved_before, self.saved_step
        return advanced

    @property
    def steps_lost(self) -> int | None:
        """Number of steps to repeat; None if unknown."""
        return max(0, self.reached_step - self.saved_step) if self._known else None

    def new_attempt(self, run_folder: str | None, launch_id: str) -> int | None:
        """The number of the attempt that this launch has begun since the last call; None if the
        ranks died before the run counted their attempt."""
        if run_folder is None:
            return None
        with contextlib.suppress(OSError, ValueError):
            run = json.loads(Path(run_folder, layout.IDENTITY).read_bytes())
            if run["launch"] == launch_id and run["attempt"] != self._attempt:
                self._attempt = run["attempt"]
                return self._attempt
        return None

    def _new_lines(self, path: Path) -> Iterator[dict[str, Any]]:
        with contextlib.suppress(OSError), path.open("rb") as file:
            file.seek(self._offset)
            complete, _, _ = file.read().rpartition(b"\n")
            self._offset += len(complete)
            yield from parse_records(complete)


def append_event(run_folder: str, event: dict[str, Any]) -> None:
    """Append an event to `events.jsonl` of the run, in one write."""
    descriptor = os.open(Path(run_folder, layout.EVENTS), os.O_WRONLY | os.O_APPEND)
    with open(descriptor, "wb", buffering=0) as file:  # no file is created
        file.write((json.dumps(event) + "\n").encode())
