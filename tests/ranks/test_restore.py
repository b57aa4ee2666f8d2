"""A checkpoint is restored equally on all ranks, whichever of them can read it; and a node that
rejoins with a disk from before a roll-back gets the current ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import xxhash
from runs import fill, flip_a_bit, state_json

from benchmarks.synthetic_state import make_checkpointer, make_subject
from trainer.checkpoint.replication import copy_missing_checkpoints
from trainer.checkpoint.restore import find_checkpoint, restore_state
from trainer.checkpoint.store import Store
from trainer.distributed.world import World
from trainer.storage import tensorfile
from trainer.storage.layout import STATE
from trainer.telemetry.events import Log


def bring_back(folder: str, view: str) -> tuple[str, int]:
    """In a rank: restore what rank 0 has saved, with another `view` of it on rank 1. The digest of
    the restored state, and how often tensors were broadcast."""
    with World.form(device="cpu", threads=1) as world:
        torch.manual_seed(world.rank)
        subject = make_subject(1)
        own = Path(folder, str(world.rank))
        if world.rank == 0 or view == "another":
            subject.state.progress.step = 1
            checkpoint = make_checkpointer(subject, own)
            checkpoint.save("periodic")
            checkpoint.close()
        world.barrier()
        if world.rank == 1 and view in ("whole", "damaged"):
            shutil.copytree(Path(folder, "0"), own)
        if world.rank == 1 and view == "damaged":
            flip_a_bit(own / "step-00000001/model.safetensors")
        found = find_checkpoint(Store(own), world, "benchmark")
        assert found is not None
        assert found.holder == 0
        sends, broadcast = [], world.broadcast
        world.broadcast = lambda *a: (sends.append(a), broadcast(*a))  # type: ignore[method-assign]
        restore_state(found, Store(own), subject.state, world, Log())
        content = [bytes(chunk) for tensors in subject.state.tensors().values()
                   for chunk in tensorfile.serialize(tensors)]
    return xxhash.xxh3_128_hexdigest(b"".join(content)), len(sends)


@pytest.mark.parametrize("view", ["whole", "damaged", "another", "none"])
def test_ranks_read_a_checkpoint_that_all_can_see_and_receive_it_otherwise(ranks, tmp_path, view):
    (first, sends), (second, _) = ranks(2, bring_back, str(tmp_path), view, group=False)

    assert first == second
    assert (sends == 0) == (view == "whole")


def levelled(path: str) -> dict[int, tuple[int, int]]:
    """In a rank, as if it were the only one of its node: step → generation, by manifest and by
    content, in its folder after the copy."""
    with World.form(device="cpu", threads=1) as world:
        world.has_nodes = world.writes_run_dir = True
        folder = Path(path, str(world.rank))
        for step in (10, 20, 30 - world.rank):  # rank 0's were abandoned by a roll-back to step 0
            with Store(folder, run="a run").stage(step, generation=world.rank) as stage:
                stage.write(STATE, state_json(best=10, of=world.rank))
                fill(stage)
                stage.commit(kind="periodic", run="a run")
        store = Store(folder, run="a run")
        world.barrier()
        found = find_checkpoint(store, world, "a run")
        assert found is not None
        copy_missing_checkpoints(found, store, "a run", world, Log())
        return {i.step: (i.generation, json.loads((i.path / STATE).read_bytes())["of"])
                for i in store.checkpoints()}


def test_the_resumed_and_the_best_checkpoint_replace_those_of_an_abandoned_history(ranks, tmp_path):
    stale, good = ranks(2, levelled, str(tmp_path), group=False)

    assert good == {10: (1, 1), 20: (1, 1), 29: (1, 1)}
    assert stale[10] == stale[29] == (1, 1)
