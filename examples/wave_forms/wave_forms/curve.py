"""A sink for --log.sinks: writes the loss to a CSV file in the run folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Curve:
    """One line `step,loss` per step. After a restart the lines of repeated steps are removed."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "curve.csv"
        self.file = None

    def step(self, line: dict[str, Any], timing: dict[str, float]) -> None:
        if self.file is None:
            old = self.path.read_text().splitlines() if self.path.exists() else []
            kept = [text for text in old if int(text.partition(",")[0]) < line["step"]]
            self.path.write_text("".join(text + "\n" for text in kept))
            self.file = self.path.open("a", buffering=1)
        self.file.write(f"{line['step']},{line['loss']}\n")

    def validation(self, line: dict[str, Any]) -> None:
        pass

    def finish(self, settings: Mapping[str, Any], figures: Mapping[str, float], step: int) -> None:
        pass

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
