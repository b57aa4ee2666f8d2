"""Append-only files that another program removes, replaces or truncates."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from trainer.storage.jsonl import AppendFile, FileMark
from trainer.telemetry.events import Log, read_events
from trainer.telemetry.metrics import Metrics, ResumedRecord, read_metrics


def lines(first: int, last: int) -> list[dict[str, int]]:
    return [{"step": step} for step in range(first, last + 1)]


def whole(first: int, last: int) -> ResumedRecord:
    return ResumedRecord(begin=FileMark(), kept=lines(first, last), unshown=[])


def remove(path: Path) -> None:
    path.unlink()


def replace(path: Path) -> None:
    another = path.with_name("another")
    another.write_text("not ours\n")
    another.rename(path)


@pytest.mark.parametrize(("act", "word"), [(remove, "removed"), (replace, "replaced")])
def test_metrics_removed_or_replaced_in_mid_run_are_restored(tmp_path, act, word):
    path, warnings, guarded = tmp_path / "metrics.jsonl", [], []

    class Guard:
        def __enter__(self):
            guarded.append(path.exists())

        def __exit__(self, *_):
            pass

    metrics = Metrics()
    metrics.open(path, whole(1, 3), guard=Guard, warn=warnings.append)
    metrics._record({"step": 4}, {})
    metrics.sync()
    assert not warnings
    act(path)
    metrics._record({"step": 5}, {})
    metrics.sync()
    metrics._record({"step": 6}, {})
    metrics.close()

    assert read_metrics(path) == lines(1, 6)
    [text] = warnings
    assert f"another process has {word} metrics.jsonl" in text
    assert guarded == [act is replace]  # once, and before the folder was changed
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize(
    "torn", [b'{"step": 4, "los', b"\0" * 40, b"\xff\xfe\x80\n", b"\n[3]\n", b"{}\n"])
def test_a_line_damaged_by_a_crash_of_the_machine_is_skipped(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(b'{"step": %d}\n' % n for n in (1, 2, 3)) + torn)

    assert read_metrics(path) == lines(1, 3)


def test_records_delayed_by_a_full_disk_are_written_with_the_next_record(tmp_path):
    path, (soft, hard) = tmp_path / "events.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    file = AppendFile(path)
    file.append(b"one\n")
    resource.setrlimit(resource.RLIMIT_FSIZE, (6, hard))
    file.append(b"two\n")
    file.append(b"three\n")
    delayed = path.read_bytes()
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    file.append(b"four\n")

    assert delayed == b"one\ntw"
    assert path.read_bytes() == b"one\ntwo\nthree\nfour\n"
    file.close()


def test_truncated_lines_are_reported_once(tmp_path):
    path, warnings = tmp_path / "metrics.jsonl", []
    metrics = Metrics()
    metrics.open(path, whole(1, 3), warn=warnings.append)
    with path.open("r+b") as file:
        file.truncate(0)
    metrics._record({"step": 4}, {})
    metrics.sync()
    metrics.close()

    assert read_metrics(path) == lines(4, 4)
    [text] = warnings
    assert "lines of metrics.jsonl were cut off" in text


def test_a_folder_that_is_gone_is_an_error_at_the_next_sync(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    metrics = Metrics()
    metrics.open(folder / "metrics.jsonl", whole(1, 3))
    folder.rename(tmp_path / "moved")
    metrics._record({"step": 4}, {})

    with pytest.raises(FileNotFoundError):
        metrics.sync()
    metrics.close()
    assert read_metrics(tmp_path / "moved" / "metrics.jsonl") == lines(1, 4)


def test_events_of_several_processes_continue_in_a_file_that_one_of_them_restored(tmp_path, capsys):
    path, ranks = tmp_path / "events.jsonl", [Log(rank) for rank in range(3)]
    for log in ranks:
        log.open_events(path, attempt=0, nonce="n")
        log.event("before")
    path.unlink()
    for log in ranks:
        log.event("after")
    for log in ranks:
        log.close()

    found = [(event["event"], event["rank"]) for event in read_events(path)]
    assert sorted(found) == [(what, rank) for what in ("after", "before") for rank in range(3)]
    assert capsys.readouterr().err.count("another process has removed events.jsonl") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["events.jsonl"]
