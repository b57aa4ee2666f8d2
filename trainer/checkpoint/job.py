"""One save: the state copied to memory, and the progress of writing it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from trainer.errors import TrainerError


@dataclass(frozen=True, kw_only=True)
class SavePolicy:
    """When saves are due by the clock, and what a failed save leads to."""

    on_error: str
    """--checkpoint.on-error: "continue" or "stop"."""
    every_s: float = 0.0
    """--checkpoint.every-s: seconds between saves by the clock; 0 is off."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What each checkpoint records about the run besides its training state."""

    run_id: str
    attempt: Mapping[str, Any]
    """Further entries of state.json about this attempt (settings, circumstances)."""
    metric_lines: list[Any]
    """The metric lines since the last committed checkpoint; each save contains them."""
    sync: Callable[[], None] = lambda: None
    """Makes the metric lines written so far durable; called before a commit."""


@dataclass
class Job:
    """A checkpoint to be written by the writer thread, and its progress."""

    step: int
    kind: str
    tensors: dict[str, dict[str, Tensor]]
    facts: dict[str, Any]
    protect: set[int]
    """Steps whose checkpoints are not pruned."""
    copied: threading.Event = field(default_factory=threading.Event)
    """Set once parameters and optimizer state may change again."""
    error: BaseException | None = None
    done: bool = False

    @property
    def failure_message(self) -> str:
        """The message for users about a failed save."""
        kind = "" if isinstance(self.error, OSError | TrainerError) else type(self.error).__name__
        why = ": ".join(filter(None, (kind, str(self.error))))
        return f"step {self.step} was not saved: {why}"
