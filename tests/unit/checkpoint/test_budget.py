"""Emergency saves are started only if they can complete, or nothing recent is saved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from runs import fill
from states import make_state
from torch import nn

from trainer.checkpoint.checkpointer import reason_not_to_save, seconds_needed
from trainer.checkpoint.progress import TrainProgress
from trainer.checkpoint.store import Store
from trainer.checkpoint.train_state import TrainState


@pytest.fixture
def state() -> TrainState:
    model = nn.Linear(100, 10, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return make_state(model, optimizer, progress=TrainProgress(step=25))


def saved(folder: Path, step: int, *, seconds: float | None, size: int = 4_000) -> Store:
    """Write a checkpoint and the event with its duration."""
    store = Store(folder / "checkpoints")
    with store.stage(step, generation=0) as stage:
        fill(stage)
        stage.commit(kind="periodic", run="r")
    event = {"event": "save", "at_step": step, "time": step}
    if seconds is not None:
        event |= {"bytes": size, "seconds": seconds}
    with (folder / "events.jsonl").open("a") as events:
        events.write(json.dumps(event) + "\n")
    return store


@pytest.mark.parametrize(("step", "seconds", "interval", "spent_s", "begun"), [
    (20, 40.0, 10, 0.0, False),
    (20, 25.0, 10, 0.0, True),
    (20, 25.0, 10, 9.0, False),
    (15, 40.0, 10, 0.0, True),  # a whole interval would be lost
    (20, 40.0, 0, 0.0, True),
    (20, None, 10, 0.0, True),  # unknown speed of a save
])
def test_a_save_is_not_started_if_it_would_be_killed_and_little_is_lost(
        tmp_path, state, step, seconds, interval, spent_s, begun):
    store = saved(tmp_path, step, seconds=seconds)

    why = reason_not_to_save(tmp_path / "events.jsonl", store, state, generation=0,
                             interval=interval, left_s=30 - spent_s)

    assert (why is None) == begun
    if why is not None:
        assert f"{seconds:.0f} s" in why
        assert f"{30 - spent_s:.0f} s" in why


def test_the_speed_is_that_of_the_last_save_whose_size_is_known(tmp_path):
    saved(tmp_path, 1, seconds=1.0, size=10)
    saved(tmp_path, 2, seconds=6.0, size=30)
    saved(tmp_path, 3, seconds=None)

    assert seconds_needed(tmp_path / "events.jsonl", 100) == 20.0
    assert seconds_needed(tmp_path / "none.jsonl", 100) is None
