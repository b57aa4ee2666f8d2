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

from trainer.errors import ConfigError
from trainer.telemetry.events import Log
from trainer.telemetry.status import Phase

KINDS = (
    "kill", "exit", "raise", "hang", "stop", "term", "nan", "flip", "corrupt", "enospc", "slow",
)  # fmt: skip
PHASES = (
    Phase.START, Phase.RESTORE, Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER,
    Phase.STEP_END, Phase.SAVE_BEGIN, Phase.SAVE_MID, Phase.SAVE_END, Phase.EVALUATE,
)  # fmt: skip
"""Progress marks at which a fault can be injected."""

STEPPING = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.STEP_END)
"""Marks of each step, which count from 1."""
WITH_EPOCH = (*STEPPING, Phase.EVALUATE)


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
        return (
            phase == self.phase
            and rank == self.rank
            and self.step in (None, step)
            and self.epoch in (None, epoch)
            and self.attempt in (None, attempt)
        )


def parse_fault(text: str) -> Fault:
    """`KIND[:rank=R][:step=S][:epoch=E][:phase=P][:attempt=A][:seconds=X][:always]`.

    Raises:
        ConfigError: names the part that is wrong.
    """
    kind, *rest = text.split(":")
    if kind not in KINDS:
        raise ConfigError(f"--inject {text}: no fault {kind!r}{_nearest(kind, KINDS)}; "
                          f"there are {', '.join(KINDS)}.")
    fields: dict[str, object] = {}
    for part in rest:
        name, _, value = part.partition("=")
        if name == "always" and not value:
            fields["always"] = True
        elif name == "phase":
            if value not in PHASES:
                raise ConfigError(f"--inject {text}: no phase {value!r}{_nearest(value, PHASES)}; "
                                  f"there are {', '.join(PHASES)}.")
            fields["phase"] = value
        elif name in ("rank", "step", "epoch", "attempt", "seconds"):
            try:
                fields[name] = float(value) if name == "seconds" else int(value)
            except ValueError:
                raise ConfigError(f"--inject {text}: {name}={value} is not a number.") from None
        else:
            names = ("rank", "step", "epoch", "phase", "attempt", "seconds", "always")
            raise ConfigError(f"--inject {text}: no part {part!r}{_nearest(name, names)}; "
                              f"there are {', '.join(names)}.")
    if "seconds" in fields and kind != "slow":
        raise ConfigError(f"--inject {text}: {kind} takes no duration; only slow has seconds=; "
                          "leave it out.")
    fault = Fault(text=text, kind=kind, **fields)  # type: ignore[arg-type]
    if wrong := _never(fault):
        raise ConfigError(f"--inject {text}: {wrong}.")
    return fault


def _never(fault: Fault) -> str:
    """Why no run reaches the fault's mark; "" if one can."""
    numbers = {"rank": fault.rank, "step": fault.step, "epoch": fault.epoch,
               "attempt": fault.attempt, "seconds": fault.seconds}
    for name, value in numbers.items():
        if value is not None and not value >= 0:
            return f"{name}={value} is below 0"
    if fault.step == 0 and fault.phase in STEPPING:
        return f"steps count from 1, and step 0 has no phase {fault.phase!r}"
    if fault.epoch is not None and fault.phase not in WITH_EPOCH:
        return f"phase {fault.phase!r} belongs to no epoch; leave epoch= out, or name a step"
    if fault.kind == "nan" and fault.phase == "start":
        return "there is no loss yet that could be a NaN; use phase=forward"
    return ""


def refuse_unreachable(
    faults: Sequence[Fault], *, ranks: int | None, total: int, epochs: int | None,
    evaluated: Callable[[int], bool] | None,
) -> None:
    """Refuse faults that this run would never reach: they would test nothing.

    Args:
        ranks: number of ranks; None: it may change.
        total: last step of the run.
        epochs: epochs of the run; None: unknown.
        evaluated: whether a step is evaluated; None: no step is.

    Raises:
        ConfigError: the run does not reach a fault's mark.
    """
    for fault in faults:
        why = ""
        if ranks is not None and fault.rank >= ranks:
            why = (f"there is no rank {fault.rank}; the ranks are 0 to {ranks - 1}" if ranks > 1
                   else f"there is no rank {fault.rank}; the only one is 0")
        elif fault.step is not None and fault.step > total:
            why = f"the run ends with step {total}"
        elif fault.epoch is not None and epochs is not None and fault.epoch >= epochs:
            why = f"the run's last epoch is {epochs - 1} (the first is 0)"
        elif fault.phase == "evaluate" and evaluated is None:
            why = "the task has no data for validation or test, so nothing is evaluated"
        elif (fault.phase == "evaluate" and fault.step is not None and evaluated is not None
              and not evaluated(fault.step)):
            why = f"step {fault.step} isn't evaluated (--eval.every)"
        if why:
            raise ConfigError(f"--inject {fault.text}: {why}, so the fault would never fire; "
                              "name a place that the run reaches.")


class FaultInjector:
    """The armed faults of one rank; subscribes to the rank's progress marks.

    Each fault fires once, also across restarts: a file in `marks` is durable before the fault
    happens.

    Args:
        marks: folder of those files.
        actions: functions for the kinds `nan`, `flip`, `corrupt` and `enospc`, by kind.
    """

    def __init__(
        self, faults: Sequence[Fault] = (), *, rank: int = 0, attempt: int = 0,
        marks: Path | None = None, log: Log | None = None,
        actions: Mapping[str, Callable[[], None]] | None = None,
    ) -> None:
        self._actions = actions or {}
        self._faults = [
            fault for number, fault in enumerate(faults) if fault.rank == rank
            and not (marks is not None and _mark(marks, number, fault).exists())
        ]
        self._numbers = {id(fault): number for number, fault in enumerate(faults)}
        self._rank, self._attempt, self._marks = rank, attempt, marks
        self._log = log
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
                    _write_mark(_mark(self._marks, self._numbers[id(fault)], fault))
        if self._log is not None:
            self._log.event("fault", fault=fault.text, at_step=step, at_phase=phase)
            self._log.warning(f"injected fault {fault.text} at step {step}, phase {phase}")
        match fault.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(1)
            case "raise":
                raise InjectedFault(f"--inject {fault.text}: raised at step {step}, {phase}")
            case "hang":
                while True:
                    time.sleep(3600)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "term":
                os.kill(os.getpid(), signal.SIGTERM)
            case "slow":
                time.sleep(fault.seconds)
            case "corrupt":
                self._actions["corrupt"]()
                os.kill(os.getpid(), signal.SIGKILL)
            case kind:
                self._actions[kind]()


def no_space(path: object = "") -> OSError:
    """The error of a full disk."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def _mark(folder: Path, number: int, fault: Fault) -> Path:
    return folder / f"{number}-{fault.text.replace('/', '_')}"


def _write_mark(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    os.fsync(descriptor)
    os.close(descriptor)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean '{near[0]}'?)" if near else ""
