"""On a GPU: copies of a save beside the next step, a late broadcast, a save beside a stuck kernel.
Streams and events are emulated, so the order is tested without a card."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from device_recorder import Recorder, Stream
from plain_step import plain_step
from states import make_state
from torch import Tensor, nn

from trainer.checkpoint import checkpointer, snapshot
from trainer.checkpoint.boundary import StepBoundary
from trainer.checkpoint.checkpointer import Checkpointer, RunRecord
from trainer.checkpoint.store import Store
from trainer.config import schema
from trainer.data.map_dataset import MicroBatch
from trainer.data.sampler import MicroBatchSpec
from trainer.distributed.ddp import Objective
from trainer.distributed.world import LaunchInfo, World
from trainer.run.guard import Guard
from trainer.storage import tensorfile
from trainer.task import Outcome
from trainer.telemetry.events import Log
from trainer.telemetry.status import Phase

CPU = torch.device("cpu")


class Run:
    """A small training whose tensors are on the CPU, and whose order is that of a GPU."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, without: str, ranks: int) -> None:
        self.recorder = recorder = Recorder(patch, without)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.log, self.folder = Log(level="error"), folder
        self.log.status.enter(Phase.TRAIN)
        self.state = make_state(model, optimizer)
        self.world = World(LaunchInfo(size=ranks, local_size=ranks), CPU, 1)
        self.boundary = StepBoundary(model, self.log.status, device=torch.device("cuda"))
        self.boundary.note_constant_parameters()
        self.store = Store(folder, run="test", keep=9)
        self.checkpoint = Checkpointer(
            store=self.store, state=self.state, world=self.world, log=self.log,
            record=RunRecord(run_id="test", attempt={}), config=schema.Checkpoint(),
            boundary=self.boundary)
        objective = Objective(
            model, lambda m, x: Outcome(m(x).square().sum(), len(x)), num_ranks=1, nominal_count=8,
            device=CPU, changed=self.boundary.buffers.changed)
        self.step = dataclasses.replace(
            plain_step(self.state, objective, objective), boundary=self.boundary,
            status=self.log.status, world=self.world)
        model.register_forward_pre_hook(lambda *_: recorder.queue(f"forward {self.next}"))
        optimizer.register_step_pre_hook(lambda *_: recorder.queue(f"update {self.next}"))
        patch.setattr(snapshot, "_copy", recorder.before_each(
            snapshot._copy, lambda: recorder.queue(
                f"{'buffers' if recorder.current() is recorder.main else 'copy'} {self.next - 1}")))
        patch.setattr(checkpointer.tensorfile, "serialize", recorder.before_each(
            tensorfile.serialize, lambda: recorder.do("write")))

    @property
    def next(self) -> int:
        return self.state.progress.step + 1

    def train(self) -> None:
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(self.next))
        self.step([MicroBatch(MicroBatchSpec(self.next, 0, 0, True, tuple(range(8))), x)])

    def saved(self, step: int) -> dict[str, Tensor]:
        return tensorfile.load_tensors(self.store.verify(step).path / "model.safetensors")

    def guard(self) -> Guard:
        context = SimpleNamespace(
            world=self.world, log=self.log, status=self.log.status, path=self.folder,
            config=SimpleNamespace(nonfinite=schema.BadStepConfig()))
        rest = dict.fromkeys(("lock", "faults", "loader", "metrics", "timing", "validation_clock"))
        return Guard(context=context, intervals=SimpleNamespace(total=9, checkpoint=9),
                     state=self.state, boundary=self.boundary, checkpoint=self.checkpoint, **rest)


@pytest.fixture
def run(request, tmp_path, monkeypatch) -> Iterator[Run]:
    made = Run(tmp_path, monkeypatch, **{"without": "", "ranks": 1} | getattr(request, "param", {}))
    yield made
    made.checkpoint.abandon()
    made.store.close()


@pytest.mark.parametrize(("run", "missing"), [
    ({}, []),
    ({"without": "wait_stream"}, ["update 1 before copy 1"]),
    ({"without": "wait_event"}, ["copy 1 before update 2"]),
    ({"without": "synchronize"}, ["copy 1 before write"])], indirect=["run"])
