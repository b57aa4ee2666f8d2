"""metrics.jsonl, the record of a run: its lines, and who keeps, writes and shows them."""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from trainer.append import AppendFile, Mark, read_records
from trainer.evaluate import Scores
from trainer.folder import LAST_STEP, replace_text
from trainer.step import StepResult

RESERVED = ("step", "epoch", "loss", "lr", "lrs", "grad_norm", "samples", "scale", "skipped",
            "replaced")


LARGEST_TABLE = 10_000
"""Counts in a table that goes into the record: a confusion matrix of 100 classes."""
PAUSE_S = 0.5
"""Lines of steps that are faster than this are written together: those that a death takes belong to
steps that are made again, or travel in the save."""

_ENCODER = json.JSONEncoder(allow_nan=False)


class Sink(Protocol):
    """Something that shows the run; on rank 0 only."""

    def step(self, line: dict[str, Any], timing: dict[str, float]) -> None:
        """A training step: its line of metrics.jsonl, and this rank's times in seconds (none
        where an earlier attempt made the step)."""
        ...

    def validation(self, line: dict[str, Any]) -> None:
        """A validation: its line of metrics.jsonl."""
        ...

    def finish(self, settings: Mapping[str, Any], figures: Mapping[str, float], step: int) -> None:
        """The run is complete: its settings and final figures."""
        ...

    def close(self) -> None:
        """This attempt ends."""
        ...


def step_line(result: StepResult) -> dict[str, Any]:
    """A step's line: functions of the run only, no times."""
    line: dict[str, Any] = {
        "step": result.step,
        "epoch": result.epoch,
        "loss": _number(result.loss),
        "lr": result.lrs[0],
        "grad_norm": _number(result.grad_norm),
        "samples": result.sums.samples,
    }
    if len(set(result.lrs)) > 1:
        line["lrs"] = list(result.lrs)
    if result.scale is not None:
        line["scale"] = result.scale
    if result.sums.replaced:
        line["replaced"] = result.sums.replaced
    if result.skipped:
        line["skipped"] = True
        return line
    for name, (total, count) in result.sums.metrics.items():
        line[name] = _number(total / count) if count else None
    return line


def validation_line(step: int, scores: Scores, train_loss: float | None) -> dict[str, Any]:
    """A validation's line; with the table, where the task gives one of at most 10,000 counts."""
    line: dict[str, Any] = {
        "step": step,
        "train_loss": _number(train_loss),
        "val_loss": _number(scores.loss),
        **{f"val_{name}": _number(value) for name, value in scores.metrics.items()},
        "val_samples": scores.samples,
    }
    if scores.table is not None and scores.table.numel() <= LARGEST_TABLE:
        line["val_table"] = scores.table.long().tolist()
    return line


def encode(line: dict[str, Any]) -> str:
    """The line as text, floats in their shortest exact form."""
    return _ENCODER.encode(line)


