"""Read from the run folder, after a death, how far the run has come. The events `save` and
`restore` contain the step from which it resumes; `last-step` and `metrics.jsonl`, the newest."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from trainer.storage import layout
from trainer.storage.jsonl import MappedCounter, newest_step, read_records

STEP_FINISHED = ("save", "restore", "rollback", "skipped")
"""Events whose `at_step` is finished. For others (a fault, a sample) it is the current step."""


class RunFollower:
    """Tracks the newest finished step of the run, and the newest step it would resume from."""

    def __init__(self) -> None:
        self.reached_step = self.saved_step = 0
        self.steps_lost: int | None = None  # number of steps to repeat; None if unknown
        self._saved_before = 0
        self._attempt: int | None = None

    def update(self, run_folder: str | None) -> None:
        """Read the files. Those that do not exist (yet) are ignored."""
        if run_folder is None:
            return
        folder = Path(run_folder)
        events: list[dict[str, Any]] = []
        with contextlib.suppress(OSError):
            events = read_records(folder / layout.EVENTS)
        reached = saved = 0
        for event in events:
            name = event.get("event")
            step = event.get("to_step", event.get("at_step" if name in STEP_FINISHED else "step"))
            if not isinstance(step, int):
                continue
            if name in ("restore", "rollback"):  # the step may decrease
                reached = saved = step
            elif name == "save":
                saved = max(saved, step)
            reached = max(reached, step)
        self.saved_step = saved
        self.reached_step = max(reached, newest_step(folder / layout.METRICS),
                                MappedCounter.read(folder / layout.LAST_STEP))
        self.steps_lost = max(0, self.reached_step - saved) if events else None

    def has_advanced(self) -> bool:
        """Whether a later step has been saved since the last call."""
        advanced, self._saved_before = self.saved_step > self._saved_before, self.saved_step
        return advanced

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


def append_event(run_folder: str, event: dict[str, Any]) -> None:
    """Append an event to `events.jsonl` of the run, in one write."""
    descriptor = os.open(Path(run_folder, layout.EVENTS), os.O_WRONLY | os.O_APPEND)
    with open(descriptor, "wb", buffering=0) as file:  # no file is created
        file.write((json.dumps(event) + "\n").encode())
