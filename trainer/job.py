"""One save, from the copy of the state in memory to its end."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from trainer.errors import TrainerError


@dataclass
class Job:
    """What is to be written, and how far that is."""

    step: int
    kind: str
    tensors: dict[str, dict[str, Tensor]]
    facts: dict[str, Any]
    protect: set[int]
    """Steps whose checkpoints stay, whatever their age."""
    copied: threading.Event = field(default_factory=threading.Event)
    """Set when parameters and optimizer state may change again."""
    error: BaseException | None = None
    done: bool = False

    @property
    def told(self) -> str:
        """What people are told of its failure."""
        kind = "" if isinstance(self.error, OSError | TrainerError) else type(self.error).__name__
        why = ": ".join(filter(None, (kind, str(self.error))))
        return f"step {self.step} was not saved: {why}"
