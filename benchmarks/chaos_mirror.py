"""A run with a mirror, whose store, network and disks are disturbed too."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path

from benchmarks.chaos_plan import LOSSES, NETWORK, Fault, Run
from benchmarks.chaos_run import Launcher, Watch, kill
from benchmarks.chaos_store import BUCKET, FaultyStore
from trainer.errors import EXIT_COMPLETE, EXIT_CONFIG
from trainer.resilience import processes

REFUSED = "only one may continue the run"
"""In the message of a start, or of an attempt, that another start has superseded."""


class MirrorWatch(Watch):
    """Also strikes the store and the disks. After a loss of all disks the run goes on in an empty
    folder, after `twins` in two: one launcher has to be refused, the other one to complete it."""

    def __init__(self, run: Run, folder: Path, launcher: Launcher, store: FaultyStore) -> None:
        super().__init__(run, folder, launcher)
        self._arguments += ["--checkpoint.mirror", f"s3://{BUCKET}/{folder.name}"]
        self._store = store
        self._numbers: dict[Fault, int] = {}  # of the store's faults
        self._is_armed = False  # an upload will be held
        self._loss: str | None = None  # that is being done
        self._twin: int | None = None
        self._launched_s = 0.0
        self._twins_decided = False
        store.calm()

    def start(self) -> int:
        self._launched_s = time.monotonic()
        if self._loss == "twins":
            arguments = [str(self._other) if word == str(self.folder) else word
                         for word in self._arguments]
            self._twin = self._launcher.start(self._num_ranks, arguments,
                                              self._other.with_suffix(".log"))
        self._loss = None
        return super().start()

    def follow(self, pid: int, *, until_s: float) -> int | None:
        code = super().follow(pid, until_s=until_s)
        if self._twin is None:
            return code
        codes = {self.folder: code, self._other: super().follow(self._twin, until_s=until_s)}
        self._twin = None
        if None in codes.values():
            return None
        told = [folder for folder, ended in codes.items() if ended == EXIT_CONFIG
                and REFUSED in " ".join(folder.with_suffix(".log").read_text().split())]
        complete = [folder for folder, ended in codes.items() if ended == EXIT_COMPLETE]
        self._twins_decided = len(told) == len(complete) == 1
        if self._twins_decided:
            self.folder = complete[0]
        # If both are complete, the second has found a finished run.
        return EXIT_COMPLETE if self._twins_decided or len(complete) == 2 else max(
            ended for ended in codes.values() if ended is not None)

    def problem(self, code: int) -> str | None:
        if self._loss is not None and code == -signal.SIGKILL:
            self.wait_gone()
            if self.folder.exists():
                shutil.rmtree(self.folder)
            self._step = 0
            if self._loss == "twins":
                self._store.calm()
            return None
        if code == EXIT_CONFIG and self._store.disturbed_since(self._launched_s):
            return None  # a new start that can't reach its mirror is refused
        return super().problem(code)

    def _happened(self, fault: Fault, starts: int) -> bool:
        if fault.kind in NETWORK:
            return self._store.hits(self._numbers[fault]) > 0
        if fault.kind == "twins":
            return self._twins_decided
        return super()._happened(fault, starts)

    @property
    def _other(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}-twin")

    def _strike(self, fault: Fault, launcher: int, ranks: list[int]) -> bool:
        if fault.kind in NETWORK:
            self._numbers[fault] = self._store.disturb(fault.kind)
            return True
        if fault.kind == "upload" and not self._is_armed:
            self._store.hold(str(fault.phase))
            self._is_armed = True
        if fault.kind == "upload" and not self._store.holds():
            return False
        if fault.kind not in ("upload", *LOSSES):
            return super()._strike(fault, launcher, ranks)
        if len(ranks) != self._num_ranks or not all(map(processes.start_time, ranks)):
            return False
        if fault.kind == "upload":
            kill(ranks)
            self._store.release()
            self._is_armed = False
            return True
        self._loss, self.killed_launcher = fault.kind, True
        kill([launcher, self._launcher.server(launcher), *ranks])
        return True
