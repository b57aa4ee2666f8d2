"""How far a run has come: small parts of its state, each a JSON value."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Progress:
    """Where the run is: facts from which epoch, place and next samples follow."""

    step: int = 0
    """Global batches consumed."""
    skipped: int = 0
    """How many of them gave no update; learning rate and Adam's count follow step - skipped."""
    validated: int = 0
    """The last step whose validation is done."""
    bad: list[int] = field(default_factory=list)
    """Steps whose loss or gradient wasn't fit for an update: numbers of global batches."""
    left_out: list[int] = field(default_factory=list)
    """Global batches that are consumed without being computed, since a rollback."""
    replaced: int = 0
    """Samples that took the place of bad ones."""

    def state_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.skipped = int(state["step"]), int(state["skipped"])
        self.bad, self.left_out = list(state["bad"]), list(state["left_out"])
        self.validated, self.replaced = int(state["validated"]), int(state["replaced"])

    @property
    def updates(self) -> int:
        """Optimizer updates made."""
        return self.step - self.skipped

    def note_skipped(self, step: int, *, bad: bool = False) -> None:
        """A global batch gave no update; `bad`: because of what it computed."""
        self.skipped += 1
        if bad and step not in self.bad:
            self.bad.append(step)

    @property
    def bad_row(self) -> list[int]:
        """The bad steps in a row that end at this one; batches that are left out don't count."""
        row, step = [], self.step
        while step in self.bad or step in self.left_out:
            if step not in self.left_out:
                row.append(step)
            step -= 1
        return row[::-1]


@dataclass
class Best:
    """The best validation so far, and which step's weights it belongs to."""

    metric: str = ""
    direction: str = "max"
    value: float | None = None
    step: int = 0
    mark: float | None = None
    """What a value has to be better than, by the least difference that counts, to end the wait."""
    waited: int = 0
    """Validations since one was."""

    def judge_by(self, metric: str, direction: str) -> None:
        """Say what is best; by another rule than before, earlier values don't compare."""
        if (metric, direction) != (self.metric, self.direction):
            self.metric, self.direction, self.value, self.step = metric, direction, None, 0
            self.mark, self.waited = None, 0

    def improves(self, value: float) -> bool:
        """Whether a value is better than the best; a NaN never is."""
        if math.isnan(value):
            return False
        if self.value is None:
            return True
        return value > self.value if self.direction == "max" else value < self.value

    def has_waited(self, patience: int) -> bool:
        """Whether so many validations in a row (0: any number may be) weren't better."""
        return 0 < patience <= self.waited

    def wait(self, value: float, min_delta: float) -> None:
        """Count a validation as waited, unless it is better than the mark by `min_delta`."""
        gain = math.inf if self.mark is None else value - self.mark
        if self.mark is not None and self.direction == "min":
            gain = -gain
        if not math.isnan(value) and gain > min_delta:
            self.mark, self.waited = value, 0
        else:
            self.waited += 1

    def take(self, value: float, step: int) -> None:
        """Make a value the best."""
        self.value, self.step = value, step

    def state_dict(self) -> dict[str, Any]:
        value, mark = (None if v is None else v.hex() for v in (self.value, self.mark))
        return {"metric": self.metric, "direction": self.direction, "value": value,
                "step": self.step, "mark": mark, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.metric, self.direction = state["metric"], state["direction"]
        self.value, self.mark = (None if v is None else float.fromhex(v)
                                 for v in (state["value"], state.get("mark")))
        self.step, self.waited = int(state["step"]), int(state["waited"])


@dataclass
class LossMeter:
    """Loss summed since the last validation, for the mean that stands beside val_loss."""

    total: float = 0.0
    count: float = 0.0

    def add(self, total: float, count: float) -> None:
        """Add a step's sums."""
        self.total += total
        self.count += count

    def take_mean(self) -> float | None:
        """The mean since the last call; None if nothing was counted. Starts anew."""
        mean = self.total / self.count if self.count else None
        self.total = self.count = 0.0
        return mean

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total.hex(), "count": self.count.hex()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = float.fromhex(state["total"])
        self.count = float.fromhex(state["count"])


@dataclass
class Horizon:
    """The lengths that the schedule was laid out for, in steps: an epoch's and the run's.

    A run that is made longer keeps them and stays at the schedule's last rate, so that no step
    it has made would have been another one.
    """

    epoch: int
    total: int

    def state_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.total = int(state["epoch"]), int(state["total"])