def order_of(line: dict[str, Any]) -> tuple[int, bool]:
    """What a line is: (step, whether it is a validation). Each occurs once."""
    return line["step"], "val_loss" in line


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics.jsonl; what a crash of the machine has torn, or made something
    else of, is left out."""
    return [line for line in read_records(path) if isinstance(line.get("step"), int)]


class Metrics:
    """What every rank keeps of the run's record, and rank 0 writes and shows.

    The values are reduced ones, so every rank could write the file; the lines since the last
    checkpoint are kept everywhere and travel in each save.
    """

    def __init__(self) -> None:
        self.recent: list[dict[str, Any]] = []
        """Lines since the last checkpoint, oldest first."""
        self._file: AppendFile | None = None
        self._mark: Mark | None = None
        self._lock = threading.Lock()  # the writer of a save makes the file durable
        self._unwritten: list[dict[str, Any]] = []
        self._written_s = -math.inf
        self._sinks: list[Sink] = []
        self._waited_s = 0.0
        self._guard: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        self._tell: Callable[[str], None] = print

    def open(self, path: Path, sinks: Sequence[Sink], *, kept: Sequence[dict[str, Any]],
             lacking: Sequence[dict[str, Any]],
             guard: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
             tell: Callable[[str], None] = print) -> None:
        """Write to `path` and show to `sinks` from now on (rank 0).

        Args:
            kept: the lines that the file is to hold now, in order.
            lacking: those of them that an earlier attempt may not have shown.
            guard: around a change of the folder; raises where it belongs to a newer attempt.
            tell: is told where somebody else has removed, replaced or cut the file.
        """
        self._guard, self._tell = guard, tell
        replace_text(path, "".join(encode(line) + "\n" for line in kept))
        self._file, self._sinks = AppendFile(path), list(sinks)
        last = max((line["step"] for line in kept), default=0)
        self._mark = Mark(path.with_name(LAST_STEP), last)
        for line in lacking:
            self._show(line, {})

    def rewind(self) -> None:
        """The run goes back to a checkpoint: `open` follows, on rank 0."""
        self.close()
        self._file, self._sinks = None, []
        self.recent.clear()

    @property
    def durable(self) -> bool:
        """Whether no line waits for space on this rank."""
        self._write()
        return self._file is None or self._file.flush()

    def sync(self) -> None:
        """Make the file durable.

        Raises:
            OSError: lines are left that can't be written.
        """
        self._write()
        if self._file is not None:
            self._mend()
            self._file.sync()

    def forget(self, step: int) -> None:
        """A checkpoint of this step is whole: the lines up to it need not travel any more."""
        if self.recent and self.recent[0]["step"] <= step:  # rank 0 says so at every step
            self.recent[:] = [line for line in self.recent if line["step"] > step]

    def step(self, result: StepResult, *, waited_s: float) -> dict[str, float]:
        """Record a training step; this rank's times in it, in seconds.

        Args:
            waited_s: seconds that this rank has waited for data so far.
        """
        data, self._waited_s = waited_s - self._waited_s, waited_s
        waits = result.communication_s
        compute = (result.seconds - data - result.held_s if result.device_s is None
                   else result.device_s) - waits
        times = {"step": result.seconds, "data": data, "compute": max(0.0, compute),
                 "communication": waits, "held": result.held_s}
        self._record(step_line(result), dict(times))  # a user's sink may move its own
        return times

    def validation(self, line: dict[str, Any]) -> None:
        """Record a validation."""
        self._record(line, {})

    def picture(self, image: Any, step: int) -> None:
        """Show a picture (HxWx3 uint8) of a validation, where a sink can."""
        for sink in self._sinks:
            if hasattr(sink, "picture"):
                sink.picture(image, step)

    def finish(self, settings: Mapping[str, Any], figures: Mapping[str, float], step: int) -> None:
        """Show the run's final figures beside its settings."""
        for sink in self._sinks:
            sink.finish(settings, figures, step)

    def close(self) -> None:
        """Close all sinks, then the file.

        Raises:
            OSError: lines of metrics.jsonl couldn't be written.
        """
        for sink in self._sinks:
            sink.close()
        self._write()
        mark, self._mark = self._mark, None
        if mark is not None:
            mark.close()
        if self._file is not None:
            self._file.close()

    def _record(self, line: dict[str, Any], timing: dict[str, float]) -> None:
        self.recent.append(line)
        # Shown first, written last: a line in the file has been shown, so what a later attempt
        # finds missing there is what it has to show again.
        self._show(line, timing)
        if self._mark is None:
            return
        with self._lock:
            self._unwritten.append(line)
        if time.monotonic() - self._written_s >= PAUSE_S:
            self._write()
        else:  # tells which step a process died in that could tell nothing
            self._mark.set(line["step"])

    def _write(self) -> None:
        with self._lock:
            lines, self._unwritten = self._unwritten, []
            if lines and self._file is not None:
                self._file.append("".join(encode(line) + "\n" for line in lines).encode())
                self._written_s = time.monotonic()
                with contextlib.suppress(OSError):  # a full disk: `sync` tries again
                    self._mend()

    def _mend(self) -> None:
        """Put the file back in place where somebody has removed or replaced it in mid-run."""
        if self._file is None or not self._file.damage:
            return
        with self._guard():
            damage = self._file.restore()
        if damage == "cut":
            self._tell("somebody has cut lines of metrics.jsonl off in mid-run; compare will find "
                       "that. The training itself goes on exactly. A copy of the file, put there "
                       "before a start, mends it")
        elif damage:
            self._tell(f"somebody has {damage} metrics.jsonl in mid-run; it is written again, "
                       "in full")

    def _show(self, line: dict[str, Any], timing: dict[str, float]) -> None:
        for sink in self._sinks:
            if "val_loss" in line:
                sink.validation(line)
            else:
                sink.step(line, timing)


def resumed_lines(
    on_disk: Sequence[dict[str, Any]], saved: Sequence[dict[str, Any]], *, step: int,
    validated: int,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:  # fmt: skip
    """The lines of a run that is resumed at `step`, each once, and those that have to be shown.

    Args:
        on_disk: what an earlier attempt has written.
        saved: what travelled in the checkpoint.
        validated: the last step whose validation is done; a later one will be done again.

    Returns:
        (the lines of the run so far, in order; those from the first that an earlier attempt may
        not have shown, or that it showed and will be made again).
    """
    made = {order_of(line): line for line in on_disk
            if line["step"] <= (validated if order_of(line)[1] else step)}
    merged = {**made, **{order_of(line): line for line in saved}}
    kept = [merged[key] for key in sorted(merged)]
    again = [line["step"] for line in on_disk if order_of(line) not in merged]
    first = min([line["step"] for line in kept if order_of(line) not in made]
                + [number for number in again if number <= step], default=step + 1)
    return kept, [line for line in kept if line["step"] >= first]


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
