"""The run at Weights & Biases, where that is wanted: an optional sink."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer import drawing
from trainer.errors import ConfigError
from trainer.folder import replace_text
from trainer.sinks import train_scalars, validation_scalars

ID = "wandb-id"
"""File of the run folder: the run's id there, so that each start of the run shows the same one."""


class WandB:
    """Scalars at an interval, validations, the confusion matrix, pictures, final figures.

    What an earlier attempt has logged already is ignored there: steps only rise.

    Args:
        path: the run folder, which keeps the id and, offline, the files.
        run_id: of the run.
        mode: online or offline.

    Raises:
        ConfigError: wandb isn't installed.
    """

    def __init__(
        self, path: Path, run_id: str, *, mode: str, every: int, settings: Mapping[str, Any],
        class_names: Any = (),
    ) -> None:  # fmt: skip
        try:
            self._wandb: Any = importlib.import_module("wandb")
        except ModuleNotFoundError as error:
            raise ConfigError("--log.wandb: wandb isn't installed; pip install '.[wandb]', or "
                              "leave it off.") from error
        self._every, self._names = every, class_names
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
        self._run.log(tags, step=step)

    def validation(self, line: dict[str, Any]) -> None:
        row: dict[str, Any] = dict(validation_scalars(line))
        table = line.get("val_table")
        if table and all(isinstance(r, list) and len(r) == len(table) for r in table) and (
                not isinstance(table[0][0], list)):
            row["confusion"] = self._wandb.Image(drawing.matrix(table, self._names))
        self._run.log(row, step=line["step"])

    def picture(self, image: Any, step: int) -> None:
        self._run.log({"validation": self._wandb.Image(image)}, step=step)

    def finish(self, settings: Mapping[str, Any], figures: Mapping[str, float], step: int) -> None:
        self._run.summary.update(dict(figures))

    def close(self) -> None:
        self._run.finish()
