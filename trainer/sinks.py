"""Where a run can be seen: TensorBoard, and the console."""

from __future__ import annotations

import contextlib
import os
import platform
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog

from trainer.append import AppendFile
from trainer.log import Log
from trainer.metrics import RESERVED


class TensorBoard:
    """Scalars at an interval, validations, and once: sample images, hyperparameters.

    Written by this thread, record by record: torch's SummaryWriter has a thread and a buffer, which
    a forked loader worker would inherit, and it dies of a full disk.

    Args:
        purge_step: first step of this attempt; what an earlier one showed from there is dropped.
    """

    def __init__(
        self, folder: Path, *, every: int, purge_step: int, images: Any = None,
        clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard import summary

        self._summary, self._every, self._clock = summary, every, clock
        folder.mkdir(exist_ok=True)
        # Event files are read in the order of their names.
        name = f"events.out.tfevents.{clock():017.6f}.{platform.node()}.{os.getpid()}"
        self._file = _Records(AppendFile(folder / name))
        self._writer = RecordWriter(self._file)
        self._event(file_version="brain.Event:2")
        self._event(session_log=SessionLog(status=SessionLog.START), step=purge_step)
        if images is not None:
            self._event(summary=summary.image("samples", _grid(images), dataformats="CHW"), step=0)

    def step(self, line: dict[str, Any], timing: dict[str, float]) -> None:
        step = line["step"]
        if step % self._every and step != 1:
            return
        for tag, value in train_scalars(line).items():
            self._scalar(tag, value, step)
        if timing:
            self._scalar("speed/samples_per_s", line["samples"] / timing["step"], step)
            for part in ("data", "compute"):
                self._scalar(f"speed/{part}_s", timing[part], step)

    def validation(self, line: dict[str, Any]) -> None:
        for tag, value in validation_scalars(line).items():
            self._scalar(tag, value, line["step"])

    def picture(self, image: Any, step: int) -> None:
        shown = self._summary.image("validation", image, dataformats="HWC")
        self._event(summary=shown, step=step)

    def finish(self, settings: Mapping[str, Any], figures: Mapping[str, float], step: int) -> None:
        plain = {k: v if isinstance(v, bool | int | float | str) else str(v)
                 for k, v in settings.items() if v is not None}
        for summary in self._summary.hparams(plain, dict(figures)):
            self._event(summary=summary)
        for name, value in figures.items():
            self._scalar(name, value, step)

    def close(self) -> None:
        self._file.close()

    def _scalar(self, tag: str, value: float, step: int) -> None:
        self._event(summary=self._summary.scalar(tag, value), step=step)

    def _event(self, **fields: Any) -> None:
        event = Event(wall_time=self._clock(), **fields)
        self._writer.write(event.SerializeToString())
        self._file.flush()


class _Records:
    """The file that TensorBoard's record writer sees: one record, one append."""

    def __init__(self, file: AppendFile) -> None:
        self._file, self._parts = file, b""

    def write(self, data: bytes) -> None:
        self._parts += data

    def flush(self) -> None:
        record, self._parts = self._parts, b""
        self._file.append(record)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a later attempt completes it from metrics.jsonl
            self._file.close()


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
            if k.startswith("val_") and k not in ("val_samples", "val_table")}
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
        if not timing:
            return  # made by an earlier attempt
        if self._bar is not None:
            self._bar.update(1)
        if step % self._every and step != self._total:
            return
        text = _columns(line)
        if self._bar is not None:
            self._bar.set_postfix_str(text)
        else:
            done = max(1, step - self._start)
            left = (self._clock() - self._began) / done * (self._total - step)
            self._log.info(f"step {step:>{len(str(self._total))}}/{self._total}  {text}  "
                           f"{line['samples'] / timing['step']:.0f} samples/s  ETA {_span(left)}")

    def validation(self, line: dict[str, Any]) -> None:
        if line["step"] < self._start:
            return
        shown = "  ".join(f"{k} {v:.4f}" for k, v in line.items() if isinstance(v, float))
        self._log.info(f"step {line['step']:>{len(str(self._total))}}/{self._total}  {shown}")

    def finish(self, settings: Mapping[str, Any], figures: Mapping[str, float], step: int) -> None:
        pass  # the closing lines say it

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._log.echo = None


class Own:
    """A sink of the user's. What it raises costs a warning, and that sink: nothing else depends
    on it. It gets copies of the lines.

    Args:
        make: called with the run's folder; returns a `Sink`.
    """

    def __init__(self, name: str, make: Callable[[Path], Any], folder: Path, log: Log) -> None:
        self._name, self._log, self._sink = name, log, None
        self._sink = self._try(make, folder)

    def step(self, line: dict[str, Any], timing: dict[str, float]) -> None:
        self._call("step", dict(line), timing)

    def validation(self, line: dict[str, Any]) -> None:
        self._call("validation", dict(line))

    def picture(self, image: Any, step: int) -> None:
        if hasattr(self._sink, "picture"):
            self._call("picture", image, step)

    def finish(self, settings: Mapping[str, Any], figures: Mapping[str, float], step: int) -> None:
        self._call("finish", settings, figures, step)

    def close(self) -> None:
        self._call("close")

    def _call(self, method: str, *arguments: Any) -> None:
        if self._sink is not None:
            self._try(lambda: getattr(self._sink, method)(*arguments))

    def _try(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as error:
            self._sink = None
            self._log.warning(f"--log.sinks {self._name} has failed, and is left out from here:\n"
                              + "".join(traceback.format_exception(error)).rstrip())
            return None


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
