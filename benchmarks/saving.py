"""The ways to save a state that are compared: this trainer's, torch's, and a copy in memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.synthetic_state import Subject, make_checkpointer

BATCH = 64
"""Samples of the forward and backward that follows a save."""


@dataclass
class Contestant:
    """A way to save: `run(folder)` gives (seconds held, seconds until durable or None)."""

    name: str
    run: Callable[[Path], tuple[float, float | None]]
    stalls: list[float] = field(default_factory=list)
    durables: list[float] = field(default_factory=list)
    first: float = 0.0


def contestants(
    subject: Subject, folder: Path
) -> tuple[list[Contestant], tuple[list[float], list[float]], Callable[[], None]]:
    """All of them; seconds of a forward and backward alone, and beside a save; what closes them."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ours = make_checkpointer(subject, folder / "ours")
    alone: list[float] = []
    beside: list[float] = []
    sources = subject.live
    touched = [tensor.clone() for tensor in sources]
    inputs = torch.randn(BATCH, subject.width)
    clock = time.perf_counter

    def forward_backward() -> float:
        began = clock()
        subject.model(inputs).square().mean().backward()
        ended = clock()
        subject.optimizer.zero_grad()
        return ended - began

    def copy(path: Path) -> tuple[float, None]:
        began = clock()
        torch._foreach_copy_(touched, sources)
        return clock() - began, None

    def save(path: Path) -> tuple[float, float]:
        alone.append(forward_backward())
        ours.overlap = True
        subject.state.progress.step += 1
        began = clock()
        ours.save("periodic")
        held = clock() - began
        beside.append(forward_backward())
        joined = clock()
        ours.finish_copy()
        held += clock() - joined
        ours.finish_pending(must=True)
        return held, clock() - began

    def save_at_once(path: Path) -> tuple[float, float]:
        ours.overlap = False
        subject.state.progress.step += 1
        began = clock()
        ours.save("periodic")
        held = clock() - began
        ours.finish_pending(must=True)
        return held, clock() - began

    def torch_save(path: Path) -> tuple[float, None]:
        began = clock()
        torch.save(subject.dictionary(), path / "state.pt")
        held = clock() - began
        with (path / "state.pt").open("rb") as file:
            os.fsync(file.fileno())  # not timed: it is the next contestant's disk
        return held, None

    def torch_save_fsync(path: Path) -> tuple[float, float]:
        began = clock()
        with (path / "state.pt").open("wb") as file:
            torch.save(subject.dictionary(), file)
            file.flush()
            os.fsync(file.fileno())
        held = clock() - began
        return held, held

    def dcp_save(path: Path) -> tuple[float, float]:
        began = clock()
        dcp.save(subject.dictionary(), checkpoint_id=path)
        held = clock() - began
        return held, held

    def dcp_async_save(path: Path) -> tuple[float, float]:
        began = clock()
        pending = dcp.async_save(subject.dictionary(), checkpoint_id=path)
        held = clock() - began
        getattr(pending, "upload_completion", pending).result()
        return held, clock() - began

    def close() -> None:
        ours.close()
        dist.destroy_process_group()

    return [
        Contestant("copy in memory", copy),
        Contestant("this trainer", save),
        Contestant("the same, no overlap", save_at_once),
        Contestant("torch.save", torch_save),
        Contestant("torch.save + fsync", torch_save_fsync),
        Contestant("dcp.save", dcp_save),
        Contestant("dcp.async_save", dcp_async_save),
    ], (alone, beside), close
