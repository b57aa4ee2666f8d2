"""metrics.jsonl, the record of a run: its lines, the file, and the sinks that show them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.storage.jsonl import AppendFile, FileMark, continue_file, read_records
from trainer.storage.records import (
    Kind,
    is_count,
    is_flag,
    is_number,
    is_text,
    list_of,
    optional,
    table_of,
)

if TYPE_CHECKING:
    from trainer.run.evaluate import Scores
    from trainer.step import StepResult

RESERVED = ("step", "epoch", "turn", "loss", "lr", "lrs", "grad_norm", "samples", "scale",
            "skipped", "replaced")
"""Keys of a training line that are not metrics of the task."""


def _shape(value: Any) -> tuple[int, ...] | None:
    """Shape of numbers in nested lists, as `Tensor.tolist` makes them; None for other values."""
    if type(value) is not list:
        return () if is_number(value) else None
    inner = set(map(_shape, value))
    return (len(value), *found) if len(inner) == 1 and (found := inner.pop()) is not None else None


def _rates(value: Any) -> bool:
    """A rate for each parameter group, or for each of several optimizers one or a list of them."""
    in_list = list_of(is_number)
    return in_list(value) or table_of(lambda rate: is_number(rate) or in_list(rate))(value)


METRIC_LINE = Kind(
    needed={"step": is_count},
    known={"epoch": is_count, "samples": is_count, "replaced": is_count, "skipped": is_flag,
           "lr": is_number, "lrs": _rates, "turn": is_text, "scale": is_number,
           "val_table": lambda value: bool(_shape(value))},
    others=optional(is_number))
"""A line of metrics.jsonl."""
LARGEST_TABLE = 10_000
"""Largest number of counts in a recorded table: a confusion matrix of 100 classes."""
MOST_PENDING = 4096
"""Lines that every rank keeps, at most, while rank 0 can write the file."""

LOOK_EVERY_S = 1.0
"""Interval of looking whether another process has damaged the file."""

_ENCODER = json.JSONEncoder(allow_nan=False)


class Sink:
    """Shows the metric lines of the run; on rank 0 only."""

    def step(self, line: dict[str, Any], timing: dict[str, float]) -> None:
        """Show a training step, with this rank's seconds (empty: of an earlier attempt)."""

    def validation(self, line: dict[str, Any]) -> None:
        """Show a validation."""

    def picture(self, image: Any, step: int) -> None:
        """Show a picture (HxWx3 uint8) of a validation."""

    def text(self, text: str, step: int) -> None:
        """Show a text of a validation."""

    def finish(self, settings: Mapping[str, Any], figures: Mapping[str, float], step: int) -> None:
        """Show the settings and the final metrics of a complete run."""

    def close(self) -> None:
        """Called at the end of an attempt."""


def step_line(result: StepResult) -> dict[str, Any]:
    """The line of a step. It depends on the run only: it contains no times."""
    first = result.optimizers.index(result.turn) if result.turn else 0
    line: dict[str, Any] = {
        "step": result.step, "epoch": result.epoch,
        **({"turn": result.turn} if result.turn else {}),
        "loss": _number(result.loss), "lr": result.lrs[first],
        "grad_norm": _number(result.grad_norm), "samples": result.sums.samples,
    }  # fmt: skip
    if result.optimizers:
        line["lrs"] = _named_rates(result)
    elif len(set(result.lrs)) > 1:
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


def _named_rates(result: StepResult) -> dict[str, float | list[float]]:
    """Rate of each of several optimizers; a list if its parameter groups have several rates."""
    rates = {name: [rate for owner, rate in zip(result.optimizers, result.lrs, strict=True)
                    if owner == name] for name in result.optimizers}
    return {name: found[0] if len(set(found)) == 1 else found for name, found in rates.items()}


def validation_line(
    step: int, scores: Mapping[str, Scores], train_loss: float | None
) -> dict[str, Any]:
    """The line of a validation, with the table of the task if it is not too large. The first of the
    `scores` is the main set's; the keys of the others, "validation:NAME", begin with val_NAME_."""
    main = next(iter(scores.values()))
    line: dict[str, Any] = {"step": step, "train_loss": _number(train_loss)}
    for prefix, found in (("val_", main), *(
            (f"val_{split.partition(':')[2]}_", found) for split, found in scores.items()
            if ":" in split)):
        line |= {prefix + "loss": _number(found.loss),
                 **{prefix + name: _number(value) for name, value in found.metrics.items()},
                 prefix + "samples": found.samples}
    if main.table is not None and main.table.dim() and 0 < main.table.numel() <= LARGEST_TABLE:
        line["val_table"] = main.table.long().tolist()
    return line


def primary_metric(names: Iterable[str]) -> str | None:
    """The metric to show next to the loss: the accuracy, or the first one; None without metrics."""
    metrics = [name for name in names if name not in RESERVED]
    return "accuracy" if "accuracy" in metrics else next(iter(metrics), None)


def encode_line(line: dict[str, Any]) -> bytes:
    """A line as JSON, with floats in their shortest exact form."""
    return _ENCODER.encode(line).encode() + b"\n"


def line_key(line: dict[str, Any]) -> tuple[int, bool]:
    """The key of a line, in order of the file: (step, whether it is a validation)."""
    return line["step"], "val_loss" in line


