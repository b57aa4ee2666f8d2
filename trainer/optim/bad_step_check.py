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
        self._losses: dict[str, deque[float]] = {"": deque(maxlen=HISTORY)}  # of each turn

    def reason_to_skip(self, *, loss: float, count: float, norm: float, scale: float | None,
                       turn: str = "") -> str:
        """Reason to skip the update; "" if it may be applied.

        Args:
            loss, count: sums over the global batch.
            norm: norm of the mean gradient, unscaled.
            scale: loss scale of fp16; None otherwise.
            turn: losses are compared with those of the same turn.
        """
        if count <= 0 and loss == 0:
            return EMPTY
        if not (math.isfinite(loss) and math.isfinite(norm) and count > 0):
            # A gradient scaler adjusts by overflows: they are normal while the scale can fall.
            adjusting = scale is not None and scale > 1 and math.isfinite(loss)
            return OVERFLOW if adjusting else NONFINITE
        return SPIKE if self._threshold and self._is_spike(loss / count, turn) else ""

    def remember(self, *, loss: float, count: float, turn: str = "") -> None:
        """Add the loss of an applied step to the history of its turn."""
        self._losses.setdefault(turn, deque(maxlen=HISTORY)).append(loss / count)

    def _is_spike(self, mean: float, turn: str) -> bool:
        """Test upwards for an outlier by the modified z-score, 0.6745 · (x - median) / MAD.

        Iglewicz and Hoaglin, "How to detect and handle outliers" (1993).
        """
        losses = self._losses.get(turn, ())
        if len(losses) < MIN_HISTORY:
            return False
        median = statistics.median(losses)
        spread = statistics.median(abs(x - median) for x in losses)
        return 0.6745 * (mean - median) > self._threshold * spread > 0

    def state_dict(self) -> dict[str, Any]:
        texts = {turn: [loss.hex() for loss in losses] for turn, losses in self._losses.items()}
        return {"losses": texts.pop(""), **({"turns": texts} if texts else {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        texts = {"": state["losses"], **state.get("turns", {})}
        self._losses = {turn: deque(map(float.fromhex, losses), maxlen=HISTORY)
                        for turn, losses in texts.items()}
