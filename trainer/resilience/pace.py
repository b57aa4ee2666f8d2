"""The limit inside steps: learnt from how long recent steps paused between two marks."""

from __future__ import annotations

from trainer.resilience.hang_detection import learnt_limit
from trainer.resilience.progress_marks import Place
from trainer.telemetry.status import Phase

RECENT_STEPS = 64
_BETWEEN_STEPS = (Phase.STEP_END, Phase.SAVE, Phase.EVALUATE)


class Pace:
    """Learns the limit inside steps from the pauses between their marks.

    Args:
        limit_s: a fixed limit; None: learn it.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._fixed_s = limit_s
        self._longest_s, self._before_s = 0.0, 0.0  # in this stretch of steps, in the last one
        self._stretch = 0
        self._pause = (0.0, 0.0)  # when it began, how long it has been so far

    @property
    def limit_s(self) -> float:
        """The limit now, in seconds."""
        if self._fixed_s is not None:
            return self._fixed_s
        return learnt_limit(max(self._longest_s, self._before_s))

    def see(self, place: Place, phase: Phase, now: float) -> float:
        """Note the place of the main thread; returns the limit. Pauses shorter than the time
        between two calls are not seen, and need not be: the shortest limit covers them."""
        began_s, length_s = self._pause
        if place.at_s != began_s:  # a pause counts when it is over
            self._longest_s = max(self._longest_s, length_s)
            self._pause = (place.at_s, 0.0)
        if phase is Phase.TRAIN and place.point not in _BETWEEN_STEPS:
            self._pause = (place.at_s, now - place.at_s)
        if place.step - self._stretch >= RECENT_STEPS or place.step < self._stretch:
            self._stretch = place.step
            self._before_s, self._longest_s = self._longest_s, 0.0
        return self.limit_s
