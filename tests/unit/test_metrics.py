"""The record of a run: lines that are written together keep their order."""

from __future__ import annotations

import threading
from typing import Any

from trainer import metrics
from trainer.append import AppendFile
from trainer.metrics import Metrics, read_metrics


class Held(AppendFile):
    """The second write is held up, as one of many lines is."""

    began, go, writes = threading.Event(), threading.Event(), 0

    def append(self, record: bytes) -> None:
        self.writes += 1
        if self.writes == 2:
            self.began.set()
            assert self.go.wait(60)
        super().append(record)


def line(step: int) -> dict[str, Any]:
    return {"step": step, "loss": 0.5}


def test_a_save_that_writes_lines_is_not_overtaken_by_the_next_step(tmp_path, monkeypatch):
    path, record = tmp_path / "metrics.jsonl", Metrics()
    monkeypatch.setattr(metrics, "AppendFile", Held)
    monkeypatch.setattr(metrics, "PAUSE_S", 3600.0)
    record.open(path, [], kept=[], lacking=[])
    for step in (1, 2, 3):
        record._record(line(step), {})
    monkeypatch.setattr(metrics, "PAUSE_S", 0.0)

    save = threading.Thread(target=record.sync)
    save.start()
    assert Held.began.wait(60)
    training = threading.Thread(target=record._record, args=(line(4), {}))
    training.start()
    training.join(0.2)  # it waits here; if it didn't, it would be through
    Held.go.set()
    for thread in (save, training):
        thread.join(60)
    record.close()

    assert read_metrics(path) == [line(step) for step in (1, 2, 3, 4)]
