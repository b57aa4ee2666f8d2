"""Read from the run folder, after a death, how far the run has come. The events `save` and
`restore` contain the step from which it resumes; `metrics.jsonl`, the newest."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from trainer.resilience.attempts import RUN
from trainer.storage import layout
from trainer.storage.files import open_regular
from trainer.storage.jsonl import newest_step, read_records
from trainer.storage.records import read_json

STEP_FINISHED = ("save", "restore", "rollback", "skipped")
"""Events whose `at_step` is finished. For others (a fault, a sample) it is the current step."""


@dataclasses.dataclass(frozen=True)
class RunProgress:
    reached_step: int = 0  # the newest finished step
    saved_step: int = 0  # the step from which the run would resume
    steps_lost: int | None = None  # number of steps to repeat; None if unknown


def read_progress(folder: Path) -> RunProgress:
    """Read the files of a run folder. Those that do not exist (yet) are ignored."""
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
    reached = max(reached, newest_step(folder / layout.METRICS))
    return RunProgress(reached, saved, max(0, reached - saved) if events else None)


def read_attempt(folder: Path, launch_id: str) -> int | None:
    """The number of the newest attempt, if it is one of this launch."""
    run: dict[str, Any] = {}
    with contextlib.suppress(OSError):
        run = read_json(folder / layout.IDENTITY, RUN) or {}
    return run["attempt"] if run.get("launch") == launch_id else None


def append_event(folder: Path, event: dict[str, Any]) -> None:
    """Append an event to `events.jsonl` of the run, in one write."""
    descriptor = open_regular(folder / layout.EVENTS, os.O_WRONLY | os.O_APPEND)
    with open(descriptor, "wb", buffering=0) as file:  # no file is created
        file.write((json.dumps(event) + "\n").encode())
