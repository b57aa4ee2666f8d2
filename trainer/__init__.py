"""A fault-tolerant distributed PyTorch trainer: kill any process, get the same bits."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.commands.library import Trained, train
    from trainer.config.schema import Config
    from trainer.errors import ConfigError
    from trainer.task import Outcome, Task

__all__ = ["Config", "ConfigError", "Outcome", "Task", "Trained", "train"]

_HOMES = {
    "Config": "trainer.config.schema", "ConfigError": "trainer.errors", "Outcome": "trainer.task",
    "Task": "trainer.task", "Trained": "trainer.commands.library",
    "train": "trainer.commands.library",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    # Signal handlers must be installed before torch is imported, so nothing is imported here.
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'trainer' has no attribute {name!r}")
