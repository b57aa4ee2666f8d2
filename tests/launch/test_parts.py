"""Parts of the launcher that need no launch: progress, output, imports of the fork server."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.forkserver import load
from launch.output import Output
from launch.progress import Progress


def append(path: Path, *lines: dict[str, object] | str) -> None:
    """Add lines to a run's file."""
    with path.open("a") as file:
        for line in lines:
            file.write((line if isinstance(line, str) else json.dumps(line)) + "\n")


def test_progress_is_a_later_step_saved_than_ever_before(tmp_path: Path) -> None:
    events, progress, advances = tmp_path / "events.jsonl", Progress(), []
    for step in (4, 4, 3, 5):
        append(events, {"event": "save", "at_step": step, "step": step + 3})
        progress.update(str(tmp_path))
        advances.append(progress.take_advance())

    assert advances == [True, False, False, True]


def test_lost_steps_are_those_from_what_is_kept_to_what_was_reached(tmp_path: Path) -> None:
    events, metrics, progress = tmp_path / "events.jsonl", tmp_path / "metrics.jsonl", Progress()

    assert progress.steps_lost is None
    append(events, {"event": "restore", "at_step": 5}, {"event": "save", "at_step": 9}, "{to")
    append(metrics, {"step": 11}, {"step": 12}, '{"step": 1')
    progress.update(str(tmp_path))
    assert progress.steps_lost == 3
    append(events, {"event": "fault", "at_step": 15, "step": 14})  # in the making of 15
    progress.update(str(tmp_path))
    assert progress.steps_lost == 5
    append(events, {"event": "restore", "at_step": 9})
    metrics.unlink()
    progress.update(str(tmp_path))
    assert progress.steps_lost == 0


def test_a_run_folder_that_is_not_there_tells_nothing(tmp_path: Path) -> None:
    progress = Progress()

    progress.update(None)
    progress.update(str(tmp_path / "nowhere"))

    assert progress.steps_lost is None
    assert not progress.take_advance()


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
            "[rank 1] one\n[rank 1] two\n[rank 1] three\n[rank 1] \n[rank 1] four\n"
        )


def test_a_file_name_that_is_no_text_can_be_told(capfd: pytest.CaptureFixture[str]) -> None:
    Output().say("FileNotFoundError: '\udcff.jpg'")

    assert capfd.readouterr().err == "launch: FileNotFoundError: '\\udcff.jpg'\n"


def test_a_reader_that_has_gone_stops_nothing() -> None:
    output, (read_fd, write_fd), (gone_fd, broken_fd) = Output(), os.pipe(), os.pipe()
    os.close(gone_fd)

    output.follow(read_fd, tag="", to_fd=broken_fd)
    for _ in range(64):  # more than a pipe holds: it blocks unless somebody reads
        os.write(write_fd, b"x" * 4095 + b"\n")
    os.close(write_fd)
    output.finish(timeout_s=60.0)

    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(read_fd)
    os.close(broken_fd)


AMID_THE_LAST_LINE = """
import os, signal, sys
from launch.output import Output

def insist(number, frame):
    if output._lock.locked():
        output.finish(0.1)
        os._exit(7)

output = Output()
signal.signal(signal.SIGALRM, insist)
signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
output.say_last("the end")
output.finish(0.1)
"""


def test_the_launcher_can_be_killed_while_nobody_reads_its_last_line() -> None:
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write_fd, b"x")
    os.set_blocking(write_fd, True)

    done = subprocess.run([sys.executable, "-c", AMID_THE_LAST_LINE], stderr=write_fd, timeout=200,
                          cwd=Path(__file__).parents[2], check=False)

    assert done.returncode == 7
    for fd in (read_fd, write_fd):
        os.close(fd)


@pytest.mark.parametrize(
    ("source", "code", "words"),
    [
        ("import no_such_module\ndef main(argv): ...", 2, "No module named 'no_such_module'"),
        ("x = 1", 2, "has no attribute 'main'"),
        ("raise SystemExit(2)", 2, ""),
        ("raise SystemExit('not here')", 2, "not here"),
        ("def main(argv): ...\ndef preload(argv): raise SystemExit", 0, ""),
        ("def main(argv): ...\ndef preload(argv): return 76", 76, ""),
        ("def main(argv): ...\ndef preload(argv): raise SystemExit(0)", 0, ""),
    ],
)
def test_an_entry_that_cannot_run_is_found_before_anything_starts(
    source: str,
    code: int,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "some_entry.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "some_entry", raising=False)

    assert load("some_entry:main", []) == (code, None)
    assert words in capsys.readouterr().err
    sys.modules.pop("some_entry", None)
