"""Which checkpoint a start resumes from, and what happens to the ones it abandons."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

from tests.support.runs import fill, state_json
from trainer.checkpoint.restore import CheckpointRef, abandon_newer, find_checkpoint
from trainer.checkpoint.store import Store
from trainer.distributed.world import LaunchInfo, World
from trainer.errors import ConfigError
from trainer.storage.layout import STATE
from trainer.telemetry.events import Log

RUN = "a run"


@pytest.fixture
def world() -> World:
    return World(LaunchInfo(), torch.device("cpu"), 1)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "checkpoints", run=RUN)


def save(store: Store, step: int, generation: int = 0) -> Path:
    with store.stage(step, generation=generation) as stage:
        stage.write(STATE, state_json())
        fill(stage)
        return stage.commit(kind="periodic", run=RUN).path


def start(store: Store, world: World) -> tuple[CheckpointRef, int]:
    """The checkpoint that a start finds, and the generation it continues in."""
    found = find_checkpoint(store, world, RUN)
    assert found is not None
    return found, abandon_newer(found, store, world, Log(stream=io.StringIO()))


def test_each_checkpoint_with_a_damaged_manifest_is_named(store: Store, world: World) -> None:
    paths = [save(store, step) for step in (10, 20, 30)]
    for path in paths[1:]:
        (path / "manifest.json").unlink()

    found, generation = start(store, world)

    assert (found.step, generation) == (10, 1)
    assert found.skipped == ("step-00000020: manifest.json is missing",
                             "step-00000030: manifest.json is missing")
    (paths[0] / "manifest.json").unlink()
    with pytest.raises(ConfigError, match=r"step-00000010: manifest\.json is missing"):
        find_checkpoint(store, world, RUN)


def test_a_damaged_checkpoint_of_a_later_generation_is_abandoned(
        store: Store, world: World) -> None:
    save(store, 5)
    (save(store, 13, generation=1) / STATE).write_bytes(b"")

    found, generation = start(store, world)

    assert (found.step, generation) == (5, 2)
    for step in (7, 8, 9):
        save(store, step, generation)
    assert store.prune() == [5]
    again, generation = start(store, world)
    assert (again.step, again.skipped, generation) == (9, (), 2)
