"""A step outside of a run."""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from trainer.checkpoint.boundary import StepBoundary
from trainer.checkpoint.train_state import TrainState
from trainer.config.schema import BadStepConfig, Clip
from trainer.distributed.ddp import Objective
from trainer.distributed.world import LaunchInfo, World
from trainer.optim.bad_step_check import Health
from trainer.resilience.progress_marks import ProgressMarks
from trainer.step import Computes, ForwardBackward, ModelFacts, Step
from trainer.telemetry.status import Status


def plain_step(
    state: TrainState, objective: Objective, wrapped: nn.Module, clip: Clip | None = None
) -> Step:
    """A step without warm-up, mixed precision and saves, of one turn."""
    compute = ForwardBackward(objective, wrapped, state, ProgressMarks(), contextlib.nullcontext)
    status = Status()
    return Step(
        computes=Computes(turns=(compute,)), state=state,
        boundary=StepBoundary(objective.model, status),
        facts=ModelFacts(), world=World(LaunchInfo(), torch.device("cpu"), 1),
        health=Health(BadStepConfig()), clip=clip or Clip(), status=status)
