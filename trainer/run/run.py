"""A run, and the values of the stages that build it (see `build`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trainer.checkpoint.boundary import StepBoundary
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.train_state import TrainState
from trainer.data.loader import Loader
from trainer.distributed.replica_check import ReplicaCheck
from trainer.optim.bad_step_check import Health
from trainer.resilience.fault_injection import FaultInjector
from trainer.run.context import Context, Resumption, RunFolder
from trainer.run.evaluate import Evaluator
from trainer.run.guard import Guard
from trainer.run.pictures import Pictures
from trainer.run.prepare import Setup
from trainer.step import Computes, ForwardBackward, Step, StepResult
from trainer.telemetry.metrics import Metrics
from trainer.telemetry.step_timing import StepTiming


@dataclass(frozen=True, kw_only=True)
class Trainable:
    """The model with the state of its training, and how it is computed and saved."""

    state: TrainState
    health: Health
    computes: Computes
    boundary: StepBoundary
    checkpoint: Checkpointer
    faults: FaultInjector

    @property
    def compute(self) -> ForwardBackward:
        """That of the first turn."""
        return self.computes.turns[0]


@dataclass(frozen=True, kw_only=True)
class Recorders:
    """What records the steps of the run."""

    metrics: Metrics
    timing: StepTiming
    pictures: Pictures | None
    """Set on rank 0 if the task draws pictures."""
    rate_end: tuple[int, str]
    """The step with which the schedule ends too early, and a warning."""
    warn: Callable[[str], None]

    def step(self, result: StepResult, *, waited_s: float, blocked_s: float) -> None:
        """Record a step, with the total seconds of waiting for data and for saves so far."""
        times = self.metrics.step(result, waited_s=waited_s)
        self.timing.add(result.step, times, samples=result.sums.samples, blocked_s=blocked_s)
        if result.step == self.rate_end[0]:
            self.warn(self.rate_end[1])

    def draw(self, step: int, *, again: bool = True) -> None:
        """Draw the picture of a step, if the task has one (`again`: even if the file exists)."""
        if self.pictures is not None and step:
            self.pictures.take(step, again=again)


@dataclass(frozen=True, kw_only=True)
class BuiltRun:
    """A run before its warm-up, which `warmup.start` turns into a `Run`."""

    context: Context
    setup: Setup
    folder: RunFolder
    resumption: Resumption
    trainable: Trainable
    loader: Loader
    validations: dict[str, Evaluator]
    """Split → the evaluator of a validation set; the main one is the first."""
    test: Evaluator | None
    recorders: Recorders
    guard: Guard

    @property
    def state(self) -> TrainState:
        return self.trainable.state


@dataclass(frozen=True, kw_only=True)
class Run(BuiltRun):
    """A run that is ready to train."""

    step: Step
    replica_check: ReplicaCheck