def test_copies_of_a_save_come_after_its_update_and_before_the_next_one_and_the_writing(
    run: Run, missing: list[str]
) -> None:
    run.train()
    run.checkpoint.save("periodic")
    run.train()
    run.checkpoint.finish_pending(must=True)

    before = run.recorder.before
    wanted = [("update 1", "copy 1"), ("buffers 1", "forward 2"), ("copy 1", "update 2"),
              ("copy 1", "write")]
    assert [f"{first} before {second}" for first, second in wanted
            if first not in before[second]] == missing
    assert "copy 1" not in before["forward 2"]  # it overlaps with the step


def test_outside_of_steps_nothing_changes_the_state_before_it_is_copied(run: Run) -> None:
    run.train()
    run.checkpoint.save("periodic")
    run.log.status.enter(Phase.EVALUATE)
    run.recorder.queue("exchange of the weights")
    run.train()
    run.checkpoint.save("best")
    run.recorder.queue("end of the exchange")

    assert "copy 1" in run.recorder.before["exchange of the weights"]
    assert "copy 2" in run.recorder.before["end of the exchange"]


@pytest.mark.parametrize(("run", "waits"), [
    ({"ranks": 2}, True), ({"ranks": 2, "without": "synchronize"}, False)], indirect=["run"])
def test_an_update_does_not_begin_before_a_broadcast_of_buffers_has_arrived(
    run: Run, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source that dies costs a step then: the lock of the boundary is still free."""
    monkeypatch.setattr(World, "gather_json", lambda self, value: [value, value])
    monkeypatch.setattr(World, "broadcast",
                        lambda self, *_: run.recorder.queue("broadcast"))
    monkeypatch.setattr(run.boundary, "close", run.recorder.before_each(
        run.boundary.close, lambda: run.recorder.do("close")))
    run.train()

    assert ("broadcast" in run.recorder.before["close"]) is waits


@pytest.mark.parametrize("by", [Guard.emergency_save, Guard.emergency_save_from_watchdog])
def test_a_survivor_saves_the_boundary_beside_a_kernel_that_never_ends(
    by, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.train()
    kept = {name: tensor.clone() for name, tensor in run.state.model.state_dict().items()}
    run.boundary.begin_step()
    run.state.model(torch.randn(8, 3))  # moves the statistics of the batch norm
    run.recorder.queue("stuck")
    pinned, buffer_for = list[bool](), snapshot._buffer_for
    monkeypatch.setattr(snapshot, "_buffer_for", lambda tensor, used, pin: pinned.append(pin) or
                        buffer_for(tensor, used, pin))

    assert by(run.guard())
    assert pinned
    assert not any(pinned)  # pinning would wait for the kernel

    for work in ("copy 1", "buffers 1", "write"):
        assert "stuck" not in run.recorder.before.get(work, ())
    saved = run.saved(1)
    assert all(torch.equal(saved[name], tensor) for name, tensor in kept.items())


@pytest.mark.parametrize("by", [Guard.emergency_save, Guard.emergency_save_from_watchdog])
@pytest.mark.parametrize("saves", [False, True])
def test_a_gpu_that_refuses_every_call_does_not_hide_its_first_error(
    saves: bool, by, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    run.train()
    if saves:
        run.checkpoint.save("periodic")
        run.checkpoint.finish_pending(must=True)
    run.boundary.begin_step()
    for name in ("wait_event", "wait_stream"):
        monkeypatch.setattr(Stream, name, refuse)

    assert not by(run.guard())


def test_the_memory_of_the_first_save_is_made_at_the_start(run: Run) -> None:
    def addresses() -> dict[str, int]:
        return {f"{file} {name}": copy.data_ptr()
                for file, copies in run.boundary.snapshot._copies.items()
                for name, copy in copies.items()}

    run.checkpoint.allocate()
    made = addresses()
    run.train()
    run.checkpoint.save("periodic")

    assert made
    assert addresses() == made
