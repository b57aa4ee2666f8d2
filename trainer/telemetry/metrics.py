"""metrics.jsonl, the record of a run: its lines, the file, and the sinks that show them."""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trainer.storage.files import replace_text
from trainer.storage.jsonl import AppendFile, MappedCounter, read_records
from trainer.storage.layout import LAST_STEP

if TYPE_CHECKING:
    from trainer.run.evaluate import Scores
    from trainer.step import StepResult

RESERVED = ("step", "epoch", "loss", "lr", "lrs", "grad_norm", "samples", "scale", "skipped",
            "replaced")
"""Keys of a training line that are not metrics of the task."""

LARGEST_TABLE = 10_000
"""Largest number of counts in a recorded table: a confusion matrix of 100 classes."""
PAUSE_S = 0.5
"""Smallest interval between writes to the file, in seconds. If a process dies, its unwritten lines
are of steps that are repeated, or the checkpoint of the survivors has them."""

_ENCODER = json.JSONEncoder(allow_nan=False)


class Sink(Protocol):
    """Receiver of the metric lines that shows the run. On rank 0 only."""

    def step(self, line: dict[str, Any], timing: dict[str, float]) -> None:
        """Show a training step.

        Args:
            line: of metrics.jsonl.
            timing: seconds of this rank; empty for a step of an earlier attempt.
        """
        ...

    def validation(self, line: dict[str, Any]) -> None:
        """Show a validation, by its line of metrics.jsonl."""
        ...

    def finish(self, settings: Mapping[str, Any], figures: Mapping[str, float], step: int) -> None:
        """Show the settings and the final metrics of a complete run."""
        ...

    def close(self) -> None:
        """Close the sink at the end of an attempt."""
        ...


def step_line(result: StepResult) -> dict[str, Any]:
    """Return the line of a step. It depends on the run only: it contains no times."""
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
    """Return the line of a validation, with the table of the task if it is not too large."""
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


def encode_line(line: dict[str, Any]) -> str:
    """Encode a line as JSON, with floats in their shortest exact form."""
    return _ENCODER.encode(line)


