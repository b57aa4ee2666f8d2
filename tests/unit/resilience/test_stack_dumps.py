"""The stack dumps of a run take a limited number of files and bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.resilience import stack_dumps


def test_the_oldest_files_of_earlier_attempts_go_and_a_file_has_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack_dumps, "MAX_FILES", 3)
    monkeypatch.setattr(stack_dumps, "MAX_BYTES", 10)
    for attempt in range(6):
        for rank in range(2):
            for _ in range(2):
                stack_dumps.write(tmp_path, attempt=attempt, rank=rank, text="7 bytes")

    left = sorted((tmp_path / "stacks").iterdir())
    assert [path.name[8:14] for path in left] == ["3-rank", "4-rank", "4-rank", "5-rank", "5-rank"]
    assert {path.read_bytes() for path in left} == {b"7 bytes7 b"}
