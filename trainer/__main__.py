"""The command line: arguments → command → exit code."""

from __future__ import annotations

import contextlib
import io
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from functools import partial
from typing import Any

from trainer.diagnosis import is_foreign, lost_peer
from trainer.errors import (
    EXIT_COMPLETE,
    EXIT_CONFIG,
    EXIT_FAILURE,
    EXIT_STOPPED,
    UNFIT,
    ConfigError,
    StopRequested,
    TrainerError,
)
from trainer.flags import refuse_empty
from trainer.limits import allow_files, check_current_folder, check_environment
from trainer.orders import Orders
from trainer.pipe import fill_descriptors, outlive_console, quiet_pipe, say
from trainer.stop import StopRequest, attend

COMMANDS = {
    "inspect": "what is in a run folder",
    "compare": "whether two runs have the same bits",
    "evaluate": "the metrics of a checkpoint",
    "predict": "what a checkpoint's model gives for each sample",
    "export": "a checkpoint's model as files for others, read back and compared",
    "report": "what happened in one or more runs: a page with plots, and the plots",
    "lr-find": "a range test of the learning rate",
    "profile": "where the time of a step goes",
}
PREPARING = ("start", "join", "build", "warm-up", "restore")
"""Phases in which there is nothing that isn't on disk already."""

TELL_S = 5.0
"""Seconds after the end of a complete run until what holds the process up is told."""

_PRELOADED: dict[tuple[str, ...], Any] = {}
"""Arguments → configuration, where a launcher's server has parsed them for its ranks (0.2 s)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train, or do what the first argument names; returns the exit code.

    Called by `python -m trainer`, and by `python -m launch` in each rank.
    """
    fill_descriptors()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if argv is None:  # a rank of `python -m launch` may outlive that folder
            check_current_folder()
        if arguments and arguments[0] in COMMANDS:
            from importlib import import_module

            refuse_empty(arguments)
            name = arguments[0].replace("-", "_")
            if isinstance(sys.stdout, io.TextIOWrapper):  # a locale may lack letters
                sys.stdout.reconfigure(errors="backslashreplace")
            with quiet_pipe():
                return int(import_module(f"trainer.commands.{name}").main(arguments[1:]))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        if error.errno not in UNFIT or is_foreign(error):
            raise
        print(f"error: {error}; choose a folder that can be read", file=sys.stderr)
        return EXIT_CONFIG
    return run(arguments, attend())


def preload(argv: Sequence[str]) -> int:
    """Import, parse and read what all ranks need.

    Called once by `python -m launch`, in the server that ranks are forked from: it runs no tensor
    operation, starts no thread and touches no device. Returns the exit code: 0, or 2 after an
    error was shown.
    """
    if argv and argv[0] in COMMANDS:
        return 0

    import safetensors.torch  # noqa: F401
    import tensorboard.summary.writer.record_writer  # noqa: F401
    import torch.utils.tensorboard  # noqa: F401

    import trainer.build
    import trainer.loop  # noqa: F401
    from trainer import cli, folder
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


