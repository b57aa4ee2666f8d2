"""A user's sink: gets copies, and what it raises costs the sink and not the run."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from trainer.config import Logging
from trainer.errors import ConfigError
from trainer.log import Log
from trainer.sinks import Own


class Notes:
    """Notes what it is told, tampers with it, and fails where it is told to."""

    def __init__(self, folder: Path, fails: str = "") -> None:
        self.told: list[Any] = [folder]
        self.fails = fails

    def __getattr__(self, name: str) -> Any:
        def note(*arguments: Any) -> None:
            self.told.append((name, *map(str, arguments)))
            for argument in arguments:
                if isinstance(argument, dict):
                    argument.clear()
            if name == self.fails:
                raise RuntimeError("the disk of notes is full")

        return note


def shown(fails: str = "") -> tuple[list[Any], str, dict[str, Any]]:
    """What a sink was told, what the console says, and the line afterwards."""
    said, made, line = io.StringIO(), [], {"step": 1, "loss": 0.5}

    def make(folder: Path) -> Notes:
        made.append(Notes(folder, fails))
        return made[0]

    sink = Own("notes:Notes", make, Path("run"), Log(stream=said))
    sink.step(line, {})
    sink.validation(line)
    sink.finish({}, {}, 1)
    sink.close()
    return made[0].told, said.getvalue(), line


def test_a_sink_is_told_of_all_and_can_change_nothing():
    told, said, line = shown()

    assert [entry[0] for entry in told[1:]] == ["step", "validation", "finish", "close"]
    assert told[0] == Path("run")
    assert line == {"step": 1, "loss": 0.5}
    assert not said


def test_a_sink_that_fails_is_named_once_with_the_users_line_and_left_out():
    told, said, _ = shown("validation")

    assert [entry[0] for entry in told[1:]] == ["step", "validation"]
    assert said.count("warning: --log.sinks notes:Notes has failed") == 1
    assert 'raise RuntimeError("the disk of notes is full")' in said


def test_a_sink_that_can_not_be_made_is_left_out():
    said = io.StringIO()

    Own("notes:Notes", lambda folder: 1 / 0, Path("run"), Log(stream=said)).step({}, {})

    assert "ZeroDivisionError" in said.getvalue()


def test_a_sink_is_named_by_an_import_path():
    with pytest.raises(ConfigError, match=r"--log\.sinks curve: write module:Class"):
        Logging(sinks=("curve",))
