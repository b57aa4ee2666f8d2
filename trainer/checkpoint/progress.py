"""Progress of a run: small parts of the training state, each stored as JSON."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from trainer import rng


@dataclass
class TrainProgress:
    """Position of the run, from which the epoch and the next samples follow."""

    step: int = 0
    """Global batches consumed."""
    skipped: int = 0
    """Global batches without an update; learning rate and Adam's count follow step - skipped."""
    validated: int = 0
    """Step of the last completed validation."""
    bad: list[int] = field(default_factory=list)
    """Steps (numbers of global batches) whose loss or gradient allowed no update."""
    excluded_steps: list[int] = field(default_factory=list)
    """Global batches that are consumed but not computed, because of a rollback."""
    replaced: int = 0
    """Samples that replaced unreadable ones."""

    def state_dict(self) -> dict[str, Any]:
        # Files keep the first name of `excluded_steps`.
        return {"left_out" if name == "excluded_steps" else name: value
                for name, value in dataclasses.asdict(self).items()}

    @classmethod
    def from_json(cls, state: dict[str, Any]) -> TrainProgress:
        return cls(step=state["step"], skipped=state["skipped"], validated=state["validated"],
                   bad=state["bad"], excluded_steps=state["left_out"], replaced=state["replaced"])

    def restore(self, saved: TrainProgress) -> None:
        vars(self).update(copy.deepcopy(vars(saved)))

    @property
    def updates(self) -> int:
        return self.step - self.skipped

    def complete(self, step: int, *, replaced: int = 0) -> None:
        self.replaced += replaced
        self.step = step

    def complete_validation(self) -> None:
        self.validated = self.step

    def exclude(self, steps: Iterable[int], *, bad: Iterable[int] = ()) -> None:
        """Exclude global batches from now on, and count these steps as bad."""
        self.excluded_steps = sorted({*self.excluded_steps, *steps})
        self.bad += [step for step in bad if step not in self.bad]

    def note_skipped(self, step: int, *, bad: bool = False) -> None:
        """Count a global batch without an update; `bad` if its loss or gradient was the reason."""
        self.skipped += 1
        if bad and step not in self.bad:
            self.bad.append(step)

    @property
    def consecutive_bad_steps(self) -> list[int]:
        """The consecutive bad steps up to this one; excluded batches don't count."""
        row, step = [], self.step
        while step in self.bad or step in self.excluded_steps:
            if step not in self.excluded_steps:
                row.append(step)
            step -= 1
        return row[::-1]


@dataclass
class BestTracker:
    """The best validation so far, its step, and the count for early stopping."""

    metric: str = ""
    direction: str = "max"
    value: float | None = None
    step: int = 0
    mark: float | None = None
    """Reference for early stopping: a value counts if it is better by more than `min_delta`."""
    waited: int = 0
    """Validations since the last one that counted."""

    def set_rule(self, metric: str, direction: str) -> None:
        """Set metric and direction; a change discards the best value so far."""
        if (metric, direction) != (self.metric, self.direction):
            self.restore(BestTracker(metric, direction))

    def improves(self, value: float) -> bool:
        """Whether a value is better than the best so far; never for a NaN."""
        if self.value is None:
            return not math.isnan(value)
        return value > self.value if self.direction == "max" else value < self.value

    def patience_is_exhausted(self, patience: int) -> bool:
        """Whether the last `patience` (0: any number) validations brought no improvement."""
        return 0 < patience <= self.waited

    def wait(self, value: float, min_delta: float) -> None:
        """Count a validation for early stopping."""
        sign = 1 if self.direction == "max" else -1
        if (not math.isnan(value) if self.mark is None else sign * (value - self.mark) > min_delta):
            self.mark, self.waited = value, 0
        else:
            self.waited += 1

    def take(self, value: float, step: int) -> None:
        self.value, self.step = value, step

    def state_dict(self) -> dict[str, Any]:
        value, mark = (None if v is None else v.hex() for v in (self.value, self.mark))
        return {"metric": self.metric, "direction": self.direction, "value": value,
                "step": self.step, "mark": mark, "waited": self.waited}

    @classmethod
    def from_json(cls, state: dict[str, Any]) -> BestTracker:
        value, mark = (None if v is None else float.fromhex(v)
                       for v in (state["value"], state.get("mark")))
        return cls(metric=state["metric"], direction=state["direction"], value=value,
                   step=state["step"], mark=mark, waited=state["waited"])

    def restore(self, saved: BestTracker) -> None:
        vars(self).update(vars(saved))


@dataclass
class LossMeter:
    """Running mean of the training loss since the last validation (`train_loss`)."""

    total: float = 0.0
    count: float = 0.0

    def add(self, total: float, count: float) -> None:
        self.total += total
        self.count += count

    def take_mean(self) -> float | None:
        """The mean since the last call; None without samples."""
        mean = self.total / self.count if self.count else None
        self.total = self.count = 0.0
        return mean

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total.hex(), "count": self.count.hex()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = float.fromhex(state["total"])
        self.count = float.fromhex(state["count"])


@dataclass
class RateCycles:
    """The last steps of the learning rate's cycles: it has fallen, and rises with the next update.
    """

    ends: list[int] = field(default_factory=list)
    falls: bool = False
    """Whether the rate has fallen since it last rose."""

    def note(self, step: int, rate: float, following: float) -> None:
        """Note the rates of the update of a step and of the next update."""
        if self.falls and following > rate:
            self.ends.append(step)
        self.falls = following < rate or (self.falls and following == rate)

    def state_dict(self) -> dict[str, Any]:
        return {"ends": list(self.ends), "falls": self.falls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ends, self.falls = list(state["ends"]), state["falls"]


class EpochCalls:
    """Calls `Task.epoch(number)` at the beginning of each epoch, and again where a checkpoint in it
    is restored; its random numbers are keyed by (seed, epoch)."""

    def __init__(self, call: Callable[[int], None], seed: int) -> None:
        self._call, self._seed, self._number = call, seed, -1

    def enter(self, number: int) -> None:
        """Call the task unless it is in this epoch."""
        if number != self._number:
            self._number = number
            rng.seed_all(self._seed, rng.EPOCH, number)
            rng.key(rng.find_generators(self._call), self._seed, rng.EPOCH, number)
            self._call(number)

    def state_dict(self) -> dict[str, Any]:
        return {"number": self._number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._number = -1
        self.enter(int(state["number"]))


@dataclass
class ScheduleLengths:
    """Steps of an epoch and of the run, on which the learning rate schedule is based. A run that is
    extended keeps them and stays at the last rate, so that the steps so far remain its own, unless
    it is to `replan`."""

    epoch: int
    total: int
    replan: bool = False

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not self.replan:
            self.set(int(state["epoch"]), int(state["total"]))

    def set(self, epoch: int, total: int) -> None:
        self.epoch, self.total = epoch, total
