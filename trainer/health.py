"""Whether a step is fit to be applied, judged by reduced values: so all ranks judge alike."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any

from trainer.config import Nonfinite

OVERFLOW, EMPTY, NONFINITE, SPIKE, LEFT_OUT = "overflow", "empty", "nonfinite", "spike", "left out"
"""Why a step gave no update: fp16's scale was too high; nothing was counted; loss or gradient
weren't finite; the loss was far from the ones before; the batch was left out after a rollback."""

BAD = (NONFINITE, SPIKE)
"""Those that speak against the batch or the weights."""

HISTORY, LEAST = 64, 16
"""Losses that a spike is measured against, and how many there must be."""


class Health:
    """The judgement of each step; part of the state, for the losses that it remembers."""

    def __init__(self, config: Nonfinite) -> None:
        self._threshold = config.spike_z
        self._losses: deque[float] = deque(maxlen=HISTORY)

    def judge(self, *, loss: float, count: float, norm: float, scale: float | None) -> str:
        """Why a step must not be applied; "" if nothing speaks against it.

        Args:
            loss, count: sums over the global batch.
            norm: of the mean gradient, unscaled.
            scale: fp16: what the loss was multiplied by.
        """
        if count <= 0 and loss == 0:
            return EMPTY
        if not (math.isfinite(loss) and math.isfinite(norm) and count > 0):
            # A scaler finds its scale by overflows: as long as it can fall, nothing is wrong.
            finding = scale is not None and scale > 1 and math.isfinite(loss)
            return OVERFLOW if finding else NONFINITE
        return SPIKE if self._threshold and self._is_spike(loss / count) else ""

    def remember(self, *, loss: float, count: float) -> None:
        """A step is made: its loss is what later ones are measured against."""
        self._losses.append(loss / count)

    def _is_spike(self, mean: float) -> bool:
        """By the modified z-score, 0.6745 · (x - median) / MAD (Iglewicz and Hoaglin, "How to
        detect and handle outliers", 1993), upwards only."""
        if len(self._losses) < LEAST:
            return False
        median = statistics.median(self._losses)
        spread = statistics.median(abs(x - median) for x in self._losses)
        return 0.6745 * (mean - median) > self._threshold * spread > 0

    def state_dict(self) -> dict[str, Any]:
        return {"losses": [loss.hex() for loss in self._losses]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._losses.clear()
        self._losses.extend(float.fromhex(loss) for loss in state["losses"])
