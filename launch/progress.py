"""How far the run has come, read from its folder: has it advanced, and what does a death cost.

Read only when a rank has died, and only what is new: each line of `events.jsonl` tells by `at_step`
(else `step`) where the run was, the events `save` and `restore` what it would go on from; the file
`last-step` and the last line of `metrics.jsonl` tell the newest finished step.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.append import Mark, newest_step, records

MADE = ("save", "restore", "rollback", "skipped")
"""Events whose `at_step` has been made. A fault strikes, a sample is read, in the making of one."""


class Progress:
    """The newest step that the run has reached, and the newest that it would go on from."""

    def __init__(self) -> None:
        self.reached = 0
        self.kept = 0
        self._known = False
        self._offset = 0
        self._kept_before = 0
        self._attempt: int | None = None

    def update(self, run_folder: str | None) -> None:
        """Read what is new. A folder or file that isn't there (yet) tells nothing."""
        if run_folder is None:
            return
        events = Path(run_folder, "events.jsonl")
        for line in self._new_lines(events):
            self._known = True
            step = line.get("to_step", line.get("at_step") if line.get("event") in MADE
                            else line.get("step"))
            if not isinstance(step, int):
                continue
            if line.get("event") in ("restore", "rollback"):  # may go back
                self.reached = self.kept = step
            elif line.get("event") == "save":
                self.kept = max(self.kept, step)
            self.reached = max(self.reached, step)
        self.reached = max(self.reached, newest_step(Path(run_folder, "metrics.jsonl")),
                           Mark.read(Path(run_folder, "last-step")))

    def take_advance(self) -> bool:
        """Whether a later step was kept since the last call."""
        advanced, self._kept_before = self.kept > self._kept_before, self.kept
        return advanced

    @property
    def steps_lost(self) -> int | None:
        """Steps to be done again; None if unknown."""
        return max(0, self.reached - self.kept) if self._known else None

    def new_attempt(self, run_folder: str | None, launch_id: str) -> int | None:
        """The number of the attempt of this launch that has begun since the last call, if one has:
        ranks that die earlier than that are no attempt of the run."""
        if run_folder is None:
            return None
        with contextlib.suppress(OSError, ValueError):
            run = json.loads(Path(run_folder, "run.json").read_bytes())
            if run["launch"] == launch_id and run["attempt"] != self._attempt:
                self._attempt = run["attempt"]
                return self._attempt
        return None

    def _new_lines(self, path: Path) -> Iterator[dict[str, Any]]:
        try:
            with path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return
        complete, _, _ = data.rpartition(b"\n")
        self._offset += len(complete)
        yield from records(complete)


def note(run_folder: str, event: dict[str, Any]) -> None:
    """Append an event to those of the run, in one write. Raises: OSError."""
    descriptor = os.open(Path(run_folder, "events.jsonl"), os.O_WRONLY | os.O_APPEND)
    try:
        os.write(descriptor, (json.dumps(event) + "\n").encode())
    finally:
        os.close(descriptor)
