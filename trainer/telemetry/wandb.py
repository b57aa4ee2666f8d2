"""Optional sink for Weights & Biases."""

from __future__ import annotations

import html
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError
from trainer.storage.files import read_text, replace_text
from trainer.storage.secrets import mask_arguments
from trainer.telemetry import drawing
from trainer.telemetry.metrics import Sink
from trainer.telemetry.tensorboard import StepFilter, train_scalars, validation_scalars

ID = "wandb-id"
"""File in the run folder with the id of the W&B run, so that a restart continues that run."""


def check_installed(mode: str) -> None:
    """Raises ConfigError if wandb is needed and not installed."""
    if mode != "off" and importlib.util.find_spec("wandb") is None:
        raise ConfigError(f"--log.wandb {mode}: wandb isn't installed; pip install '.[wandb]', or "
                          "use off.")


class WandB(Sink):
    """Sink for Weights & Biases, which ignores the steps that an earlier attempt has logged. The
    run folder `path` has the id (of a new W&B run: `run_id`) and, offline, the files of wandb."""

    def __init__(self, path: Path, run_id: str, *, mode: str, every: int,
                 settings: Mapping[str, Any], class_names: Any = ()) -> None:
        self._wandb: Any = importlib.import_module("wandb")
        self._filter, self._names = StepFilter(every), class_names
        id_file = path / ID
        if not id_file.exists():
            replace_text(id_file, run_id)
        # The console capture of wandb would put a pipe between the run and the terminal.
        given, sys.argv = sys.argv, mask_arguments(sys.argv)  # wandb records the command line
        try:
            self._run = self._wandb.init(
                id=read_text(id_file).strip(), name=path.name, resume="allow", mode=mode,
                dir=str(path), config=dict(settings),
                settings=self._wandb.Settings(console="off", silent=True))
        finally:
            sys.argv = given

    def step(self, line: dict[str, Any], timing: dict[str, float]) -> None:
        if self._filter.shows(line):
            self._run.log(train_scalars(line, timing), step=line["step"])

    def validation(self, line: dict[str, Any]) -> None:
        row: dict[str, Any] = dict(validation_scalars(line))
        table = line.get("val_table")
        if table is not None and drawing.is_matrix(table):
            row["confusion"] = self._wandb.Image(drawing.matrix(table, self._names))
        self._run.log(row, step=line["step"])

    def picture(self, image: Any, step: int) -> None:
        self._run.log({"validation": self._wandb.Image(image)}, step=step)

    def text(self, text: str, step: int) -> None:
        shown = self._wandb.Html(f"<pre>{html.escape(text)}</pre>")
        self._run.log({"validation_text": shown}, step=step)

    def finish(self, settings: Mapping[str, Any], figures: Mapping[str, float], step: int) -> None:
        self._run.summary.update(dict(figures))

    def close(self) -> None:
        self._run.finish()
