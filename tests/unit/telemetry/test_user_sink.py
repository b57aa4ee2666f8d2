"""A sink of the user receives copies; an exception in it disables the sink, not the run."""

from __future__ import annotations

import io
from typing import Any

from trainer.telemetry.events import Log
from trainer.telemetry.tensorboard import GuardedSink


class Notes:
    """Records its calls, clears their dicts, and raises in the method `fails`."""

    def __init__(self, fails: str = "") -> None:
        self.calls: list[Any] = []
        self.fails = fails

    def __getattr__(self, name: str) -> Any:
        def note(*arguments: Any) -> None:
            self.calls.append((name, *map(str, arguments)))
            for argument in arguments:
                if isinstance(argument, dict):
                    argument.clear()
            if name == self.fails:
                raise RuntimeError("the disk of notes is full")

        return note


def shown(fails: str = "") -> tuple[list[Any], str, dict[str, Any]]:
    """Return the calls of a sink, the output of the log, and the line afterwards."""
    output, made, line = io.StringIO(), [], {"step": 1, "loss": 0.5}

    def make() -> Notes:
        made.append(Notes(fails))
        return made[0]

    sink = GuardedSink("--log.sinks notes:Notes", make, Log(stream=output))
    sink.step(line, {})
    sink.validation(line)
    sink.finish({}, {}, 1)
    sink.close()
    return made[0].calls, output.getvalue(), line


def test_a_sink_receives_every_call_and_cannot_change_a_line():
    calls, output, line = shown()

    assert [entry[0] for entry in calls] == ["step", "validation", "finish", "close"]
    assert line == {"step": 1, "loss": 0.5}
    assert not output


def test_a_sink_that_raises_is_reported_once_with_its_line_of_code_and_disabled():
    calls, output, _ = shown("validation")

    assert [entry[0] for entry in calls] == ["step", "validation"]
    assert output.count("warning: --log.sinks notes:Notes has failed") == 1
    assert 'raise RuntimeError("the disk of notes is full")' in output


def test_a_sink_whose_constructor_raises_is_disabled():
    output = io.StringIO()

    GuardedSink("notes:Notes", lambda: 1 / 0, Log(stream=output)).step({}, {})

    assert "ZeroDivisionError" in output.getvalue()
