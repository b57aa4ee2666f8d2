"""Sinks: TensorBoard, and sinks written by the user."""

from __future__ import annotations

import contextlib
import io
import os
import platform
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary

from trainer.storage.files import make_subfolder
from trainer.storage.jsonl import AppendFile
from trainer.telemetry import drawing
from trainer.telemetry.events import Log, writable
from trainer.telemetry.metrics import RESERVED, Sink, primary_metric

CURVES = {"optimizer/lr": "curves/learning_rate", "speed/samples_per_s": "curves/samples_per_s"}
"""Tags that are shown next to the loss, with the names they have there."""
BINS = 64
"""Bins of a histogram. numpy would choose a very large number for a tensor with an outlier."""
NORMS = 4096
"""Number of gradient norms, the last ones before a validation, that its histogram shows."""


class EventFile:
    """A file of a TensorBoard run, one write per record. torch's SummaryWriter has a thread and a
    buffer, which a forked loader worker would inherit, and a full disk ends it. The file is created
    with the first record: attempts that fail before it leave none. From the step `first` on,
    TensorBoard drops what earlier files of the folder show."""

    def __init__(self, folder: Path, first: int) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard import summary

        self._summary, self._record_writer = summary, RecordWriter
        self._folder, self._first, self._restarts = folder, first, 0
        self._file: AppendFile | None = None

    def show_restarts(self, number: int) -> None:
        """Show the number of restarts at step `first`, as soon as the file is created."""
        self._restarts = number

    def scalars(self, tags: Mapping[str, float], step: int) -> None:
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in tags.items()]
        self.write(summary=Summary(value=values), step=step)

    def histogram(self, tag: str, values: Any, step: int) -> None:
        if values.size and np.isfinite(values).all():
            try:
                summary = self._summary.histogram(tag, values, BINS)
            except ValueError:  # the values are too near to each other for numpy's bins
                return
            self.write(summary=summary, step=step)

    def image(self, tag: str, image: Any, step: int, dataformats: str = "HWC") -> None:
        self.write(summary=self._summary.image(tag, image, dataformats=dataformats), step=step)

    def text(self, tag: str, text: str, step: int = 0) -> None:
        self.write(summary=self._summary.text(tag, text), step=step)

    def hparams(self, values: Mapping[str, Any]) -> None:
        # Without the first part, the page also finds the last values of all scalars.
        for summary in self._summary.hparams(dict(values), {})[1:]:
            self.write(summary=summary)

    def write(self, **fields: Any) -> None:
        """Write an event with these fields."""
        if self._file is None:
            make_subfolder(self._folder)
            # TensorBoard reads event files in the order of their names.
            name = f"events.out.tfevents.{time.time():017.6f}.{platform.node()}.{os.getpid()}"
            self._file = AppendFile(self._folder / name)
            self.write(file_version="brain.Event:2")
            self.write(session_log=SessionLog(status=SessionLog.START), step=self._first)
            if self._restarts:
                self.scalars({"run/restarts": self._restarts}, self._first)
        record = io.BytesIO()
        event = Event(wall_time=time.time(), **fields)
        self._record_writer(record).write(event.SerializeToString())
        self._file.append(record.getvalue())

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # a later attempt writes the missing lines
                self._file.close()


