"""Run of the launcher without a launch: progress, output, imports of the fork server."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from launch.fork_server import load_entry
from launch.output import Output
from launch.progress import RunProgress, read_progress


def append(path: Path, *lines: dict[str, object] | str) -> None:
    """Append lines to a JSON-lines file."""
    with path.open("a") as file:
        for line in lines:
            file.write((line if isinstance(line, str) else json.dumps(line)) + "\n")


def test_lost_steps_are_those_between_the_last_save_and_the_last_step(tmp_path: Path) -> None:
    events, metrics = tmp_path / "events.jsonl", tmp_path / "metrics.jsonl"

    assert read_progress(tmp_path).steps_lost is None
    append(events, {"event": "restore", "at_step": 5}, {"event": "save", "at_step": 9}, "{to")
    append(metrics, {"step": 11}, {"step": 12}, '{"step": 1')
    assert read_progress(tmp_path) == RunProgress(12, 9, 3)
    append(events, {"event": "fault", "at_step": 15, "step": 14})  # during step 15
    assert read_progress(tmp_path).steps_lost == 5
    append(events, {"event": "save", "at_step": 4})
    assert read_progress(tmp_path).saved_step == 9
    append(events, {"event": "restore", "at_step": 9})
    metrics.unlink()
    assert read_progress(tmp_path) == RunProgress(9, 9, 0)


def test_each_line_is_tagged_once_and_the_last_one_ended(tmp_path: Path) -> None:
    output, target = Output(), (tmp_path / "out").open("wb")
    read_fd, write_fd = os.pipe()

    output.follow(read_fd, tag="[rank 1] ", to_fd=target.fileno())
    for part in (b"one\ntw", b"o\n[rank 1] three\n\nfo", b"ur"):
        os.write(write_fd, part)
    os.close(write_fd)
    output.finish(timeout_s=60.0)

    with target:
        assert Path(target.name).read_text() == (
            "[rank 1] one\n[rank 1] two\n[rank 1] three\n[rank 1] \n[rank 1] four\n")


def test_a_closed_terminal_does_not_block_the_ranks() -> None:
    output, (read_fd, write_fd), (gone_fd, broken_fd) = Output(), os.pipe(), os.pipe()
    os.close(gone_fd)

    output.follow(read_fd, tag="", to_fd=broken_fd)
    for _ in range(64):  # more than a pipe holds: a write blocks unless it is read
        os.write(write_fd, b"x" * 4095 + b"\n")
    os.close(write_fd)
    output.finish(timeout_s=60.0)

    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(read_fd)
    os.close(broken_fd)


@pytest.mark.parametrize(("source", "code", "words"), [
    ("import no_such_module\ndef main(argv): ...", 2, "No module named 'no_such_module'"),
    ("x = 1", 2, "has no attribute 'main'"),
    ("raise SystemExit('not here')", 2, "not here"),
    ("def main(argv): ...\ndef preload(argv): raise SystemExit", 0, ""),
    ("def main(argv): ...\ndef preload(argv): return 76", 76, ""),
])
def test_an_invalid_entry_point_is_an_error_before_any_rank_starts(
        source, code, words, tmp_path, monkeypatch, capsys):
    (tmp_path / "some_entry.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "some_entry", raising=False)

    assert load_entry("some_entry:main", []) == (code, None)
    assert words in capsys.readouterr().err
    sys.modules.pop("some_entry", None)
