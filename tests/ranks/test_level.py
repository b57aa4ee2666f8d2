"""A node rejoins with a disk from before a rollback."""

from __future__ import annotations

import json
from pathlib import Path


def save(folder: Path, step: int, generation: int, best: int) -> None:
    from tests.support.runs import state_json
    from trainer.checkpoint.store import Store
    from trainer.storage.layout import STATE

    with Store(folder, run="a run").stage(step, generation=generation) as stage:
        stage.write(STATE, state_json(best=best, of=generation))
        stage.commit(kind="periodic", run="a run")


def levelled(path: str) -> dict[int, tuple[int, int]]:
    """In a rank, as if it were the only one of its node.

    Returns:
        Step → generation, by manifest and by content, in its folder after the copy.
    """
    from trainer.checkpoint.replication import copy_missing_checkpoints
    from trainer.checkpoint.restore import find_checkpoint
    from trainer.checkpoint.store import Store
    from trainer.distributed.world import World
    from trainer.storage.layout import STATE
    from trainer.telemetry.events import Log

    with World.form(device="cpu", threads=1) as world:
        world.has_nodes = world.writes_run_dir = True
        folder = Path(path, str(world.rank))
        for step in (10, 20):  # rank 0's were abandoned by a rollback to step 0
            save(folder, step, world.rank, best=10)
        save(folder, 30 - world.rank, world.rank, best=10)
        store = Store(folder, run="a run")
        world.barrier()
        found = find_checkpoint(store, world, "a run")
        assert found is not None
        copy_missing_checkpoints(found, store, "a run", world, Log())
        return {i.step: (i.generation, json.loads((i.path / STATE).read_bytes())["of"])
                for i in store.checkpoints()}


def test_the_resumed_and_the_best_checkpoint_replace_those_of_an_abandoned_history(
    ranks, tmp_path
):
    stale, good = ranks(2, levelled, str(tmp_path), group=False)

    assert good == {10: (1, 1), 20: (1, 1), 29: (1, 1)}
    assert stale[10] == stale[29] == (1, 1)