def line_key(line: dict[str, Any]) -> tuple[int, bool]:
    """Return the unique key of a line, in order of the file: (step, whether it is a validation)."""
    return line["step"], "val_loss" in line


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics.jsonl without those that a crash has damaged."""
    return [line for line in read_records(path) if isinstance(line.get("step"), int)]


class Metrics:
    """Record of a run. Rank 0 writes it to metrics.jsonl and shows it in the sinks.

    The values are reduced over the ranks, so every rank has the same lines. Every rank keeps the
    lines since the last checkpoint, and each save contains them.
    """

    def __init__(self) -> None:
        self.recent: list[dict[str, Any]] = []
        """Lines since the last checkpoint, oldest first."""
        self._file: AppendFile | None = None
        self._mark: MappedCounter | None = None
        self._lock = threading.Lock()  # the thread that writes a save calls `sync`
        self._unwritten: list[dict[str, Any]] = []
        self._written_s = -math.inf
        self._sinks: list[Sink] = []
        self._waited_s = 0.0
        self._guard: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        self._warn: Callable[[str], None] = print

    def open(self, path: Path, sinks: Sequence[Sink], *, kept: Sequence[dict[str, Any]],
             unshown: Sequence[dict[str, Any]],
             guard: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
             warn: Callable[[str], None] = print) -> None:
        """Write to `path` and show in `sinks` from now on. On rank 0 only.

        Args:
            kept: new content of the file, in order.
            unshown: the lines of `kept` that an earlier attempt may not have shown.
            guard: context for changes of the folder; raises if a newer attempt owns it.
            warn: called with a warning if another process has removed, replaced or cut the file.
        """
        self._guard, self._warn = guard, warn
        replace_text(path, "".join(encode_line(line) + "\n" for line in kept))
        self._file, self._sinks = AppendFile(path), list(sinks)
        last = max((line["step"] for line in kept), default=0)
        self._mark = MappedCounter(path.with_name(LAST_STEP), last)
        for line in unshown:
            self._show(line, {})

    def rewind(self) -> None:
        """Discard the lines for a rollback to a checkpoint. `open` must follow, on rank 0."""
        self.close()
        self._file, self._sinks = None, []
        self.recent.clear()

    @property
    def durable(self) -> bool:
        """Whether all lines of this rank are in the file (false if the disk is full)."""
        self._write()
        return self._file is None or self._file.flush()

    def sync(self) -> None:
        """Write all lines and fsync the file.

        Raises:
            OSError: some lines cannot be written.
        """
        self._write()
        if self._file is not None:
            self._repair()
            self._file.sync()

    def drop_saved(self, step: int) -> None:
        """Drop the recent lines up to this step: a complete checkpoint contains them."""
        if self.recent and self.recent[0]["step"] <= step:  # called at every step
            self.recent[:] = [line for line in self.recent if line["step"] > step]

    def step(self, result: StepResult, *, waited_s: float) -> dict[str, float]:
        """Record a training step. Return the times of this rank in the step, in seconds.

        Args:
            waited_s: seconds that this rank has waited for data so far, over all steps.
        """
        data, self._waited_s = waited_s - self._waited_s, waited_s
        waits = result.communication_s
        compute = (result.seconds - data - result.save_stall_s if result.device_s is None
                   else result.device_s) - waits
        times = {"step": result.seconds, "data": data, "compute": max(0.0, compute),
                 "communication": waits, "held": result.save_stall_s}
        self._record(step_line(result), dict(times))  # a copy: a sink of the user may change it
        return times

    def validation(self, line: dict[str, Any]) -> None:
        """Record a validation."""
        self._record(line, {})

    def picture(self, image: Any, step: int) -> None:
        """Show a picture (H×W×3, uint8) of a validation in the sinks that support pictures."""
        for sink in self._sinks:
            if hasattr(sink, "picture"):
                sink.picture(image, step)

    def finish(self, settings: Mapping[str, Any], figures: Mapping[str, float], step: int) -> None:
        """Show the final metrics of the run with its settings."""
        for sink in self._sinks:
            sink.finish(settings, figures, step)

    def close(self) -> None:
        """Close all sinks, then the file.

        Raises:
            OSError: lines of metrics.jsonl could not be written.
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
        # Show before writing: then every line in the file has been shown, and a later attempt shows
        # the lines that are missing in the file.
        self._show(line, timing)
        if self._mark is None:
            return
        with self._lock:
            self._unwritten.append(line)
        if time.monotonic() - self._written_s >= PAUSE_S:
            self._write()
        else:  # lets the next attempt know the last step of a process that was killed
            self._mark.set(line["step"])

    def _write(self) -> None:
        with self._lock:
            lines, self._unwritten = self._unwritten, []
            if lines and self._file is not None:
                self._file.append("".join(encode_line(line) + "\n" for line in lines).encode())
                self._written_s = time.monotonic()
                with contextlib.suppress(OSError):  # a full disk: `sync` tries again
                    self._repair()

    def _repair(self) -> None:
        """Restore the file if another process has removed, replaced or cut it during the run."""
        if self._file is None or not self._file.damage:
            return
        with self._guard():
            damage = self._file.restore()
        if damage == "cut":
            self._warn("lines of metrics.jsonl were cut off during the run, and compare will "
                       "report them as missing. The training itself is not affected. To repair "
                       "the record, put a copy of the file there before the next start")
        elif damage:
            self._warn(f"another process has {damage} metrics.jsonl during the run; all of it is "
                       "written again")

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
    """Merge the lines of a run that is resumed at `step`.

    Args:
        on_disk: lines that earlier attempts have written.
        saved: lines in the checkpoint.
        validated: the last step whose validation is done. Later validations are repeated.

    Returns:
        (kept, unshown). kept: the lines of the run so far, in order, each once. unshown: the last
        of these, from the first one that an earlier attempt may not have shown, or that it showed
        and that is repeated.
    """
    written = {line_key(line): line for line in on_disk
               if line["step"] <= (validated if line_key(line)[1] else step)}
    merged = {**written, **{line_key(line): line for line in saved}}
    kept = [merged[key] for key in sorted(merged)]
    repeated = [line["step"] for line in on_disk if line_key(line) not in merged]
    first = min([line["step"] for line in kept if line_key(line) not in written]
                + [number for number in repeated if number <= step], default=step + 1)
    return kept, [line for line in kept if line["step"] >= first]


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
