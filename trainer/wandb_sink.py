"""The run at Weights & Biases, where that is wanted: an optional sink."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer import drawing
from trainer.errors import ConfigError
from trainer.folder import replace_text
from trainer.log import Log
from trainer.sinks import train_scalars, validation_scalars

ID = "wandb-id"
"""File of the run folder: the run's id there, so that each start of the run shows the same one."""


def check_installed(mode: str) -> None:
    """Raises: ConfigError: it is wanted, and isn't installed."""
    if mode != "off" and importlib.util.find_spec("wandb") is None:
        raise ConfigError(f"--log.wandb {mode}: wandb isn't installed; pip install '.[wandb]', or "
                          "leave it off.")


class WandB:
    """Scalars at an interval, validations, the confusion matrix, pictures, final figures.

    What an earlier attempt has logged already is ignored there: steps only rise. An error of wandb
    costs a warning and this sink, never the run.

    Args:
        path: the run folder, which keeps the id and, offline, the files.
        run_id: of the run.
        mode: online or offline.
    """

    def __init__(
        self, path: Path, run_id: str, log: Log, *, mode: str, every: int,
        settings: Mapping[str, Any], class_names: Any = (),
    ) -> None:  # fmt: skip
        self._every, self._names, self._log = every, class_names, log
        self._run: Any = None
        with self._guarded():
            self._wandb: Any = importlib.import_module("wandb")
            known = path / ID
            if not known.exists():
                replace_text(known, run_id)
            # Its own console capture would put a pipe between the run and the terminal.
            self._run = self._wandb.init(
                id=known.read_text().strip(), name=path.name, resume="allow",
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
        self._tell(tags, step)

    def validation(self, line: dict[str, Any]) -> None:
        row: dict[str, Any] = dict(validation_scalars(line))
        table = line.get("val_table")
        if table is not None and drawing.is_matrix(table):
            row |= self._image("confusion", drawing.matrix(table, self._names))
        self._tell(row, line["step"])

    def picture(self, image: Any, step: int) -> None:
        self._tell(self._image("validation", image), step)

    def finish(self, settings: Mapping[str, Any], figures: Mapping[str, float], step: int) -> None:
        with self._guarded():
            if self._run is not None:
                self._run.summary.update(dict(figures))

    def close(self) -> None:
        with self._guarded():
            if self._run is not None:
                self._run.finish()

    def _image(self, name: str, image: Any) -> dict[str, Any]:
        """A picture as a part of a row; none where nothing is shown any more."""
        with self._guarded():
            if self._run is not None:
                return {name: self._wandb.Image(image)}
        return {}

    def _tell(self, row: Mapping[str, Any], step: int) -> None:
        with self._guarded():
            if self._run is not None:
                self._run.log(row, step=step)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._run = None
            self._log.warning(f"nothing more is shown at Weights & Biases: "
                              f"{type(error).__name__}: {error}")