def read_metrics(path: Path, offset: int = 0) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl from an offset on, without those that a crash has damaged."""
    return read_records(path, offset, kind=METRIC_LINE)


@dataclass(frozen=True, kw_only=True)
class ResumedRecord:
    """How metrics.jsonl continues from a checkpoint: it is kept up to `begin`; the lines `kept`
    follow, each once, of which an earlier attempt may not have shown the last ones, `unshown`."""

    begin: FileMark
    kept: Sequence[dict[str, Any]]
    unshown: Sequence[dict[str, Any]]

    @property
    def data(self) -> bytes:
        """Content of the file after `begin`."""
        return b"".join(map(encode_line, self.kept))


class Metrics:
    """Record of a run. Rank 0 writes it to metrics.jsonl and shows it in the sinks.

    The values are reduced, so all ranks have the same lines. Every rank keeps the last ones until
    rank 0 reports that they are durable; a save contains them and their position in the file.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[dict[str, Any], bytes]] = []
        self._begin = FileMark()  # position of the first pending line in the file
        self._sync_at = MOST_PENDING
        self._file: AppendFile | None = None
        self._sinks: list[Sink] = []
        self._waited_s = self._look_at_s = 0.0

    def continue_at(self, end: FileMark) -> None:
        """Discard the pending lines, at a start or after a rollback; the next one begins at `end`.
        `open` follows on the ranks that write a run folder."""
        self._pending, self._begin = [], end

    def open(self, path: Path, record: ResumedRecord, *,
             guard: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
             warn: Callable[[str], None] = print) -> None:
        """Write to `path` from now on. `guard`: context for changes of the folder, which raises if
        a newer attempt owns it; `warn` is called if another process has damaged the file."""
        self._guard, self._warn = guard, warn
        continue_file(path, record.begin.offset, record.data)
        self._file = AppendFile(path)

    def show_in(self, sinks: Sequence[Sink], unshown: Sequence[dict[str, Any]] = ()) -> None:
        """Show `unshown` and all further lines in these sinks."""
        self._sinks = list(sinks)
        for line in unshown:
            self._show(line, {})

    def state_dict(self) -> dict[str, Any]:
        """Entries of state.json: the pending lines, and where they begin in the file."""
        return {"lines": [line for line, _ in self._pending],
                "record": dataclasses.asdict(self._begin)}

    def flush(self) -> bool:
        """Returns whether all lines are in the file (false if the disk is full)."""
        return self._file is None or self._file.flush()

    def sync(self) -> None:
        """Write all lines and fsync, in any thread. Raises OSError if some can't be written."""
        if self._file is not None:
            self._repair()
            self._file.sync()

    def sync_if_long(self) -> bool:
        """Sync the file if there are too many pending lines. Returns whether they are durable now,
        so that every rank may drop them."""
        if self._file is None or len(self._pending) < self._sync_at:
            return False
        try:
            self.sync()
        except OSError:  # the disk is full: try again later
            self._sync_at = len(self._pending) + MOST_PENDING
            return False
        return True

    def drop(self, step: int) -> None:
        """Drop the pending lines up to this step: they are durable in the file of rank 0."""
        kept = [pair for pair in self._pending if pair[0]["step"] > step]
        dropped = self._pending[: len(self._pending) - len(kept)]
        self._begin = self._begin.after(b"".join(data for _, data in dropped))
        self._pending, self._sync_at = kept, MOST_PENDING

    def step(self, result: StepResult, *, waited_s: float) -> dict[str, float]:
        """Record a training step; returns this rank's seconds in it. `waited_s`: those of waiting
        for data in all steps so far."""
        data, self._waited_s = waited_s - self._waited_s, waited_s
        waits = result.communication_s
        compute = (result.seconds - data if result.device_s is None
                   else result.device_s) - waits
        times = {"step": result.seconds, "data": data, "compute": max(0.0, compute),
                 "communication": waits}
        self._record(step_line(result), dict(times))  # a copy: a sink of the user may change it
        return times

    def validation(self, line: dict[str, Any]) -> None:
        self._record(line, {})

    def exhibit(self, made: Any, step: int) -> None:
        """Show a picture or a text of a validation."""
        for sink in self._sinks:
            if isinstance(made, str):
                sink.text(made, step)
            else:
                sink.picture(made, step)

    def finish(self, settings: Mapping[str, Any], figures: Mapping[str, float], step: int) -> None:
        for sink in self._sinks:
            sink.finish(settings, figures, step)

    def close(self) -> None:
        """Close all sinks, then the file. Raises OSError if lines could not be written."""
        sinks, self._sinks = self._sinks, []
        for sink in sinks:
            sink.close()
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _record(self, line: dict[str, Any], timing: dict[str, float]) -> None:
        data = encode_line(line)
        self._pending.append((line, data))
        self._show(line, timing)  # before writing: a later attempt shows what the file lacks
        if self._file is not None:
            self._file.append(data)
            if (now_s := time.monotonic()) >= self._look_at_s:
                self._look_at_s = now_s + LOOK_EVERY_S
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


def resumed_lines(begin: FileMark, on_disk: Sequence[dict[str, Any]],
                  saved: Sequence[dict[str, Any]], *, step: int, validated: int) -> ResumedRecord:
    """Merge the lines `on_disk` after `begin` with those that the checkpoint of `step` has saved.
    Validations after the step `validated` are repeated."""
    written = {line_key(line): line for line in on_disk
               if line["step"] <= (validated if line_key(line)[1] else step)}
    merged = {**written, **{line_key(line): line for line in saved}}
    kept = [merged[key] for key in sorted(merged)]
    repeated = [line["step"] for line in on_disk if line_key(line) not in merged]
    first = min([line["step"] for line in kept if line_key(line) not in written]
                + [number for number in repeated if number <= step], default=step + 1)
    return ResumedRecord(begin=begin, kept=kept,
                         unshown=[line for line in kept if line["step"] >= first])


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