class TensorBoard(Sink):
    """Event files for TensorBoard. Training and validation are two of its runs, with the same tags,
    so that each of its charts shows both. Its first page shows the tags in alphabetical order:
    `curves/` comes first. The last validation is shown at each step that is shown of the training:
    TensorBoard leaves out the lowest and highest 5 % of the points of a chart, and smooths the
    rest, which would hide or move the few points of validations.

    Args:
        every: steps between scalars.
        first: the first step that is shown from now on, 0 at the beginning of a run.
        is_validated: whether a validation follows a step.
        history: lines of metrics.jsonl that an earlier attempt has shown.
        class_names: names for the confusion matrix.
        tensors: yields (name, array) for histograms every `histograms_every` steps (0: never).
    """

    def __init__(self, folder: Path, *, every: int, first: int,
                 is_validated: Callable[[int], bool] = lambda step: False,
                 history: Iterable[dict[str, Any]] = (), class_names: Sequence[str] = (),
                 histograms_every: int = 0,
                 tensors: Callable[[], Iterable[tuple[str, Any]]] = lambda: ()) -> None:
        self._folder, self._filter, self._first = folder, StepFilter(every), first
        self._is_validated, self._names = is_validated, class_names
        self._histograms_every, self._tensors = histograms_every, tensors
        self._norms = deque[float](maxlen=NORMS)  # since the last validation
        self._last_validation: dict[str, float] = {}
        self._figures: Callable[[], Mapping[str, float]] = dict
        for line in history:
            self._remember(line)
        self._is_new = not folder.exists()
        self._training = EventFile(folder / "train", first)
        self._validation: EventFile | None = None

    def introduce(self, summary: Sequence[str], restarts: int) -> None:
        """Show the startup summary and the number of restarts."""
        self._training.show_restarts(restarts)
        if self._is_new:  # TensorBoard does not drop texts of earlier attempts
            self._training.text("run", writable("    " + "\n    ".join(summary)))

    def show_figures(self, figures: Callable[[], Mapping[str, float]]) -> None:
        """Show what `figures` returns, tag → value, beside the scalars of a step."""
        self._figures = figures

    def samples(self, images: Any) -> None:
        self._training.image("images/samples", images, 0, dataformats="NCHW")

    def step(self, line: dict[str, Any], timing: dict[str, float]) -> None:
        step = line["step"]
        self._remember(line)
        if self._histograms_every and timing and step % self._histograms_every == 0:
            for tag, values in self._tensors():
                self._training.histogram(tag, values, step)
        if self._filter.shows(line):
            tags = _curves(train_scalars(line, timing), line.get("turn", ""))
            self._training.scalars({**tags, **(self._figures() if timing else {})}, step)
            if not self._is_validated(step):
                self._show_validation(step)

    def validation(self, line: dict[str, Any]) -> None:
        step, table = line["step"], line.get("val_table")
        self._training.histogram("optimizer/grad_norms", np.asarray(self._norms), step)
        self._remember(line)
        self._show_validation(step)
        if table is not None and drawing.is_matrix(table):
            self._training.image("images/confusion", drawing.matrix(table, self._names), step)

    def _remember(self, line: dict[str, Any]) -> None:
        if "val_loss" in line:
            tags = validation_scalars(line)
            tags.pop("validation/train_loss", None)  # the training's curve shows it
            self._last_validation = _curves(tags)
            self._norms.clear()
        elif line.get("grad_norm") is not None:
            self._norms.append(line["grad_norm"])

    def _show_validation(self, step: int) -> None:
        if self._last_validation:
            self._validation = self._validation or EventFile(self._folder / "validation",
                                                             self._first)
            self._validation.scalars(self._last_validation, step)

    def picture(self, image: Any, step: int) -> None:
        self._training.image("images/validation", image, step)

    def text(self, text: str, step: int) -> None:
        # Indented, it is shown as it is, not as Markdown.
        self._training.text("validation", "    " + text.replace("\n", "\n    "), step)

    def graph(self, definition: Any) -> None:
        """Show the graph of the model (a GraphDef)."""
        self._training.write(graph_def=definition.SerializeToString())

    def finish(self, settings: Mapping[str, Any], figures: Mapping[str, float], step: int) -> None:
        plain = {k: v if isinstance(v, bool | int | float) else writable(str(v))
                 for k, v in settings.items() if v is not None}
        # As metrics of the page the figures would need scalars: charts of one dot each. Names with
        # a capital letter come first.
        self._training.hparams({**{k.capitalize(): v for k, v in figures.items()}, **plain})

    def close(self) -> None:
        self._training.close()
        if self._validation is not None:
            self._validation.close()


def _curves(tags: Mapping[str, float], turn: str = "") -> dict[str, float]:
    """The tags of training or validation, as they are called in both."""
    names = {tag: tag.partition("/")[2] for tag in tags
             if tag.startswith(("train/", "validation/"))}
    shown = (f"loss_{turn}" if turn else "loss", primary_metric(names.values()))
    new = {tag: f"{'curves' if name in shown else 'metrics'}/{name}" for tag, name in names.items()}
    return {new.get(tag) or CURVES.get(tag, tag): value for tag, value in tags.items()}


def train_scalars(line: dict[str, Any], timing: dict[str, float]) -> dict[str, float]:
    """Tag → value for a training step: its line, and the seconds of this rank if they are known."""
    tags = {f"train/{k}": v for k, v in line.items()
            if k in ("loss", "replaced") or k not in RESERVED}
    tags |= {"optimizer/lr": line.get("lr"), "optimizer/grad_norm": line.get("grad_norm"),
             "optimizer/loss_scale": line.get("scale")}
    if "turn" in line:  # what the turns mean differs: a curve for each
        tags = {f"{tag}_{line['turn']}": value for tag, value in tags.items()}
    tags |= {f"optimizer/lr_{name}": rate for name, rate in _rates(line.get("lrs", ()))}
    if timing:
        tags["speed/samples_per_s"] = line["samples"] / timing["step"]
        tags |= {f"speed/{part}_s": timing[part] for part in ("data", "compute")}
    return {k: v for k, v in tags.items() if v is not None}


def _rates(lrs: Sequence[float] | Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Name and rate of each parameter group; of several optimizers, the optimizer's name."""
    for name, rate in lrs.items() if isinstance(lrs, Mapping) else enumerate(lrs):
        if isinstance(rate, list):
            yield from ((f"{name}_{number}", value) for number, value in enumerate(rate))
        else:
            yield str(name), rate


class StepFilter:
    """The steps that a sink shows: the first, each `every` steps; with turns the next of each."""

    def __init__(self, every: int) -> None:
        self._every, self._shown = every, dict[str, int]()

    def shows(self, line: Mapping[str, Any]) -> bool:
        step, turn = line["step"], line.get("turn")
        if turn is None:
            return step == 1 or not step % self._every
        due = turn not in self._shown or step // self._every > self._shown[turn]
        if due:
            self._shown[turn] = step // self._every
        return due


def validation_scalars(line: dict[str, Any]) -> dict[str, float]:
    """Tag → value for the line of a validation."""
    tags = {f"validation/{k.removeprefix('val_')}": v for k, v in line.items()
            if k.startswith("val_") and k not in ("val_samples", "val_table")}
    tags["validation/train_loss"] = line.get("train_loss")
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

    def text(self, text: str, step: int) -> None:
        if hasattr(self._sink, "text"):
            self._call("text", text, step)

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
