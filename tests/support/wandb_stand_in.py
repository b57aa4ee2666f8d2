"""In place of wandb: what a sink asks of it, written down."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np


class StandIn:
    """`init` gives a run; `calls` has what each did, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def init(self, **options: Any) -> SimpleNamespace:
        self.calls.append(("init", options))
        return SimpleNamespace(
            log=lambda row, step: self.calls.append(("log", step, row)),
            finish=lambda: self.calls.append(("finish",)),
            summary=SimpleNamespace(update=lambda f: self.calls.append(("summary", f))))

    @staticmethod
    def Settings(**options: Any) -> dict[str, Any]:
        return options

    @staticmethod
    def Image(array: Any) -> tuple[str, tuple[int, ...]]:
        return "image", np.asarray(array).shape
