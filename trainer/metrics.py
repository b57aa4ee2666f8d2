"""metrics.jsonl, the record of a run, and the sinks that show it: TensorBoard, the console."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from trainer.evaluate import Scores
from trainer.folder import METRICS, TENSORBOARD, replace_text
from trainer.log import Log
from trainer.step import StepResult

RESERVED = ("step", "epoch", "loss", "lr", "lrs", "grad_norm", "samples", "scale", "skipped")


class Sink(Protocol):
    """Something that shows the run; on rank 0 only."""

    def step(self, line: dict[str, Any], timing: dict[str, float]) -> None:
        """A training step: its line of metrics.jsonl, and this rank's times in seconds."""
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
    if result.skipped:
        line["skipped"] = True
        return line
    for name, (total, count) in result.sums.metrics.items():
        key = f"train_{name}" if name in RESERVED else name
        line[key] = _number(total / count) if count else None
    return line


def validation_line(step: int, scores: Scores, train_loss: float | None) -> dict[str, Any]:
    """A validation's line."""
    return {
        "step": step,
        "train_loss": _number(train_loss),
        "val_loss": _number(scores.loss),
        **{f"val_{name}": _number(value) for name, value in scores.metrics.items()},
        "val_samples": scores.samples,
    }


def encode(line: dict[str, Any]) -> str:
    """The line as text, floats in their shortest exact form."""
    return json.dumps(line, allow_nan=False)


def order_of(line: dict[str, Any]) -> tuple[int, bool]:
    """What a line is: (step, whether it is a validation). Each occurs once."""
    return line["step"], "val_loss" in line


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics.jsonl; a torn last line is left out."""
    lines = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines


class MetricsFile:
    """metrics.jsonl: each line appended in one write. A full disk delays lines, never drops one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: list[bytes] = []
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC,
                                   0o666)

    def append(self, text: str) -> None:
        """Append a line."""
        self._waiting.append(text.encode() + b"\n")
        self.flush()

    def flush(self) -> bool:
        """Write what waits; False while there is no space for all of it."""
        while self._waiting:
            line = self._waiting[0]
            try:
                written = os.write(self._descriptor, line)
            except OSError:
                return False
            if written < len(line):
                self._waiting[0] = line[written:]
            else:
                self._waiting.pop(0)
        return True

    def close(self) -> None:
        """Write what waits, durably, and close.

        Raises:
            OSError: lines are left that can't be written.
        """
        try:
            while self._waiting:
                written = os.write(self._descriptor, self._waiting[0])
                rest = self._waiting[0][written:]
                self._waiting[:1] = [rest] if rest else []
            os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)


class Metrics:
    """What every rank keeps of the run's record, and rank 0 writes and shows.

    The values are reduced ones, so every rank could write the file; the lines since the last
    checkpoint are kept everywhere and travel in each save.
    """

    def __init__(self) -> None:
        self.recent: list[dict[str, Any]] = []
        """Lines since the last checkpoint, oldest first."""
        self._file: MetricsFile | None = None
        self._sinks: list[Sink] = []
        self._waited_s = 0.0

    def open(self, file: MetricsFile, sinks: Sequence[Sink]) -> None:
        """Write to `file` and show to `sinks` from now on (rank 0)."""
        self._file, self._sinks = file, list(sinks)

    def step(self, result: StepResult, *, waited_s: float) -> None:
        """Record a training step.

        Args:
            waited_s: seconds that this rank has waited for data so far.
        """
        line = step_line(result)
        self._record(line)
        if self._sinks:
            data, self._waited_s = waited_s - self._waited_s, waited_s
            timing = {"step": result.seconds, "data": data, "compute": result.seconds - data}
            for sink in self._sinks:
                sink.step(line, timing)

    def validation(self, line: dict[str, Any]) -> None:
        """Record a validation."""
        self._record(line)
        for sink in self._sinks:
            sink.validation(line)

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
        if self._file is not None:
            self._file.close()

    def _record(self, line: dict[str, Any]) -> None:
        self.recent.append(line)
        if self._file is not None:
            self._file.append(encode(line))


def open_metrics(
    metrics: Metrics, path: Path, log: Log, *, resumed: Mapping[str, Any] | None, step: int,
    every: int, total: int, images: Any,
) -> None:  # fmt: skip
    """Open metrics.jsonl, cut to the step that is resumed and completed, and the sinks.

    Args:
        resumed: the facts of the checkpoint, with the lines that travelled in it; None for a
            fresh start.
        images: shown in TensorBoard once.
    """
    file = path / METRICS
    saved = [] if resumed is None else resumed["lines"]
    lines = lines_to_keep(read_metrics(file), saved, step)
    replace_text(file, "".join(encode(line) + "\n" for line in lines))
    bar = sys.stderr.isatty()
    metrics.open(MetricsFile(file), [
        TensorBoard(path / TENSORBOARD, every=every or total, purge_step=step + 1, images=images),
        Console(log, total=total, every=every or total, start=step, bar=bar),
    ])


