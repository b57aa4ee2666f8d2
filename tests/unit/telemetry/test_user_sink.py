"""A sink of the user receives copies; an exception in it disables the sink, not the run."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from trainer.telemetry.events import Log
from trainer.telemetry.tensorboard import GuardedSink


class Notes:
    """Records its calls, clears their dicts, and raises in the method `fails`."""

    def __init__(self, fails: str = "") -> None:
        self.calls: list[str] = []
        self.fails = fails

    def make(self, folder: Path) -> Notes:
        if self.fails == "make":
            raise RuntimeError(f"no notes in {folder}")
        return self

    def __getattr__(self, name: str) -> Any:
        def note(*arguments: Any) -> None:
            self.calls.append(name)
            for argument in arguments:
                if isinstance(argument, dict):
                    argument.clear()
            if name == self.fails:
                raise RuntimeError("the disk of notes is full")

        return note


@pytest.mark.parametrize(("fails", "calls", "output"), [
    ("", ["step", "validation", "finish", "close"], ""),
    ("validation", ["step", "validation"], 'raise RuntimeError("the disk of notes is full")'),
    ("make", [], "RuntimeError: no notes in run")])
def test_a_sink_receives_copies_until_it_raises_which_is_reported_once(fails, calls, output):
    log, notes, line = io.StringIO(), Notes(fails), {"step": 1, "loss": 0.5}

    sink = GuardedSink("--log.sinks notes:Notes", lambda: notes.make(Path("run")),
                       Log(stream=log))
    sink.step(line, {})
    sink.validation(line)
    sink.finish({}, {}, 1)
    sink.close()

    assert notes.calls == calls
    assert line == {"step": 1, "loss": 0.5}
    assert output in log.getvalue()
    assert log.getvalue().count("--log.sinks notes:Notes has failed") == bool(fails)
