"""The command line: arguments → command → exit code."""

from __future__ import annotations

import io
import os
import platform
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from trainer.errors import EXIT_CONFIG, PATH_ERRNOS, ConfigError, TrainerError
from trainer.resilience.diagnosis import is_foreign
from trainer.resilience.preflight import check_current_folder, use_utf8
from trainer.resilience.stop_signals import attend
from trainer.telemetry.events import writable
from trainer.telemetry.std_streams import fill_descriptors, quiet_broken_pipe, say

COMMANDS = ("inspect", "compare", "evaluate", "predict", "export", "report", "runs", "lr-find",
            "profile")
DRY_RUN = "--dry-run"
"""In place of training, after the arguments of a run: a flag that is a command."""
MODULES = {"report": "report.report"}
"""Command → its module, if their names differ."""

_PRELOADED: dict[tuple[str, ...], Any] = {}
"""Arguments → configuration: the launcher's server parses them once for its ranks (0.2 s)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train, or run the command that the first argument names; returns the exit code. Called by
    `python -m trainer`, and by `python -m launch` in each rank."""
    fill_descriptors()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if argv is None:  # not for ranks of `python -m launch`, which may outlive it
            check_current_folder("trainer")
            use_utf8()
        command = DRY_RUN if DRY_RUN in arguments else arguments[0] if arguments else ""
        if command in COMMANDS or command == DRY_RUN:
            from importlib import import_module

            from trainer.config.command_line import check_not_empty

            check_not_empty(arguments)
            rest = arguments if command == DRY_RUN else arguments[1:]
            name = command.lstrip("-").replace("-", "_")
            if argv is None and isinstance(sys.stdout, io.TextIOWrapper):
                # The locale may not encode all letters.
                sys.stdout.reconfigure(errors="backslashreplace")
            with quiet_broken_pipe():
                module = import_module(f"trainer.commands.{MODULES.get(name, name)}")
                return int(module.main(rest))
    except TrainerError as error:
        print(f"error: {writable(str(error))}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        if error.errno not in PATH_ERRNOS or is_foreign(error):
            raise
        print(writable(f"error: {error}; choose a folder that can be read"), file=sys.stderr)
        return EXIT_CONFIG
    stop = attend()  # before torch is imported
    from trainer.commands.train import RankProcess

    return RankProcess(stop, list(COMMANDS)).run(arguments, _PRELOADED.get(tuple(arguments)))


def preload(argv: Sequence[str]) -> int:
    """Import, parse and read what all ranks need; returns the exit code: 0, or 2 after a printed
    error. `python -m launch` calls this once, in the server that ranks are forked from: it runs no
    tensor operation, starts no thread and uses no device."""
    if argv and (argv[0] in COMMANDS or DRY_RUN in argv):
        return 0

    import safetensors.torch  # noqa: F401
    import tensorboard.summary.writer.record_writer  # noqa: F401
    import torch.utils.tensorboard

    import trainer.loop
    import trainer.run.build
    import trainer.run.warmup  # noqa: F401
    from trainer.commands.train import show_cause
    from trainer.config import command_line
    from trainer.run import circumstances, run_dir
    from trainer.run.prepare import bind_seed
    from trainer.storage.secrets import hide
    from trainer.telemetry.events import Log

    try:
        config = command_line.parse_config(argv, commands=", ".join(COMMANDS))
        task = bind_seed(config.task, config.seed)
        if hasattr(task, "preload"):
            task.preload()
    except ConfigError as error:
        show_cause(error)
        Log().error(str(error))
        return error.exit_code
    torch.compiler.disable()  # imports what the first optimizer of each rank would import: 1-4 s
    hide((name, value) for name, value, _ in config.leaves())
    run_dir.package_versions()
    platform.platform()  # starts a process, and keeps the answer
    circumstances.loaded_code()
    _PRELOADED[tuple(argv)] = config
    return 0


def trainer_command() -> NoReturn:
    """`python -m trainer`, and the command `trainer`: the whole process."""
    code = main()
    say("", sys.stdout)
    say("", sys.stderr)
    if code:  # all is on disk; the interpreter's shutdown takes seconds, and a thread of the task
        os._exit(code)  # may block it for ever
    sys.exit(code)


if __name__ == "__main__":
    trainer_command()
