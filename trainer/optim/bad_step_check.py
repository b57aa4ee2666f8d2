"""Decide from reduced values whether a step is applied. All ranks reach the same decision."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any

from trainer.config.schema import BadStepConfig

OVERFLOW, EMPTY, NONFINITE, SPIKE, EXCLUDED = "overflow", "empty", "nonfinite", "spike", "left out"
"""Reasons to skip an update: the fp16 scale was too high; the count was 0; loss or gradient was not
finite; the loss was far above recent ones; the batch is excluded after a roll-back."""

BAD_REASONS = (NONFINITE, SPIKE)
"""Reasons that indicate a bad batch or bad weights."""

HISTORY, MIN_HISTORY = 64, 16
"""Number of recent losses for the detection of spikes, and the minimum that it needs."""


class Health:
    """Checks each step. Its history of losses is part of the training state."""

    def __init__(self, config: BadStepConfig) -> None:
        self._threshold = config.spike_z
        self._losses: deque[float] = deque(maxlen=HISTORY)

    def reason_to_skip(self, *, loss: float, count: float, norm: float, scale: float | None) -> str:
        """Reason to skip the update; "" if it may be applied.

        Args:
            loss, count: sums over the global batch.
            norm: norm of the mean gradient, unscaled.
            scale: loss scale of fp16; None otherwise.
        """
        if count <= 0 and loss == 0:
            return EMPTY
        if not (math.isfinite(loss) and math.isfinite(norm) and count > 0):
            # A gradient scaler adjusts by overflows: they are normal while the scale can fall.
            adjusting = scale is not None and scale > 1 and math.isfinite(loss)
            return OVERFLOW if adjusting else NONFINITE
        return SPIKE if self._threshold and self._is_spike(loss / count) else ""

    def remember(self, *, loss: float, count: float) -> None:
        """Add the loss of an applied step to the history."""
        self._losses.append(loss / count)

    def _is_spike(self, mean: float) -> bool:
        """Test upwards for an outlier by the modified z-score, 0.6745 · (x - median) / MAD.

        Iglewicz and Hoaglin, "How to detect and handle outliers" (1993).
        """
        if len(self._losses) < MIN_HISTORY:
            return False
        median = statistics.median(self._losses)
        spread = statistics.median(abs(x - median) for x in self._losses)
        return 0.6745 * (mean - median) > self._threshold * spread > 0

    def state_dict(self) -> dict[str, Any]:
        return {"losses": [loss.hex() for loss in self._losses]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._losses.clear()
        self._losses.extend(float.fromhex(loss) for loss in state["losses"])
