"""A checkpoint is restored equally on all ranks, whichever of them can read it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


def bring_back(folder: str, view: str) -> tuple[str, int]:
    """In a rank: restore what rank 0 has saved, with another `view` of it on rank 1.

    Returns:
        A digest of the restored state, and how often tensors were broadcast.
    """
    import torch
    import xxhash

    from benchmarks.synthetic_state import make_checkpointer, make_subject
    from trainer.checkpoint.restore import find_checkpoint, restore_state
    from trainer.checkpoint.store import Store
    from trainer.distributed.world import World
    from trainer.storage import tensorfile
    from trainer.telemetry.events import Log

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
            path = own / "step-00000001/model.safetensors"
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
        found = find_checkpoint(Store(own), world, "benchmark")
        assert found is not None
        assert found.holder == 0
        sends, broadcast = [], world.broadcast
        world.broadcast = lambda *a: (sends.append(a), broadcast(*a))  # type: ignore[method-assign]
        restore_state(found, Store(own), subject.state, world, Log())
        hasher = xxhash.xxh3_128()
        for tensors in subject.state.tensors().values():
            for chunk in tensorfile.serialize(tensors):
                hasher.update(chunk)
    return hasher.hexdigest(), len(sends)


@pytest.mark.parametrize("view", ["whole", "damaged", "another", "none"])
def test_ranks_read_a_checkpoint_that_all_can_see_and_receive_it_otherwise(
    ranks, tmp_path, view
):
    (first, sends), (second, _) = ranks(2, bring_back, str(tmp_path), view, group=False)

    assert first == second
    assert (sends == 0) == (view == "whole")
