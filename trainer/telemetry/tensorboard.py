"""Sinks: TensorBoard, and sinks written by the user."""

from __future__ import annotations

import contextlib
import io
import os
import platform
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary

from trainer.storage.jsonl import AppendFile
from trainer.telemetry import drawing
from trainer.telemetry.events import Log, writable
from trainer.telemetry.metrics import RESERVED, Sink

CHARTS = {
    "loss": ["train/loss", "validation/train_loss", "validation/loss"],
    "accuracy": ["train/accuracy", "validation/accuracy"], "learning rate": ["optimizer/lr.*"],
    "gradient norm": ["optimizer/grad_norm"], "samples per second": ["speed/samples_per_s"],
    "restarts": ["run/restarts"],
}  # fmt: skip
"""Charts of TensorBoard's page "custom scalars"."""
BINS = 64
"""Bins of a histogram. numpy would choose a very large number for a tensor with an outlier."""
NORMS = 4096
"""Number of gradient norms, the last ones before a validation, that its histogram shows."""


class TensorBoard(Sink):
    """Event files for TensorBoard, one write per record. torch's SummaryWriter has a thread and a
    buffer, which a forked loader worker would inherit, and a full disk ends it.

    Args:
        every: steps between scalars.
        first: the first step that is shown from now on, 0 at the beginning of a run. TensorBoard
            drops what earlier attempts have shown from this step on.
        class_names: names for the confusion matrix.
        norms: gradient norms since the last validation, which an earlier attempt has shown.
        tensors: yields (name, array) for histograms every `histograms_every` steps (0: never).
    """

    def __init__(self, folder: Path, *, every: int, first: int, class_names: Sequence[str] = (),
                 norms: Iterable[float] = (), histograms_every: int = 0,
                 tensors: Callable[[], Iterable[tuple[str, Any]]] = lambda: ()) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard import summary

        self._summary, self._record_writer = summary, RecordWriter
        self._every, self._first = every, first
        self._names, self._norms = class_names, deque(norms, maxlen=NORMS)
        self._histograms_every, self._tensors = histograms_every, tensors
        folder.mkdir(exist_ok=True)
        self._is_new = not any(folder.iterdir())
        # TensorBoard reads event files in the order of their names.
        name = f"events.out.tfevents.{time.time():017.6f}.{platform.node()}.{os.getpid()}"
        self._file = AppendFile(folder / name)
        self._event(file_version="brain.Event:2")
        self._event(session_log=SessionLog(status=SessionLog.START), step=first)

    def introduce(self, summary: Sequence[str], restarts: int) -> None:
        """Show the startup summary and the number of restarts."""
        if self._is_new:  # TensorBoard does not drop texts of earlier attempts
            charts = {name: ["Multiline", tags] for name, tags in CHARTS.items()}
            self._event(summary=self._summary.custom_scalars({"the run": charts}))
            text = writable("    " + "\n    ".join(summary))
            self._event(summary=self._summary.text("run", text), step=0)
        if restarts:
            self._scalars({"run/restarts": restarts}, self._first)

    def samples(self, images: Any) -> None:
        self._image("samples", images, 0, dataformats="NCHW")

    def step(self, line: dict[str, Any], timing: dict[str, float]) -> None:
        step = line["step"]
        if line["grad_norm"] is not None:
            self._norms.append(line["grad_norm"])
        if self._histograms_every and timing and step % self._histograms_every == 0:
            for tag, values in self._tensors():
                self._histogram(tag, values, step)
        if step == 1 or not step % self._every:
            self._scalars(train_scalars(line, timing), step)

    def validation(self, line: dict[str, Any]) -> None:
        step, table = line["step"], line.get("val_table")
        self._scalars(validation_scalars(line), step)
        self._histogram("optimizer/grad_norms", np.asarray(self._norms), step)
        self._norms.clear()
        if table is not None and drawing.is_matrix(table):
            self._image("confusion", drawing.matrix(table, self._names), step)

    def picture(self, image: Any, step: int) -> None:
        self._image("validation", image, step)

    def graph(self, definition: Any) -> None:
        """Show the graph of the model (a GraphDef)."""
        self._event(graph_def=definition.SerializeToString())

    def finish(self, settings: Mapping[str, Any], figures: Mapping[str, float], step: int) -> None:
        plain = {k: v if isinstance(v, bool | int | float) else writable(str(v))
                 for k, v in settings.items() if v is not None}
        for summary in self._summary.hparams(plain, dict(figures)):
            self._event(summary=summary)
        self._scalars(figures, step)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a later attempt writes the missing lines
            self._file.close()

    def _scalars(self, tags: Mapping[str, float], step: int) -> None:
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in tags.items()]
        self._event(summary=Summary(value=values), step=step)

    def _histogram(self, tag: str, values: Any, step: int) -> None:
        if values.size and np.isfinite(values).all():
            self._event(summary=self._summary.histogram(tag, values, BINS), step=step)

    def _image(self, tag: str, image: Any, step: int, dataformats: str = "HWC") -> None:
        self._event(summary=self._summary.image(tag, image, dataformats=dataformats), step=step)

    def _event(self, **fields: Any) -> None:
        record = io.BytesIO()
        event = Event(wall_time=time.time(), **fields)
        self._record_writer(record).write(event.SerializeToString())
        self._file.append(record.getvalue())


def train_scalars(line: dict[str, Any], timing: dict[str, float]) -> dict[str, float]:
    """Tag → value for a training step: its line, and the seconds of this rank if they are known."""
    tags = {f"train/{k}": v for k, v in line.items()
            if k in ("loss", "replaced") or k not in RESERVED}
    tags |= {"optimizer/lr": line["lr"], "optimizer/grad_norm": line["grad_norm"],
             "optimizer/loss_scale": line.get("scale")}
    tags |= {f"optimizer/lr_{number}": rate for number, rate in enumerate(line.get("lrs", ()))}
    if timing:
        tags["speed/samples_per_s"] = line["samples"] / timing["step"]
        tags |= {f"speed/{part}_s": timing[part] for part in ("data", "compute")}
    return {k: v for k, v in tags.items() if v is not None}


def validation_scalars(line: dict[str, Any]) -> dict[str, float]:
    """Tag → value for the line of a validation."""
    tags = {f"validation/{k.removeprefix('val_')}": v for k, v in line.items()
            if k.startswith("val_") and k not in ("val_samples", "val_table")}
    tags["validation/train_loss"] = line["train_loss"]
    return {k: v for k, v in tags.items() if v is not None}


class GuardedSink(Sink):
    """Passes copies of the lines to the sink that `make` creates; an exception in it disables it
    with a warning. `flag` is its name in the warning."""

    def __init__(self, flag: str, make: Callable[[], Any], log: Log) -> None:
        self._flag, self._log, self._sink = flag, log, None
        self._sink = self._try(make)

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

    def _try(self, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except Exception as error:
            self._sink = None
            self._log.warning(f"{self._flag} has failed and is disabled:\n"
                              + "".join(traceback.format_exception(error)).rstrip())
            return None