def run(arguments: Sequence[str], stop: StopRequest, given: Any = None) -> int:
    """Train as the arguments say, or as the configuration `given` does; returns the exit code."""
    from trainer import cli
    from trainer.failure import Failure
    from trainer.launcher import leave_launcher, tell
    from trainer.log import Log
    from trainer.world import Launch, World

    log, launch, code, agent = Log(), Launch(), EXIT_FAILURE, os.getppid()
    failure, last_words, watched, over = Failure(log), "", dict[str, Any](), False
    orders = Orders()

    def leave() -> int:
        return _leave(log, launch, stop, agent)

    def late() -> int:
        if over:  # told by now for whom
            tell("returned", EXIT_COMPLETE)
            return EXIT_COMPLETE
        parts = watched.get("parts")
        saved = parts is not None and log.phase == "finish"  # the last step, before the test
        if saved or (parts and parts.survive_beside(lost=False) and parts.kept_beside):
            what = "the test of the best weights" if saved else "the next one"
            why = (f"stopped on request after step {log.step}: {what} didn't end within "
                   f"--stop.grace-s {config.stop.grace_s:g}; the same command goes on from there")
            log.event("stop", why=why, exit_code=EXIT_STOPPED)
            log.announce(why)
            leave_launcher(EXIT_STOPPED, launch, lambda: stop.senders[agent])
            return EXIT_STOPPED
        log.error(f"--stop.grace-s {config.stop.grace_s:g}: step {log.step} ({log.phase}) didn't "
                  "end in that time; leaving without having saved it")
        return EXIT_FAILURE

    try:
        launch = Launch.from_environment()
        allow_files(launch.local_size, launch.size - launch.local_size)
        check_environment()
        log = Log(launch.rank)
        failure = Failure(log)
        if (descriptor := os.environ.get("TRAINER_LAUNCHER_FD")) is not None:
            stop.watch(orders.follow(int(descriptor)), "the launcher")
        stop.leave_when(lambda: log.phase in PREPARING, leave)
        commands = ", ".join(COMMANDS)
        config = given or _PRELOADED.get(tuple(arguments)) or cli.parse(
            arguments, show=launch.rank == 0, commands=commands)
        outlive_console()
        log.set_level(config.log.level)
        failure.config = config
        tell("run", os.path.abspath(str(config.run)))
        stop.limit(config.stop.grace_s, late)
        threads = None if config.world.threads == "auto" else config.world.threads
        log.phase = "join"
        with World.form(device=config.device, timeout_s=config.world.timeout_s, threads=threads,
                        launch=launch) as world:
            orders.attach(world)
            code = attempt(config, world, log, stop, agent, failure, watched)
    except ConfigError as error:
        code = error.exit_code
        log.event("refused", why=str(error))
        # What is wrong on all ranks is said by rank 0; once they train, each speaks for itself.
        alone = log.phase not in ("start", "build") and error.teller is None
        if launch.rank == 0 or alone:
            _show_cause(error)
            log.error(last_words := str(error))
    except TrainerError as error:
        code = error.exit_code
        failure.end(error)
        if launch.rank == 0:
            failed = code not in (EXIT_COMPLETE, EXIT_STOPPED)
            last_words = str(error) if failed else ""
            (log.error if failed else log.info)(str(error))
    except BaseException as error:  # SystemExit of the task's code, for one: no end of a run
        if isinstance(error, SystemExit) and log.phase == "start":
            raise  # after --help
        stop.leave_if_idle()
        failure.note(error)
        code, last_words = failure.explain()
    _end_workers()
    log.close()
    leave_launcher(code, launch, lambda: stop.senders[agent], last_words=last_words)
    over = code == EXIT_COMPLETE
    if over and given is None and _lasting_threads():
        threading.Thread(target=_tell_threads, args=(log,), name="end", daemon=True).start()
    return code


def attempt(  # type: ignore[no-untyped-def]
    config, world, log, stop, agent, failure, watched, *, unwatched=False
) -> int:
    """Collective. Build the run and train to its end; what can be kept of a failure is saved.

    Args:
        agent: pid of the launcher.
        watched: is given the "parts", once they are built.
        unwatched: --watchdog.limit-s auto is no limit.
    """
    from trainer.build import build
    from trainer.failure import forget_workers
    from trainer.launcher import tell
    from trainer.loop import train
    from trainer.watchdog import Watchdog

    limit_s, own = config.watchdog.limit_s, os.getpid()
    if limit_s == "auto":
        limit_s = math.inf if unwatched else None
    start_s = None if config.watchdog.start_s == "auto" else config.watchdog.start_s
    with Watchdog(world, log, limit_s=limit_s, start_s=start_s,
                  tell=partial(tell, "failure")) as watchdog:
        parts = watched["parts"] = build(config, world, log, stop, watchdog.pulse)
        watchdog.rescue_with(parts.survive_beside)
        watchdog.gather(parts.timing)
        watchdog.in_flight = lambda: parts.checkpoint.in_flight
        try:
            try:
                train(parts)
            except BaseException:
                if os.getpid() != own:  # a fork that the task has made: the run isn't its to end
                    traceback.print_exc()
                    os._exit(EXIT_FAILURE)
                forget_workers()  # first: torch would raise amid what follows
                raise
        except StopRequested:
            stop.disarm()
            with contextlib.suppress(OSError):  # lines of metrics.jsonl, which the checkpoint has
                parts.close()
            raise
        except BaseException as error:
            watchdog.stop()  # what follows is what it would do
            _survive(parts, error, stop, agent, failure)
            if isinstance(error, SystemExit):
                raise RuntimeError(f"the training called sys.exit({error.code!r})") from error
            raise
        parts.close()
    return EXIT_COMPLETE


