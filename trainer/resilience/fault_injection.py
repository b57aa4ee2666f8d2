"""Fault injection: make a rank fail at a named progress mark (`--inject kill:rank=1:step=7`)."""

from __future__ import annotations

import difflib
import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError
from trainer.storage.files import fsync_folder, make_folder, write_file
from trainer.telemetry.events import Log
from trainer.telemetry.status import Phase

KINDS = (
    "kill", "exit", "raise", "hang", "stop", "term", "nan", "flip", "corrupt", "enospc", "slow",
)
PHASES = (
    Phase.START, Phase.RESTORE, Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER,
    Phase.STEP_END, Phase.SAVE_BEGIN, Phase.SAVE_MID, Phase.SAVE_END, Phase.EVALUATE,
)
"""Progress marks at which a fault can be injected."""

STEPPING = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.STEP_END)
"""Marks of each step, which count from 1."""
WITH_EPOCH = (*STEPPING, Phase.EVALUATE)
NUMBERS = {"rank": int, "step": int, "epoch": int, "attempt": int, "seconds": float}


class InjectedFault(RuntimeError):
    """Raised by `--inject raise`."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault: its kind and the mark at which it fires. None means any."""

    text: str
    kind: str
    rank: int = 0
    step: int | None = None
    epoch: int | None = None
    phase: str = "forward"
    attempt: int | None = None
    always: bool = False
    seconds: float = 1.0

    def fits(self, *, rank: int, step: int, epoch: int, phase: str, attempt: int) -> bool:
        """Whether the fault fires at this mark."""
        return (phase == self.phase and rank == self.rank and self.step in (None, step)
                and self.epoch in (None, epoch) and self.attempt in (None, attempt))


def parse_fault(text: str) -> Fault:
    """`KIND[:rank=R][:step=S][:epoch=E][:phase=P][:attempt=A][:seconds=X][:always]`. A
    `ConfigError` names the part that is wrong."""
    kind, *rest = text.split(":")
    _check_name(text, "fault", kind, KINDS)
    fields: dict[str, Any] = {}
    for part in rest:
        name, _, value = part.partition("=")
        if name == "always" and not value:
            fields["always"] = True
        elif name == "phase":
            _check_name(text, "phase", value, PHASES)
            fields["phase"] = value
        elif name in NUMBERS:
            try:
                fields[name] = NUMBERS[name](value)
            except ValueError:
                raise ConfigError(f"--inject {text}: {name}={value} is not a number.") from None
            if not fields[name] >= 0:
                raise ConfigError(f"--inject {text}: {name}={value} is below 0.")
        else:
            _check_name(text, "part", part, (*NUMBERS, "phase", "always"))
    fault, wrong = Fault(text=text, kind=kind, **fields), ""
    if "seconds" in fields and kind != "slow":
        wrong = f"{kind} takes no duration; only slow has seconds="
    elif fault.step == 0 and fault.phase in STEPPING:
        wrong = f"steps count from 1, and step 0 has no phase {fault.phase!r}"
    elif fault.epoch is not None and fault.phase not in WITH_EPOCH:
        wrong = f"phase {fault.phase!r} belongs to no epoch; leave epoch= out, or name a step"
    elif fault.kind == "nan" and fault.phase == "start":
        wrong = "there is no loss yet that could be a NaN; use phase=forward"
    if wrong:
        raise ConfigError(f"--inject {text}: {wrong}.")
    return fault


def _check_name(text: str, what: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" (did you mean '{near[0]}'?)" if near else ""
        raise ConfigError(f"--inject {text}: no {what} {name!r}{hint}; "
                          f"there are {', '.join(known)}.")


def refuse_unreachable(faults: Sequence[Fault], *, ranks: int | None, total: int) -> None:
    """Raise `ConfigError` for a fault that this run of `total` steps never reaches: it would test
    nothing. `ranks` is None if their number may change."""
    for fault in faults:
        why = ""
        if ranks is not None and fault.rank >= ranks:
            why = f"there is no rank {fault.rank}; the last one is {ranks - 1}"
        elif fault.step is not None and fault.step > total:
            why = f"the run ends with step {total}"
        if why:
            raise ConfigError(f"--inject {fault.text}: {why}, so the fault would never fire; "
                              "name a place that the run reaches.")


class FaultInjector:
    """The armed faults of one rank; subscribes to the rank's progress marks. Each fault fires once,
    also across restarts: a file in the folder `marks` is durable before the fault happens. The
    kinds `nan`, `flip`, `corrupt` and `enospc` are `actions` of other parts of the run."""

    def __init__(
        self, faults: Sequence[Fault] = (), *, rank: int = 0, attempt: int = 0,
        marks: Path | None = None, log: Log | None = None,
        actions: Mapping[str, Callable[[], None]] | None = None,
    ) -> None:
        self._actions = actions or {}
        self._faults = [fault for number, fault in enumerate(faults) if fault.rank == rank and (
            marks is None or not _mark(marks, number, fault).exists())]
        self._numbers = {id(fault): number for number, fault in enumerate(faults)}
        self._rank, self._attempt, self._marks, self._log = rank, attempt, marks, log
        self._lock = threading.Lock()

    def __call__(self, point: Phase, step: int, epoch: int = 0) -> None:
        """Fail if a fault is armed for this mark."""
        for fault in list(self._faults):
            if fault.fits(rank=self._rank, step=step, epoch=epoch, phase=point,
                          attempt=self._attempt):
                self._fire(fault, point, step)

    def __bool__(self) -> bool:
        """Whether any fault is left that may fire."""
        return bool(self._faults)

    def unfired(self) -> list[str]:
        """Faults of this rank that have not fired, except those marked `always`."""
        return [fault.text for fault in self._faults if not fault.always]

    def _fire(self, fault: Fault, phase: str, step: int) -> None:
        with self._lock:
            if not fault.always:
                if fault not in self._faults:
                    return
                self._faults.remove(fault)
                if self._marks is not None:
                    make_folder(self._marks)
                    write_file(_mark(self._marks, self._numbers[id(fault)], fault), ())
                    fsync_folder(self._marks)
        if self._log is not None:
            self._log.event("fault", fault=fault.text, at_step=step, at_phase=phase)
            self._log.warning(f"injected fault {fault.text} at step {step}, phase {phase}")
        match fault.kind:
            case "kill" | "stop" | "term":
                os.kill(os.getpid(), signal.Signals[f"SIG{fault.kind.upper()}"])
            case "exit":
                os._exit(1)
            case "raise":
                raise InjectedFault(f"--inject {fault.text}: raised at step {step}, {phase}")
            case "hang":
                while True:
                    time.sleep(3600)
            case "slow":
                time.sleep(fault.seconds)
            case kind:
                self._actions[kind]()
                if kind == "corrupt":
                    os.kill(os.getpid(), signal.SIGKILL)


def no_space(path: object = "") -> OSError:
    """The error of a full disk."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def _mark(folder: Path, number: int, fault: Fault) -> Path:
    return folder / f"{number}-{fault.text.replace('/', '_')}"
