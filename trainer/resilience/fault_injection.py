"""Fault injection: make a rank fail at a named progress mark (`--inject kill:rank=1:step=7`)."""

from __future__ import annotations

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
from trainer.storage.files import fsync_folder, make_subfolder, write_file
from trainer.telemetry.events import Log
from trainer.telemetry.status import Phase

KINDS = (
    "kill", "exit", "raise", "hang", "stop", "term", "nan", "flip", "corrupt", "enospc", "slow",
)
STEPPING = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.STEP_END)
PHASES = (Phase.START, Phase.RESTORE, *STEPPING, Phase.SAVE_BEGIN, Phase.SAVE_MID, Phase.SAVE_END,
          Phase.EVALUATE)
"""Progress marks at which a fault can be injected."""
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


def parse_fault(text: str) -> Fault:
    """Parse `KIND[:rank=R][:step=S][:epoch=E][:phase=P][:attempt=A][:seconds=X][:always]`."""
    kind, *rest = text.split(":")
    _check_name(text, "fault", kind, KINDS)
    numbers = [name for name in NUMBERS if kind == "slow" or name != "seconds"]
    fields: dict[str, Any] = {}
    for part in rest:
        name, _, value = part.partition("=")
        if name == "always" and not value:
            fields["always"] = True
        elif name == "phase":
            _check_name(text, "phase", value, PHASES)
            fields["phase"] = value
        elif name in numbers:
            try:
                fields[name] = NUMBERS[name](value)
            except ValueError:
                fields[name] = -1
            if not fields[name] >= 0:
                raise ConfigError(f"--inject {text}: {name}={value} is not a number from 0 on.")
        else:
            _check_name(text, "part", part, (*numbers, "phase", "always"))
    fault = Fault(text=text, kind=kind, **fields)
    if fault.step == 0 and fault.phase in STEPPING:
        raise ConfigError(f"--inject {text}: steps count from 1, and step 0 has no phase "
                          f"{fault.phase!r}.")
    return fault


def _check_name(text: str, what: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise ConfigError(f"--inject {text}: no {what} {name!r}; there are {', '.join(known)}.")


def refuse_unreachable(faults: Sequence[Fault], *, ranks: int | None, total: int) -> None:
    """Refuse a fault that this run of `total` steps never reaches: it would test nothing. `ranks`
    is None if their number may change."""
    for fault in faults:
        if ranks is not None and fault.rank >= ranks:
            why = f"there is no rank {fault.rank}; the last one is {ranks - 1}"
        elif fault.step is not None and fault.step > total:
            why = f"the run ends with step {total}"
        else:
            continue
        raise ConfigError(f"--inject {fault.text}: {why}, so the fault would never fire; "
                          "name a place that the run reaches.")


class FaultInjector:
    """The armed faults of one rank; subscribes to its progress marks. Each fault fires once, also
    across restarts: a file in the folder `fired` is durable before the fault happens. The kinds
    `nan`, `flip`, `corrupt` and `enospc` are `actions` of other parts of the run."""

    def __init__(
        self, faults: Sequence[Fault] = (), *, rank: int = 0, attempt: int = 0,
        fired: Path | None = None, log: Log | None = None,
        actions: Mapping[str, Callable[[], None]] | None = None,
    ) -> None:
        self._actions = actions or {}
        # By the name of its mark, which starts with its number: two faults may be equal.
        named = {f"{number}-{fault.text.replace('/', '_')}": fault
                 for number, fault in enumerate(faults) if fault.rank == rank}
        self._faults = {name: fault for name, fault in named.items()
                        if fired is None or not (fired / name).exists()}
        self._attempt, self._fired, self._log = attempt, fired, log
        self._lock = threading.Lock()

    def __call__(self, point: Phase, step: int, epoch: int = 0) -> None:
        """Fail if a fault is armed for this mark."""
        for name, fault in list(self._faults.items()):
            if (fault.phase == point and fault.step in (None, step)
                    and fault.epoch in (None, epoch) and fault.attempt in (None, self._attempt)):
                self._fire(name, fault, point, step)

    def __bool__(self) -> bool:
        return bool(self._faults)

    def unfired(self) -> list[str]:
        """Faults of this rank that have not fired, except those marked `always`."""
        return [fault.text for fault in self._faults.values() if not fault.always]

    def _fire(self, name: str, fault: Fault, phase: str, step: int) -> None:
        with self._lock:
            if not fault.always:
                if self._faults.pop(name, None) is None:
                    return
                if self._fired is not None:
                    make_subfolder(self._fired)
                    write_file(self._fired / name, ())
                    fsync_folder(self._fired)
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
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
