"""A fake wandb module that records the calls of a sink."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np


class StandIn:
    """`init` returns a run; `calls` lists all calls in order."""

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
    def Html(text: str) -> str:
        return text

    @staticmethod
    def Image(array: Any) -> tuple[str, tuple[int, ...]]:
        return "image", np.asarray(array).shape
