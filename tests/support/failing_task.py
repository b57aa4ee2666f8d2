"""The task of `tape_task`, failing in a chosen way at a chosen sample."""

from __future__ import annotations

import dataclasses
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tape_task import Indexed, Tape
from torch import nn
from torch.utils.data import Dataset, get_worker_info

from trainer import Outcome


class Fragile(Indexed):
    """Reading sample `at` raises, or kills the loader worker, once."""

    def __init__(self, count: int, width: int, how: str, at: int, marks: str) -> None:
        super().__init__(count, width)
        self.how, self.at, self.marks = how, at, marks

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.at and self.how == "bad-sample":
            raise KeyError("no such picture")
        if index == self.at and self.how == "killed-worker" and get_worker_info() is not None:
            try:
                os.close(os.open(self.marks, os.O_CREAT | os.O_EXCL))
                os.kill(os.getpid(), signal.SIGKILL)
            except FileExistsError:
                pass
        return super().__getitem__(index)


class Mute(Exception):
    """An exception whose str() raises."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


@dataclasses.dataclass(frozen=True)
class Failing(Tape):
    """With --data.shuffle off, global batches of 8 and micro-batches of 2, sample 88 is the first
    of step 12, on rank 0; 92 on rank 1 of 2. It fails only in training."""

    how: str = ""
    at: int = 88
    marks: str = ""

    def model(self) -> nn.Module:
        if self.how == "exit-early":
            sys.exit(0)
        if self.how == "moved-early":
            os.chdir(self.marks)
        return super().model()

    def dataset(self, split: str) -> Dataset | None:
        if split == "train":
            return Fragile(self.samples, self.width, self.how, self.at, self.marks)
        return super().dataset(split)

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> Outcome:
        if self.how == "empty" and not len(batch["index"]):
            raise ValueError("nothing to reshape")
        outcome = super().loss(model, batch)
        if self.how == "slow":
            time.sleep(0.005)
        if model.training and self.at in batch["index"].tolist():
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
                case "mute":
                    raise Mute
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
        return outcome


class Thief:
    """A sink that deletes the run's records at step 10."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def step(self, line: dict[str, Any], timing: dict[str, float]) -> None:
        if line["step"] == 10:
            for name in ("metrics.jsonl", "events.jsonl"):
                (self.folder / name).unlink()

    def validation(self, line: dict[str, Any]) -> None: ...

    def finish(self, settings: Any, figures: Any, step: int) -> None: ...

    def close(self) -> None: ...
