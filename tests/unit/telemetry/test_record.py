"""metrics.jsonl is cut where a checkpoint knows its lines to begin, or else merged with it."""

from __future__ import annotations

import itertools
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.runs import state_json
from trainer.checkpoint.replication import resume_record
from trainer.checkpoint.restore import CheckpointRef
from trainer.checkpoint.saved_state import SavedState
from trainer.distributed.world import LaunchInfo, World
from trainer.storage import jsonl
from trainer.storage.jsonl import FileMark, last_records, sample_records
from trainer.telemetry import metrics as module
from trainer.telemetry.metrics import Metrics, ResumedRecord, encode_line

EMPTY = ResumedRecord(begin=FileMark(), kept=[], unshown=[])


def line(step: int) -> dict[str, Any]:
    return {"step": step, "loss": random.Random(step).random()}


def text(first: int, last: int) -> bytes:
    return b"".join(encode_line(line(step)) for step in range(first, last + 1))


def checkpoint(step: int, entries: dict[str, Any]) -> CheckpointRef:
    progress = {"progress": {"step": step, "skipped": 0, "validated": 0, "bad": [], "left_out": [],
                             "replaced": 0}}
    entries = json.loads(json.dumps(entries))
    return CheckpointRef(step, 0, 0, SavedState.from_json(
        json.loads(state_json()) | progress | entries))


def resumed(path: Path, found: CheckpointRef | None) -> tuple[ResumedRecord, Metrics]:
    """Continue a record as a start does, on rank 0."""
    world = World(LaunchInfo(), torch.device("cpu"), 1)
    world.writes_run_dir = True
    record, end = resume_record(found, path, world)
    metrics = Metrics()
    metrics.continue_at(end)
    metrics.open(path, record)
    return record, metrics


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[Path, CheckpointRef]:
    """A record of 30 steps, and a checkpoint of step 25 that holds the lines from step 21 on."""
    path, metrics = tmp_path / "metrics.jsonl", Metrics()
    metrics.open(path, EMPTY)
    for step in range(1, 31):
        metrics._record(line(step), {})
        if step == 22:
            metrics.drop(20)
        if step == 25:
            entries = metrics.state_dict()
    metrics.close()
    assert entries["record"]["offset"] == len(text(1, 20))
    assert [line["step"] for line in entries["lines"]] == [21, 22, 23, 24, 25]
    return path, checkpoint(25, entries)


@pytest.mark.parametrize(("there", "unshown"), [
    (text(1, 30), []), (text(1, 25), []), (text(1, 23), [24, 25]),
    (text(1, 23) + text(24, 24)[:-9], [24, 25]), (text(1, 20), [21, 22, 23, 24, 25]),
    (text(1, 25) + b"\0" * 40, [])])
def test_a_record_is_cut_at_the_position_and_nothing_before_it_is_read_or_written(
        recorded: tuple[Path, CheckpointRef], there: bytes, unshown: list[int]) -> None:
    path, found = recorded
    path.write_bytes(there)
    file = os.stat(path).st_ino

    record, metrics = resumed(path, found)
    metrics._record(line(26), {})
    metrics.close()

    assert path.read_bytes() == text(1, 26)
    assert os.stat(path).st_ino == file
    assert record.begin.offset == len(text(1, 20))
    assert [line["step"] for line in record.unshown] == unshown


@pytest.mark.parametrize("there", [
    text(1, 30).replace(b'"step": 3,', b'"step": 3, "more": 1,'), text(1, 10) + text(12, 30),
    b"\n" + text(1, 30), text(1, 30)[:-1].replace(b"0.", b"1.") + b"\n"])
def test_a_record_that_does_not_fit_the_checkpoint_is_merged_with_it(
        recorded: tuple[Path, CheckpointRef], there: bytes) -> None:
    path, found = recorded
    path.write_bytes(there)
    before = {line["step"]: line for line in jsonl.parse_records(there) if line["step"] <= 20}

    record, metrics = resumed(path, found)
    metrics.close()

    assert record.begin == FileMark()
    assert jsonl.read_records(path) == [*before.values(), *(line(step) for step in range(21, 26))]


def test_a_checkpoint_of_an_older_version_is_merged_and_the_next_one_knows_its_position(
        recorded: tuple[Path, CheckpointRef]) -> None:
    path, found = recorded
    old = checkpoint(25, {"lines": found.state.lines})

    record, metrics = resumed(path, old)
    metrics._record(line(26), {})
    entries = metrics.state_dict()
    metrics.close()
    again, metrics = resumed(path, checkpoint(26, entries))
    metrics.close()

    assert record.begin.offset == 0
    assert again.begin.offset == len(text(1, 25))
    assert path.read_bytes() == text(1, 26)


def test_every_save_of_a_survivor_continues_the_record_also_after_dropped_lines(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_PENDING", 7)
    path, ranks = tmp_path / "metrics.jsonl", [Metrics(), Metrics()]
    ranks[0].open(path, EMPTY)
    offsets = set()
    for step in range(1, 40):
        drop = ranks[0].sync_if_long()  # as late as possible in the step
        on_disk = path.read_bytes()  # rank 0 may die here
        for metrics in ranks:
            metrics._record(line(step), {})
            if drop:
                metrics.drop(step - 1)
        entries = ranks[1].state_dict()
        assert entries == ranks[0].state_dict()
        assert len(entries["lines"]) <= 8
        copy = tmp_path / f"{step}.jsonl"
        copy.write_bytes(on_disk)
        record, metrics = resumed(copy, checkpoint(step, entries))
        metrics.close()
        offsets.add(record.begin.offset)
        assert copy.read_bytes() == text(1, step)
    ranks[0].close()
    assert len(offsets) == 6


def test_lines_are_kept_in_memory_while_the_file_cannot_be_written(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_PENDING", 5)
    metrics = Metrics()
    metrics.open(tmp_path / "metrics.jsonl", EMPTY)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        for step in range(1, 21):
            metrics._record(line(step), {})
            assert not metrics.sync_if_long()
    metrics._record(line(21), {})

    assert len(metrics.state_dict()["lines"]) == 21
    for step in range(22, 27):
        metrics._record(line(step), {})
    assert metrics.sync_if_long()
    metrics.close()


def test_the_last_records_of_a_file_and_records_spaced_evenly(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(text(1, 60_000))

    assert last_records(path, 3000) == [line(step) for step in range(57_001, 60_001)]
    steps = [record["step"] for record in sample_records(path)]
    assert len(steps) == jsonl.SAMPLES
    assert steps[0] == 1
    assert max(b - a for a, b in itertools.pairwise(steps)) < 130
    path.write_bytes(text(1, 900))
    assert len(sample_records(path)) == 900
    assert last_records(path, 1000) == sample_records(path)
    assert last_records(tmp_path / "none", 10) == []
