"""The task of `tape_task`, which fails, hangs or is slow in a chosen way."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tape_task import Indexed, Tape
from torch import nn
from torch.utils.data import Dataset, get_worker_info

from trainer import Outcome

FORWARDS = [0]


def wait(what: str) -> None:
    """Sleep for the seconds in an environment variable."""
    time.sleep(float(os.environ.get(f"SLOW_{what}_S", "0")))


def gather(own: torch.Tensor) -> list[torch.Tensor]:
    """A collective of the user's."""
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    return every


def outlast_rank(parent: int) -> None:
    """End after the rank that has started this process."""
    while os.getppid() == parent:
        time.sleep(0.1)


class Fragile(Indexed):
    """Samples with slow reads; in a loader worker one stops it and one is never read, once."""

    def __init__(self, task: Failing, count: int, split: str) -> None:
        super().__init__(count, task.width)
        self.task, self.split = task, split

    def __getitem__(self, index: int) -> dict[str, Any]:
        wait(self.split.upper())
        if self.split == "train" and get_worker_info() is not None:
            if index == self.task.endless and self.task.once("endless"):
                time.sleep(3600)
            if index == self.task.stops and self.task.once("stops"):
                os.kill(os.getpid(), signal.SIGSTOP)
        return super().__getitem__(index)


@dataclasses.dataclass(frozen=True)
class Failing(Tape):
    """With --data.shuffle off, global batches of 8 and micro-batches of 2, sample 88 is the first
    of step 12, on rank 0; 92 on rank 1 of 2. It fails only in training.

    Without an effect on the results, seconds come from SLOW_TRAIN_S, SLOW_VALIDATION_S and
    SLOW_TEST_S (a sample), and SLOW_THREAD_S (lifetime of an extra thread). With SLOW_PROCESS_S
    there is an extra process, which doesn't end before the rank.

    Args:
        at: sample in whose loss it fails.
        marks: an empty folder.
        endless, stops: sample whose read never ends, or stops its loader worker.
        busy_at: forward in training of a process, in which rank 0 computes for a minute.
        first_s, validation_s: seconds of the first forward of a process, and of each validation's.
    """

    how: str = ""
    at: int = 88
    marks: str = ""
    endless: int = -1
    stops: int = -1
    busy_at: int = -1
    first_s: float = 0.0
    validation_s: float = 0.0

    def once(self, name: str) -> bool:
        """Whether this is the first call, over all processes and attempts."""
        try:
            Path(self.marks, name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def model(self) -> nn.Module:
        if self.how == "exit-early":
            sys.exit(0)
        return super().model()

    def dataset(self, split: str) -> Dataset | None:
        if split == "train":
            threading.Thread(target=wait, args=("THREAD",), name="upload").start()
            if "SLOW_PROCESS_S" in os.environ:
                multiprocessing.get_context("fork").Process(
                    target=outlast_rank, args=(os.getpid(),), name="packing").start()
        count = self.samples if split == "train" else self.validation
        return Fragile(self, count, split) if count else None

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> Outcome:
        if model.training:
            self._delay()
        else:
            time.sleep(self.validation_s)
            if self.how == "gather":
                gather(batch["index"])
        outcome = super().loss(model, batch)
        if model.training and self.at in batch["index"].tolist():
            self._fail()
        return outcome

    def _delay(self) -> None:
        FORWARDS[0] += 1
        if FORWARDS[0] == 1:
            time.sleep(self.first_s)
        elif FORWARDS[0] == self.busy_at and os.environ.get("RANK") == "0" and self.once("busy"):
            until_s, noise = time.monotonic() + 60, torch.ones(300, 300)
            while time.monotonic() < until_s:
                noise = torch.mm(noise, noise).sign()

    def _fail(self) -> None:
        match self.how:
            case "raise":
                raise ValueError("sample 88 is not to be borne")
            case "name":
                raise FileNotFoundError("no file \udcff.jpg")
            case "codes":
                raise type("Red\x1b[31m", (Exception,), {})("\x1b[2Jgone\r\x9b1m\u202e")
            case "words":
                raise RuntimeError("Connection reset by peer")
            case "forked":
                if (pid := os.fork()) == 0:
                    raise ValueError("in a process of the task's own")
                os.waitpid(pid, 0)
            case "moved":
                os.chdir(self.marks)
            case "exit":
                sys.exit(0)
            case "import":
                import no_such_module_anywhere  # noqa: F401
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "memory":
                _, hard = resource.getrlimit(resource.RLIMIT_AS)
                size = int(Path("/proc/self/statm").read_text().split()[0])
                size *= resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (size + (64 << 20), hard))
                torch.ones(1 << 28)
