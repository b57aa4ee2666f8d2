"""Optional sink for Weights & Biases."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError
from trainer.storage.files import replace_text
from trainer.telemetry import drawing
from trainer.telemetry.events import Log
from trainer.telemetry.tensorboard import train_scalars, validation_scalars

ID = "wandb-id"
"""File in the run folder with the id of the W&B run, so that a restart continues that run."""


def check_installed(mode: str) -> None:
    """Raises ConfigError if wandb is needed and not installed."""
    if mode != "off" and importlib.util.find_spec("wandb") is None:
        raise ConfigError(f"--log.wandb {mode}: wandb isn't installed; pip install '.[wandb]', or "
                          "use off.")


class WandB:
    """Sink for Weights & Biases. An error of wandb disables it with a warning.

    wandb ignores the steps that an earlier attempt has logged, because its steps only increase.

    Args:
        path: the run folder, for the id and, offline, the files of wandb.
        run_id: id of a new W&B run.
        every: steps between scalars.
        class_names: names for the confusion matrix.
    """

    def __init__(
        self, path: Path, run_id: str, log: Log, *, mode: str, every: int,
        settings: Mapping[str, Any], class_names: Any = (),
    ) -> None:  # fmt: skip
        self._every, self._names, self._log = every, class_names, log
        self._run: Any = None
        with self._guarded():
            self._wandb: Any = importlib.import_module("wandb")
            id_file = path / ID
            if not id_file.exists():
                replace_text(id_file, run_id)
            # The console capture of wandb would put a pipe between the run and the terminal.
            self._run = self._wandb.init(
                id=id_file.read_text().strip(), name=path.name, resume="allow",
                mode=mode, dir=str(path), config=dict(settings),
                settings=self._wandb.Settings(console="off", silent=True),
            )  # fmt: skip

    def step(self, line: dict[str, Any], timing: dict[str, float]) -> None:
        step = line["step"]
        if step % self._every and step != 1:
            return
        tags = train_scalars(line)
        if timing:
            tags["speed/samples_per_s"] = line["samples"] / timing["step"]
        self._log_row(tags, step)

    def validation(self, line: dict[str, Any]) -> None:
        row: dict[str, Any] = dict(validation_scalars(line))
        table = line.get("val_table")
        if table is not None and drawing.is_matrix(table):
            row |= self._image("confusion", drawing.matrix(table, self._names))
        self._log_row(row, line["step"])

    def picture(self, image: Any, step: int) -> None:
        self._log_row(self._image("validation", image), step)

    def finish(self, settings: Mapping[str, Any], figures: Mapping[str, float], step: int) -> None:
        with self._guarded():
            if self._run is not None:
                self._run.summary.update(dict(figures))

    def close(self) -> None:
        with self._guarded():
            if self._run is not None:
                self._run.finish()

    def _image(self, name: str, image: Any) -> dict[str, Any]:
        """A row with the picture; an empty row if the sink is disabled."""
        with self._guarded():
            if self._run is not None:
                return {name: self._wandb.Image(image)}
        return {}

    def _log_row(self, row: Mapping[str, Any], step: int) -> None:
        with self._guarded():
            if self._run is not None:
                self._run.log(row, step=step)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._run = None
            self._log.warning(f"Weights & Biases is disabled: "
                              f"{type(error).__name__}: {error}")
