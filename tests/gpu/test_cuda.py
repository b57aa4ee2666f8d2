"""On one CUDA card: a stopped run ends with the bits of a straight one, and sums of gradients don't
depend on who adds them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from trainer.checkpoint.snapshot import Snapshot
from trainer.commands.compare import differences
from trainer.config import command_line
from trainer.data.map_dataset import MicroBatch
from trainer.distributed import sync_batchnorm
from trainer.distributed.comm_timer import CommunicationTimer
from trainer.distributed.partition import block
from trainer.distributed.rank_invariant_reduction import TreeSum
from trainer.distributed.world import LaunchInfo, World
from trainer.resilience.stop_signals import StopSignals
from trainer.resilience.watchdog import Watchdog
from trainer.run.build import build
from trainer.run.warmup import start
from trainer.step import Step
from trainer.telemetry.events import Log

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROOT = Path(__file__).parents[2]
EACH_PRECISION = [
    ["--precision.compile=off"], ["--precision.dtype=fp32", "--precision.compile=off"],
    ["--precision.dtype=fp16", "--precision.compile=off"], ["--precision.compile=on"],
]  # fmt: skip


def train(run: Path, *arguments: str) -> int:
    command = [sys.executable, "-m", "trainer", "--device=cuda", "--steps=30", f"--run-dir={run}",
               "--eval.every=10", "--task.dropout=0.2", *arguments]
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}).returncode


def test_what_a_warm_up_waited_is_forgotten_while_the_device_is_still_at_it():
    communication = CommunicationTimer(on_cuda=True)
    matrix = torch.randn(4096, 4096, device="cuda", requires_grad=True)
    product = matrix
    for _ in range(50):
        product = product @ matrix

    communication.time_backward(loss := product.sum())
    loss.backward()
    communication.end_backward()
    communication.reset()

    assert communication.take_wait_s() == 0.0


@pytest.mark.parametrize("arguments", [*EACH_PRECISION, ["--parallel.reduction=canonical"]])
def test_a_stopped_run_ends_with_the_same_bits(tmp_path, arguments):
    stop = "--inject=term:step=13"

    assert train(tmp_path / "straight", *arguments) == 0
    assert train(tmp_path / "stopped", *arguments, stop) == 75
    assert train(tmp_path / "stopped", *arguments, stop) == 0

    assert not list(differences(tmp_path / "straight", tmp_path / "stopped"))


@pytest.mark.parametrize("arguments", [
    *(["--task.dropout=0.2", *precision] for precision in EACH_PRECISION),
    ["--task.model=resnet18", "--precision.compile=off"],
])  # fmt: skip
def test_gradients_have_the_same_bits_in_any_layout_of_blocks(tmp_path, arguments):
    config = command_line.parse_config([
        "--device=cuda", "--steps=4", f"--run-dir={tmp_path / 'run'}", *arguments,
        "--parallel.reduction=canonical", "--batch.global-size=96", "--batch.micro-size=16"])
    log = Log(level="warning")
    with (World.form(device="cuda", launch=LaunchInfo()) as world,
          Watchdog(world, log, limit_s=None) as watchdog):
        run = start(build(config, world, log, StopSignals(), watchdog.marks))
        step, loader = run.step, run.loader
        step(loader.window())  # an optimizer state, and other weights
        micros = list(loader.window())
        step.boundary.buffers.keep()
        found = [in_step(step, micros),
                 *(in_blocks(step, micros, ranks) for ranks in (1, 2, 4, 5))]
        run.guard.close()

    assert len(micros) == 6
    for gradients in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], gradients, strict=True))


def in_step(step: Step, micros: list[MicroBatch]) -> list[torch.Tensor]:
    """The sum of the gradients as a step makes it."""
    step.optimizer.zero_grad(set_to_none=True)
    for micro in step.compute.reduction(micros):
        step.forward_backward(micro, rehearsal=True)
    step.objective.forget()
    return [p.grad.clone() for p in step.parameters if p.grad is not None]


def add(left: list[torch.Tensor], right: list[torch.Tensor]) -> list[torch.Tensor]:
    torch._foreach_add_(left, right)
    return left


def in_blocks(step: Step, micros: list[MicroBatch], num_ranks: int) -> list[torch.Tensor]:
    """The sum of the gradients, added up in the blocks of so many ranks, one after the other."""
    whole = TreeSum(len(micros), add)
    for rank in range(num_ranks):
        own = TreeSum(len(micros), add)
        for number in block(len(micros), rank, num_ranks):
            step.optimizer.zero_grad(set_to_none=True)
            step.boundary.buffers.put_back()
            step.forward_backward(micros[number], rehearsal=True)
            own.push((number, number + 1), [p.grad for p in step.parameters])
        step.objective.forget()
        for span, gradients in own.parts:
            whole.push(span, gradients)
    (_, gradients), = whole.parts
    return gradients


def test_a_save_does_not_wait_for_its_copies_and_the_next_update_does():
    live = {"model": {"weight": torch.ones(1 << 28, device="cuda")}}  # 1 GiB
    snapshot = Snapshot(torch.device("cuda"))
    snapshot.allocate(live)
    torch.cuda.synchronize()

    copy = snapshot.take(live)["model"]["weight"]
    returned_before = not snapshot._copied.query()
    snapshot.protect()
    live["model"]["weight"].zero_()
    snapshot.wait()

    assert returned_before
    assert bool((copy == 1).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_synchronised_batch_norm_equals_that_of_a_cpu(dtype, form, monkeypatch):
    monkeypatch.setattr(sync_batchnorm, "_gather_rows", lambda row, module: row[None])
    monkeypatch.setattr(sync_batchnorm, "is_synchronised", lambda module: True)
    x = (torch.randn(6, 5, 4, 4) + 3).to(dtype).contiguous(memory_format=form)
    found = []
    for device in ("cpu", "cuda"):
        layer = torch.nn.BatchNorm2d(5, device=device)
        sync_batchnorm.convert(layer, 2, device)
        leaf = x.to(device).requires_grad_()
        output = layer(leaf)
        output.backward(x.to(device).cos())
        found.append([output.detach().cpu(), leaf.grad.cpu(), layer.weight.grad.cpu(),
                      layer.bias.grad.cpu(), *(b.cpu() for b in layer.buffers())])

    for on_cpu, on_gpu in zip(*found, strict=True):
        torch.testing.assert_close(on_gpu, on_cpu, rtol=2e-2 if dtype is torch.bfloat16 else 1e-4,
                                   atol=2e-2 if dtype is torch.bfloat16 else 1e-4)


def test_a_survivor_copies_the_boundary_while_a_kernel_is_stuck():
    live = {"model": {"weight": torch.randn(4096, 4096, device="cuda"),
                      "count": torch.tensor(7, device="cuda")}}
    snapshot = Snapshot(torch.device("cuda"))
    snapshot.allocate(live)
    wanted = {name: tensor.cpu() for name, tensor in live["model"].items()}
    boundary, main = torch.cuda.Event(), torch.cuda.current_stream()
    boundary.record()
    torch.cuda._sleep(int(1e10))  # cycles: 5 s at 2 GHz
    found = {}

    def save():  # as the watchdog's thread: on its own stream
        stream = torch.cuda.Stream()
        stream.wait_event(boundary)
        with torch.cuda.stream(stream):
            found["copy"] = snapshot.take(live, pin=False)["model"]
            snapshot.wait()
        found["kernel_still_ran"] = not main.query()

    thread = threading.Thread(target=save)
    thread.start()
    thread.join()

    assert found["kernel_still_ran"]
    assert all(torch.equal(found["copy"][name], tensor) for name, tensor in wanted.items())