def lines_to_keep(
    on_disk: Sequence[dict[str, Any]], saved: Sequence[dict[str, Any]], step: int
) -> list[dict[str, Any]]:
    """The lines of a run that is resumed at `step`: those on disk and those that travelled in the
    checkpoint, each once, none from beyond it."""
    merged = {order_of(line): line for line in on_disk if line["step"] <= step}
    merged.update({order_of(line): line for line in saved})
    return [merged[key] for key in sorted(merged)]


class TensorBoard:
    """Scalars at an interval, validations, and once: sample images, hyperparameters.

    Args:
        purge_step: first step of this attempt; what an earlier one showed from there is dropped.
    """

    def __init__(
        self, folder: Path, *, every: int, purge_step: int, images: Any = None
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(folder, purge_step=purge_step)
        self._every = every
        if images is not None and purge_step <= 1:
            self._writer.add_image("samples", _grid(images), 0)

    def step(self, line: dict[str, Any], timing: dict[str, float]) -> None:
        step = line["step"]
        if step % self._every and step != 1:
            return
        for tag, value in train_scalars(line).items():
            self._writer.add_scalar(tag, value, step)
        self._writer.add_scalar("speed/samples_per_s", line["samples"] / timing["step"], step)
        for part in ("data", "compute"):
            self._writer.add_scalar(f"speed/{part}_s", timing[part], step)

    def validation(self, line: dict[str, Any]) -> None:
        for tag, value in validation_scalars(line).items():
            self._writer.add_scalar(tag, value, line["step"])

    def finish(self, settings: Mapping[str, Any], figures: Mapping[str, float], step: int) -> None:
        from torch.utils.tensorboard.summary import hparams

        plain = {k: v if isinstance(v, bool | int | float | str) else str(v)
                 for k, v in settings.items() if v is not None}
        # add_hparams would open a second event file in a folder of its own.
        for summary in hparams(plain, dict(figures)):
            self._writer.file_writer.add_summary(summary)
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


def train_scalars(line: dict[str, Any]) -> dict[str, float]:
    """Tag → value of what TensorBoard shows of a training step's line."""
    skip = ("step", "epoch", "lr", "lrs", "grad_norm", "samples", "scale", "skipped")
    tags = {f"train/{k}": v for k, v in line.items() if k not in skip}
    tags |= {"optimizer/lr": line["lr"], "optimizer/grad_norm": line["grad_norm"]}
    if "scale" in line:
        tags["optimizer/loss_scale"] = line["scale"]
    return {k: v for k, v in tags.items() if v is not None}


def validation_scalars(line: dict[str, Any]) -> dict[str, float]:
    """Tag → value of what TensorBoard shows of a validation's line."""
    tags = {f"validation/{k.removeprefix('val_')}": v for k, v in line.items()
            if k.startswith("val_") and k != "val_samples"}
    tags["validation/train_loss"] = line["train_loss"]
    return {k: v for k, v in tags.items() if v is not None}


class Console:
    """The run for people: a progress bar on a terminal, plain lines elsewhere."""

    def __init__(
        self, log: Log, *, total: int, every: int, start: int, bar: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._log, self._total, self._every, self._clock = log, total, every, clock
        self._began, self._start, self._bar = clock(), start, None
        if bar:
            from tqdm import tqdm

            self._bar = tqdm(total=total, initial=start, unit="step", dynamic_ncols=True)
            log.echo = tqdm.write

    def step(self, line: dict[str, Any], timing: dict[str, float]) -> None:
        step = line["step"]
        if self._bar is not None:
            self._bar.update(1)
        if step % self._every and step != self._total:
            return
        text = _columns(line)
        if self._bar is not None:
            self._bar.set_postfix_str(text)
        else:
            left = (self._clock() - self._began) / (step - self._start) * (self._total - step)
            self._log.info(f"step {step:>{len(str(self._total))}}/{self._total}  {text}  "
                           f"{line['samples'] / timing['step']:.0f} samples/s  ETA {_span(left)}")

    def validation(self, line: dict[str, Any]) -> None:
        shown = "  ".join(f"{k} {v:.4f}" for k, v in line.items() if isinstance(v, float))
        self._log.info(f"step {line['step']:>{len(str(self._total))}}/{self._total}  {shown}")

    def finish(self, settings: Mapping[str, Any], figures: Mapping[str, float], step: int) -> None:
        pass  # the closing lines say it

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._log.echo = None


def _columns(line: dict[str, Any]) -> str:
    parts = ["loss skipped" if line["loss"] is None else f"loss {line['loss']:.4f}"]
    parts += [f"{k} {v:.3f}" for k, v in line.items() if k not in RESERVED and v is not None][:2]
    norm = line["grad_norm"]
    parts.append(f"lr {line['lr']:.2e}  norm {'-' if norm is None else f'{norm:.2f}'}")
    return "  ".join(parts)


def _span(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _grid(images: Any, columns: int = 8) -> Any:
    """uint8 images N×C×H×W as one C×(rows·H)×(columns·W) array."""
    array = np.asarray(images)
    count, channels, height, width = array.shape
    rows = -(-count // columns)
    grid = np.zeros((channels, rows * height, columns * width), dtype=np.uint8)
    for i, image in enumerate(array):
        y, x = i // columns * height, i % columns * width
        grid[:, y : y + height, x : x + width] = image
    return grid
