"""Paths that are not ASCII or not UTF-8, in a locale that is neither."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from launches import finish
from runs import TAPE

from trainer.config import command_line


@pytest.mark.parametrize("by", ["launch", ""])
def test_a_run_with_such_paths_is_killed_and_continued(tmp_path: Path, by: str) -> None:
    run = tmp_path / os.fsdecode(b"r\xc3\xbcn\xff")
    fault = ["--inject=kill:step=2"] * bool(by)
    tape = f"{tmp_path}/im\udcff"
    launch = finish(run, *TAPE, f"--task.tape={tape}", "--steps=3", *fault, "--checkpoint.every=1",
                    by=by, size=1, LC_ALL="C", PYTHONUTF8="0")

    assert len(launch.events("start")) == 1 + bool(by)
    assert command_line.parse_config([str(run / "config.toml")]).task.tape == tape
    assert Path(f"{tape}-0.jsonl").exists()
