"""The command line: arguments → command → exit code."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from trainer.stop import StopRequest, process_descriptor

COMMANDS = {
    "inspect": "what is in a run folder",
    "compare": "whether two runs have the same bits",
}
_PRELOADED: dict[tuple[str, ...], Any] = {}
"""Arguments → configuration, where a launcher's server has parsed them for its ranks (0.2 s)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train, or do what the first argument names; returns the exit code.

    Called by `python -m trainer`, and by `python -m launch` in each rank.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in COMMANDS:
        from importlib import import_module

        return import_module(f"trainer.commands.{arguments[0]}").main(arguments[1:])
    stop = StopRequest()
    stop.install()  # before anything heavy is imported
    return run(arguments, stop)


def preload(argv: Sequence[str]) -> int:
    """Import, parse and read what all ranks need.

    Called once by `python -m launch`, in the server that ranks are forked from: it runs no tensor
    operation, starts no thread and touches no device. Returns the exit code: 0, or 2 after an
    error was shown.
    """
    if argv and argv[0] in COMMANDS:
        return 0

    import tensorboard.summary.writer.record_writer  # noqa: F401
    import torch.utils.tensorboard  # noqa: F401

    import trainer.build
    import trainer.loop  # noqa: F401
    from trainer import cli, folder
    from trainer.errors import ConfigError
    from trainer.log import Log
    from trainer.prepare import bind_seed

    try:
        config = cli.parse(argv, commands=", ".join(COMMANDS))
        task = bind_seed(config.task, config.seed)
        if hasattr(task, "preload"):
            task.preload()
    except ConfigError as error:
        _show_cause(error)
        Log().error(str(error))
        return error.exit_code
    folder.package_versions()
    _PRELOADED[tuple(argv)] = config
    return 0


def run(arguments: Sequence[str], stop: StopRequest) -> int:
    """Train as the arguments say; returns the exit code."""
    from trainer import cli
    from trainer.errors import (
        EXIT_COMPLETE,
        EXIT_FAILURE,
        EXIT_STOPPED,
        ConfigError,
        TrainerError,
    )  # fmt: skip
    from trainer.launcher import leave_launcher
    from trainer.log import Log
    from trainer.network import lost_peer
    from trainer.world import Launch, World

    log, launch, code = Log(), Launch(), EXIT_FAILURE
    try:
        launch = Launch.from_environment()
        log = Log(launch.rank)
        _watch_launcher(stop, launch)
        commands = ", ".join(COMMANDS)
        config = _PRELOADED.get(tuple(arguments)) or cli.parse(
            arguments, show=launch.rank == 0, commands=commands)
        log.set_level(config.log.level)
        _tell_launcher(str(config.run))
        stop.limit(config.stop.grace_s, lambda: log.error(
            f"--stop.grace-s {config.stop.grace_s:g}: step {log.step} ({log.phase}) didn't end "
            "in that time; leaving without having saved it"))
        threads = None if config.world.threads == "auto" else config.world.threads
        log.phase = "join"
        with World.form(device=config.device, timeout_s=config.world.timeout_s, threads=threads,
                        launch=launch) as world:
            code = _train(config, world, log, stop)
    except ConfigError as error:
        code = error.exit_code
        log.event("refused", why=str(error))
        # What is wrong on all ranks is said by rank 0; once they train, each speaks for itself.
        alone = log.phase not in ("start", "build") and error.teller is None
        if launch.rank == 0 or alone:
            _show_cause(error)
            log.error(str(error))
    except TrainerError as error:
        code = error.exit_code
        log.event("stop", why=str(error), exit_code=code)
        if launch.rank == 0:
            say = log.info if code in (EXIT_COMPLETE, EXIT_STOPPED) else log.error
            say(str(error))
    except Exception as error:
        echo = lost_peer(error)
        log.event("failure", why=f"{type(error).__name__}: {error}", echo=echo)
        if echo:  # the cause is another rank's, which tells it
            log.warning(f"lost a peer after step {log.step} ({log.phase}); leaving")
        else:
            traceback.print_exc()
            log.error(f"step {log.step}, {log.phase}: {type(error).__name__}: {error}")
    log.close()
    leave_launcher(code, launch, signalled=stop.requested)
    return code


def _train(config, world, log, stop) -> int:  # type: ignore[no-untyped-def]
    from trainer.build import build
    from trainer.errors import EXIT_COMPLETE, StopRequested
    from trainer.loop import train
    from trainer.network import lost_peer
    from trainer.watchdog import Watchdog

    limit_s = None if config.watchdog.limit_s == "auto" else config.watchdog.limit_s
    with Watchdog(world, log, limit_s=limit_s) as watchdog:
        parts = build(config, world, log, stop, watchdog.pulse)
        watchdog.rescue_with(parts.survive_beside)
        watchdog.in_flight = lambda: parts.checkpoint.in_flight
        try:
            train(parts)
        except StopRequested:
            parts.close()
            raise
        except BaseException as error:
            watchdog.stop()  # what follows is what it would do
            if lost_peer(error):
                parts.survive()
            parts.abandon()
            raise
        parts.close()
    return EXIT_COMPLETE


def _watch_launcher(stop: StopRequest, launch) -> None:  # type: ignore[no-untyped-def]
    """Under an elastic agent: its death is a request to stop, and soon the end."""
    descriptor = os.environ.get("TRAINER_LAUNCHER_FD")
    if descriptor is not None:
        stop.watch(int(descriptor), "the launcher")
    elif launch.run_id is not None:
        stop.watch(process_descriptor(os.getppid()), "the launcher")


def _tell_launcher(run: str) -> None:
    """Let `python -m launch` know where to read how far the run has come."""
    descriptor = os.environ.get("TRAINER_LAUNCHER_FD")
    if descriptor is not None:
        with contextlib.suppress(OSError):  # it is gone, and its watcher knows
            os.write(int(descriptor), f"run {os.path.abspath(run)}\n".encode())


def _show_cause(error: BaseException) -> None:
    """The traceback of what the user's own code raised, where that is behind the error."""
    cause = error.__cause__
    if cause is not None and not isinstance(cause, OSError | ModuleNotFoundError):
        traceback.print_exception(cause)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    if code not in (0, 2):
        os._exit(code)  # all is on disk, and the interpreter's own end takes seconds
    sys.exit(code)
