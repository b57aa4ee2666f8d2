"""A run with a mirror, whose store, network and disks are disturbed too."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path

from benchmarks.chaos_plan import LOSSES, NETWORK, Fault, Run
from benchmarks.chaos_run import Launcher, Watch, kill
from benchmarks.chaos_store import BUCKET, FaultyStore
from trainer.errors import EXIT_COMPLETE, EXIT_CONFIG, EXIT_FAILURE
from trainer.storage import processes
from trainer.storage.layout import EVENTS
from trainer.telemetry.events import read_events

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
        self._twins_problem: str | None = None
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
        complete = [folder for folder, ended in codes.items() if ended == EXIT_COMPLETE]
        refused = [folder for folder, ended in codes.items() if ended == EXIT_CONFIG
                   and REFUSED in folder.with_suffix(".log").read_text()]
        if None in codes.values():
            return None
        if len(complete) == len(refused) == 1:
            self._twins_decided = True
            self.folder = complete[0]
            return EXIT_COMPLETE
        # The second may have found a finished run, if it was late. Else both have computed.
        first, second = map(_attempts, codes)
        if len(complete) == 2 and (first <= second or second <= first):
            return EXIT_COMPLETE
        self._twins_problem = f"of two launchers at once, not one was refused: {[*codes.values()]}"
        return code or EXIT_FAILURE

    def problem(self, code: int) -> str | None:
        if self._twins_problem is not None:
            return self._twins_problem
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


def _attempts(folder: Path) -> set[str]:
    """The attempts whose steps a run folder has."""
    return {event["nonce"] for event in read_events(folder / EVENTS)
            if event["event"] == "first-step"}
