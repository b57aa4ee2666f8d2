"""For how long does a save hold up the training, and when is the state durable?

    python -m benchmarks.checkpoint [--sizes 10,100,1000]

The time for which the training thread is held, and the time to durable, compared with torch.save,
torch.distributed.checkpoint, and a copy of the same tensors into memory that is already in use. The
disk is that of the current folder.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks import reporting
from benchmarks.reporting import in_turn
from benchmarks.synthetic_state import Subject, make_checkpointer, make_subject

OURS, COPY, FSYNC = "this trainer", "copy in memory", "torch.save + fsync"
Times = tuple[float, float | None]
"""Seconds held, and seconds until the state is durable."""


class Savers:
    """The ways to save a state that are compared."""

    def __init__(self, subject: Subject, folder: Path) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self._subject, self._folder = subject, folder
        self._ours = make_checkpointer(subject, folder / "ours")
        self._touched = [tensor.clone() for tensor in subject.live]

    def close(self) -> None:
        self._ours.close()
        dist.destroy_process_group()

    def all(self) -> dict[str, Callable[[], Times]]:
        return {
            COPY: self._copy, OURS: self._save,
            "torch.save": self._torch_save, FSYNC: lambda: self._torch_save(fsync=True),
            "dcp.save": lambda: self._dcp(dcp.save),
            "dcp.async_save": lambda: self._dcp(dcp.async_save),
        }  # fmt: skip

    def _copy(self) -> Times:
        began = time.perf_counter()
        torch._foreach_copy_(self._touched, self._subject.live)
        return time.perf_counter() - began, None

    def _save(self) -> Times:
        self._subject.state.progress.step += 1
        began = time.perf_counter()
        self._ours.save("periodic")
        held = time.perf_counter() - began
        self._ours.finish_pending(must=True)
        return held, time.perf_counter() - began

    def _torch_save(self, *, fsync: bool = False) -> Times:
        with (self._folder / "state.pt").open("wb") as file:
            began = time.perf_counter()
            torch.save(self._subject.dictionary(), file)
            file.flush()
            if fsync:
                os.fsync(file.fileno())
            held = time.perf_counter() - began
            os.fsync(file.fileno())  # not timed: else the next contestant would wait for this disk
        (self._folder / "state.pt").unlink()
        return held, held if fsync else None

    def _dcp(self, save: Callable[..., Any]) -> Times:
        path = self._folder / "dcp"
        began = time.perf_counter()
        pending = save(self._subject.dictionary(), checkpoint_id=path)
        held = time.perf_counter() - began
        if save is dcp.async_save:
            getattr(pending, "upload_completion", pending).result()
        durable = time.perf_counter() - began
        shutil.rmtree(path)
        return held, durable


def measure_stall(megabytes: float, repeats: int, folder: Path) -> dict[str, Any]:
    """All contestants in turn, after a first round that does not count."""
    subject = make_subject(megabytes)
    savers = Savers(subject, folder)
    with warnings.catch_warnings(action="ignore"):  # dcp's, about a world of one
        times = in_turn(savers.all(), repeats)
    savers.close()
    found: dict[str, dict[str, Any]] = {
        name: {"held": reporting.summary([held for held, _ in own]),
               "durable": None if own[0][1] is None else
               reporting.summary([durable for _, durable in own])}
        for name, own in times.items()}
    held = {name: figures["held"]["median"] for name, figures in found.items()}
    return {"bytes": subject.bytes, "tensors": len(subject.live),
            "threads": torch.get_num_threads(), "contestants": found,
            "held_over_copy": held[OURS] / held[COPY], "fsync_over_held": held[FSYNC] / held[OURS]}


def show_stall(found: dict[str, Any]) -> str:
    rows = [[name, reporting.spread(figures["held"], 1e3),
             "–" if figures["durable"] is None else reporting.spread(figures["durable"], 1e3)]
            for name, figures in found["contestants"].items()]
    return (f"{found['bytes'] / 1e6:,.0f} MB in {found['tensors']} tensors, {found['threads']} "
            f"threads, n = {found['contestants'][OURS]['held']['n']}; medians (quartiles)\n"
            f"{reporting.table(['', 'held, ms', 'durable, ms'], rows)}\n"
            f"held: {found['held_over_copy']:.2f} × the copy, 1/{found['fsync_over_held']:.1f} "
            f"of torch.save + fsync\n")


def main() -> None:
    parser = reporting.parser("checkpoint", __doc__)
    parser.add_argument("--sizes", type=reporting.numbers, default="10,100,1000",
                        help="of the state in MB (%(default)s)")
    parser.add_argument("--repeats", type=int, help="of each contestant; default: 20, at 1 GB 5")
    options = parser.parse_args()
    machine, found = reporting.machine(), []
    torch.set_num_threads(machine["cores"])
    for size in options.sizes:
        with tempfile.TemporaryDirectory(dir=".") as folder:
            found.append(measure_stall(size, options.repeats or (20 if size < 500 else 5),
                                       Path(folder)))
        print(show_stall(found[-1]), flush=True)
    reporting.print_json("checkpoint", machine=machine, stall=found)


if __name__ == "__main__":
    reporting.finish(main)
