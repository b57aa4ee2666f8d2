"""A fault-tolerant distributed PyTorch trainer: kill any process, get the same bits."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.commands.library import Trained, train
    from trainer.config.schema import Config
    from trainer.errors import ConfigError
    from trainer.task import Outcome, Task
    from trainer.tasks import losses

__all__ = ["Config", "ConfigError", "Outcome", "Task", "Trained", "losses", "train"]

_HOMES = {
    "Config": "trainer.config.schema", "ConfigError": "trainer.errors", "Outcome": "trainer.task",
    "Task": "trainer.task", "Trained": "trainer.commands.library",
    "losses": "trainer.tasks.losses", "train": "trainer.commands.library",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    # Signal handlers must be installed before torch is imported, so nothing is imported here.
    if name in _HOMES:
        from importlib import import_module

        home = import_module(_HOMES[name])
        return getattr(home, name, home)  # the loss module is an entry itself
    raise AttributeError(f"module 'trainer' has no attribute {name!r}")