def _survive(parts, error, stop, agent, failure) -> None:  # type: ignore[no-untyped-def]
    """Keep what can be kept after an error.

    Raises:
        StopRequested: it came up while a stop was asked for, and nothing is lost.
    """
    if isinstance(error, TrainerError):
        parts.abandon()
        return
    echo, asked, log = lost_peer(error), stop.requested, parts.log
    if echo and stop.only_from(agent):
        asked = False  # torchrun's answer to the death of that peer
    if not asked:
        failure.note(error, step=parts.current_step)
    kept = parts.survive(own=not echo)
    parts.abandon()
    if not (asked and kept):
        return
    stop.leave_if_idle()
    log.warning(f"while stopping, step {log.step} ({log.phase}): {type(error).__name__}: {error}")
    raise StopRequested(f"stopped on request after step {log.step}; "
                        "the same command goes on from there") from error


def _leave(log, launch, stop, agent) -> int:  # type: ignore[no-untyped-def]
    """The last words of a stop that comes before the first step: nothing is to be saved."""
    from trainer.launcher import has_lost_rank, leave_launcher

    if stop.only_from(agent) and has_lost_rank(launch):  # torchrun starts them all again
        log.event("failure", why="the launcher ends the attempt: a rank is gone", echo=True)
        return EXIT_FAILURE
    why = f"stopped on request ({stop.reason}) before the first step of this start"
    log.event("stop", why=why, exit_code=EXIT_STOPPED)
    log.info(f"{why}; the same command goes on")
    leave_launcher(EXIT_STOPPED, launch, lambda: stop.senders[agent])
    return EXIT_STOPPED


def _lasting_threads() -> list[str]:
    return [t.name for t in threading.enumerate()
            if not t.daemon and t is not threading.main_thread()]


def _tell_threads(log) -> None:  # type: ignore[no-untyped-def]
    """Say for what Python waits at the end, if it does."""
    time.sleep(TELL_S)
    if names := _lasting_threads():
        log.warning(f"the run is complete, and the process waits for threads of the task's, or of "
                    f"a library: {', '.join(names)}; a stop signal ends that after --stop.grace-s, "
                    "and threads that are made with daemon=True aren't waited for")


def _end_workers() -> None:
    """Loader processes that still live after a failure. They are deaf to the SIGTERM with which
    Python's own end would ask them, before it waits for them."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch would raise here, at each one's end
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


def _show_cause(error: BaseException) -> None:
    """The traceback of what the user's own code raised, where that is behind the error."""
    from trainer.log import writable

    cause = error.__cause__
    if cause is not None and not isinstance(cause, OSError) and is_foreign(cause):
        say(writable("".join(traceback.format_exception(cause))))


if __name__ == "__main__":
    code = main()
    say("", sys.stdout)
    say("", sys.stderr)
    if code:  # all is on disk, the interpreter's own end takes seconds, and a thread of the task's
        os._exit(code)  # may never let it come
    sys.exit(code)
