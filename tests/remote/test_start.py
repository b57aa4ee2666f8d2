"""Which checkpoint a start continues from if there is a mirror, and which starts are refused."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext

import pytest

pytest.importorskip("obstore", reason="the extra trainer[remote] is not installed")

import torch
from mirrors import RUN, Cut, FaultyStore, Machine

from trainer.checkpoint.mirror import Mirror, MirrorSource, Owner
from trainer.checkpoint.mirror_fence import Fence
from trainer.checkpoint.restore import find_checkpoint
from trainer.config.schema import Checkpoint, Config
from trainer.distributed.world import LaunchInfo, World
from trainer.errors import MirrorFailed, MirrorTaken
from trainer.resilience.progress_marks import ProgressMarks
from trainer.resilience.stop_signals import StopSignals
from trainer.run import mirroring
from trainer.run.context import Context
from trainer.storage import layout
from trainer.storage.files import replace_json
from trainer.storage.object_store import ObjectStore


@pytest.fixture
def machine(tmp_path) -> Machine:
    """Its mirror has steps 1 and 2, of which 1 has the best weights; its disk, 3 too."""
    made = Machine(tmp_path / "first", FaultyStore())
    made.take(nonce="a")
    made.upload(1)
    made.upload(2, best=1)
    made.save(3, best=1)
    return made


def find(machine: Machine, world: World, **options):
    mirror, before = Mirror(machine.store), len(machine.events("fetched"))
    source = MirrorSource(mirror, entries=mirror.entries(), log=machine.log)
    found = find_checkpoint(machine.local, world, RUN, mirror=source, **options)
    return found.step, sorted(event["at_step"] for event in machine.events("fetched")[before:])


@pytest.fixture
def world() -> World:
    return World(LaunchInfo(), torch.device("cpu"), 1)


def test_the_newest_whole_checkpoint_of_disk_and_mirror_is_taken(tmp_path, machine, world):
    empty = Machine(tmp_path / "second", machine.store)
    assert find(machine, world) == (3, [])
    assert find(empty, world) == (2, [1, 2]), "the best weights come along"
    assert find(empty, world) == (2, [])

    # A local file is damaged: the mirror has the same checkpoint whole, or an older one.
    for step, then in ((3, (2, [])), (2, (2, [2]))):
        path = machine.local.find(step).path / layout.MODEL
        path.write_bytes(path.read_bytes()[::-1])
        assert find(machine, world) == then


def test_damage_in_the_mirror_leads_to_the_one_before_and_a_dead_network_to_a_restart(
        tmp_path, machine, world):
    key = next(key for key in machine.store.keys("data") if "00000002" in key)
    ObjectStore.put(machine.store, key, b"?")

    empty = Machine(tmp_path / "second", machine.store)
    assert find(empty, world) == (1, [1])

    def cut(operation, key):
        if operation == "download":
            raise Cut("no route to host")
    machine.store.before = cut
    with pytest.raises(MirrorFailed, match="no route to host") as caught:
        find(Machine(tmp_path / "third", machine.store), world)
    assert caught.value.exit_code == 1, "a launcher starts it again"


def test_a_launcher_that_restarts_its_ranks_needs_no_mirror_but_takes_none_back(
        tmp_path, machine, monkeypatch):
    monkeypatch.setattr(ObjectStore, "open", lambda url, create=True: machine.store)
    mine = LaunchInfo(run_id="x", launch_id="mine")
    world = World(mine, torch.device("cpu"), 1)
    other = World(dataclasses.replace(mine, launch_id="other"), torch.device("cpu"), 1)
    config = Config(task=None, checkpoint=Checkpoint(mirror="s3://bucket/x"))

    def look(world):
        context = Context(config=config, world=world, log=machine.log, stop=StopSignals(),
                          marks=ProgressMarks(), path=machine.path, resume_from=tmp_path,
                          init=tmp_path)
        return mirroring.look(context, claim=lambda: None)

    replace_json(machine.path / layout.MIRROR,
                 {"url": "s3://bucket/x", "launch": "mine", "generation": 1})
    with pytest.raises(MirrorTaken, match="another start of the run"):
        look(world)
    assert [entry.step for entry in look(other).entries] == [1, 2]

    def cut(operation, key):
        raise Cut("no route to host")
    machine.store.before = cut
    source = look(world)
    assert (source.entries, source.is_reached) == ((), False)
    assert "the mirror can't be reached" in machine.console.getvalue()
    with pytest.raises(MirrorFailed, match=r"no route to host\. Check the URL.* a restart tries"):
        look(other)


@pytest.mark.parametrize(("launch", "is_taken"), [("mine", False), ("other", True)])
def test_a_start_that_could_not_read_the_mirror_takes_none_back(tmp_path, machine, launch,
                                                                is_taken):
    beside = machine.store.beside()
    Fence(Mirror(beside)).take(Owner(run=RUN, generation=2, nonce="b", launch=launch, host="b"))
    late = Machine(tmp_path / "second", machine.store)
    late.uploads.fence.take_later(Owner(run=RUN, generation=5, nonce="c", launch="mine"))

    with pytest.raises(MirrorTaken) if is_taken else nullcontext():
        late.upload(4)
    assert [e.step for e in Mirror(beside).entries()] == [1, 2] + [4] * (not is_taken)
