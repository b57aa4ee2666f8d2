"""What TensorBoard shows of a run."""

from __future__ import annotations

import contextlib
import os
import platform
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary

from trainer import drawing
from trainer.append import AppendFile
from trainer.log import Log, writable

LAYOUT = {
    "the run": {
        "loss": ["Multiline", ["train/loss", "validation/train_loss", "validation/loss"]],
        "accuracy": ["Multiline", ["train/accuracy", "validation/accuracy"]],
        "learning rate": ["Multiline", ["optimizer/lr.*"]],
        "gradient norm": ["Multiline", ["optimizer/grad_norm"]],
        "samples per second": ["Multiline", ["speed/samples_per_s"]],
        "restarts": ["Multiline", ["run/restarts"]],
    }
}
"""The charts of the page "custom scalars"."""

BINS = 64
"""Of a histogram: a number that numpy chose could be any, for a tensor with one value far out."""

Tensors = Callable[[], Iterable[tuple[str, Any]]]


class TensorBoard:
    """Scalars at an interval, validations with their histogram of gradient norms and confusion
    matrix, and once: layout, sample images, card; at the end hyperparameters and final figures.

    Written by this thread, record by record: torch's SummaryWriter has a thread and a buffer, which
    a forked loader worker would inherit, and it dies of a full disk.

    Args:
        every: steps between scalars.
        first: the first step that is shown from now on; what an earlier attempt showed from there
            is dropped. 0 at the beginning of a run.
        images: some samples as one uint8 image, C×H×W.
        card: lines about the run, shown at its beginning.
        restarts: how often the run has been started again.
        class_names: of the confusion matrix.
        norms: gradient norms since the last validation that an earlier attempt has shown.
        histograms: steps between those of `tensors`, 0 for none.
        tensors: names and values to make histograms of.
    """

    def __init__(
        self, folder: Path, *, every: int, first: int, images: Any = None,
        card: Sequence[str] = (), restarts: int = 0, class_names: Sequence[str] = (),
        norms: Iterable[float] = (), histograms: int = 0, tensors: Tensors = lambda: (),
        clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard import summary

        self._summary, self._every, self._clock = summary, every, clock
        self._names, self._norms = class_names, list(norms)
        self._histograms, self._tensors = histograms, tensors
        folder.mkdir(exist_ok=True)
        new = not any(folder.iterdir())  # a reader doesn't drop texts, so they are written once
        # Event files are read in the order of their names.
        name = f"events.out.tfevents.{clock():017.6f}.{platform.node()}.{os.getpid()}"
        self._file = _Records(AppendFile(folder / name))
        self._writer = RecordWriter(self._file)
        self._event(file_version="brain.Event:2")
        self._event(session_log=SessionLog(status=SessionLog.START), step=first)
        if new:
            self._event(summary=summary.custom_scalars(LAYOUT))
            self._event(summary=summary.text("run", "    " + "\n    ".join(card)), step=0)
        if images is not None:
            self._event(summary=summary.image("samples", images, dataformats="CHW"), step=0)
        if restarts:
            self._scalars({"run/restarts": restarts}, first)

    def step(self, line: dict[str, Any], timing: dict[str, float]) -> None:
        step = line["step"]
        if line["grad_norm"] is not None:
            self._norms.append(line["grad_norm"])
        if self._histograms and timing and step % self._histograms == 0:
            for tag, values in self._tensors():
                self._histogram(tag, values, step)
        if step % self._every and step != 1:
            return
        tags = train_scalars(line)
        if timing:
            tags["speed/samples_per_s"] = line["samples"] / timing["step"]
            tags |= {f"speed/{part}_s": timing[part] for part in ("data", "compute")}
        self._scalars(tags, step)

    def validation(self, line: dict[str, Any]) -> None:
        step, table = line["step"], line.get("val_table")
        self._scalars(validation_scalars(line), step)
        norms, self._norms = self._norms, []
        if norms:
            self._histogram("optimizer/grad_norms", np.asarray(norms), step)
        if table is not None and drawing.is_matrix(table):
            self._image("confusion", drawing.matrix(table, self._names), step)

    def picture(self, image: Any, step: int) -> None:
        self._image("validation", image, step)

    def graph(self, definition: Any) -> None:
        """Show a graph of the model (a GraphDef)."""
        self._event(graph_def=definition.SerializeToString())

    def finish(self, settings: Mapping[str, Any], figures: Mapping[str, float], step: int) -> None:
        plain = {k: v if isinstance(v, bool | int | float) else writable(str(v))
                 for k, v in settings.items() if v is not None}
        for summary in self._summary.hparams(plain, dict(figures)):
            self._event(summary=summary)
        self._scalars(figures, step)

    def close(self) -> None:
        self._file.close()

    def _scalars(self, tags: Mapping[str, float], step: int) -> None:
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in tags.items()]
        self._event(summary=Summary(value=values), step=step)

    def _histogram(self, tag: str, values: Any, step: int) -> None:
        if values.size and np.isfinite(values).all():
            self._event(summary=self._summary.histogram(tag, values, BINS), step=step)

    def _image(self, tag: str, image: Any, step: int) -> None:
        self._event(summary=self._summary.image(tag, image, dataformats="HWC"), step=step)

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
    tags |= {f"optimizer/lr_{number}": rate for number, rate in enumerate(line.get("lrs", ()))}
    if "scale" in line:
        tags["optimizer/loss_scale"] = line["scale"]
    return {k: v for k, v in tags.items() if v is not None}


def validation_scalars(line: dict[str, Any]) -> dict[str, float]:
    """Tag → value of what TensorBoard shows of a validation's line."""
    tags = {f"validation/{k.removeprefix('val_')}": v for k, v in line.items()
            if k.startswith("val_") and k not in ("val_samples", "val_table")}
    tags["validation/train_loss"] = line["train_loss"]
    return {k: v for k, v in tags.items() if v is not None}


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


def grid(images: Any, columns: int = 8) -> Any:
    """uint8 images N×C×H×W as one C×(rows·H)×(columns·W) array."""
    array = np.asarray(images)
    count, channels, height, width = array.shape
    rows = -(-count // columns)
    grid = np.zeros((channels, rows * height, columns * width), dtype=np.uint8)
    for i, image in enumerate(array):
        y, x = i // columns * height, i % columns * width
        grid[:, y : y + height, x : x + width] = image
    return grid
