"""One rank as a process: from the arguments, through failures and stops, to the exit code."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from trainer.config import command_line
from trainer.config.schema import Config
from trainer.distributed.peer_errors import lost_peer
from trainer.distributed.world import LaunchInfo, World
from trainer.errors import (
    EXIT_COMPLETE,
    EXIT_FAILURE,
    EXIT_STOPPED,
    FINAL_EXIT_CODES,
    ConfigError,
    StopRequested,
    TrainerError,
)
from trainer.optim.precision import set_determinism
from trainer.resilience.diagnosis import Failure, forget_workers, is_foreign
from trainer.resilience.launcher_channel import Orders, has_lost_rank, leave_launcher, tell
from trainer.resilience.preflight import allow_files, check_cache_folder
from trainer.resilience.stop_signals import StopSignals
from trainer.storage.secrets import hide
from trainer.telemetry.events import Log, writable
from trainer.telemetry.status import Phase
from trainer.telemetry.std_streams import ignore_output_errors, say

if TYPE_CHECKING:  # its import takes seconds: a wrong configuration is reported before
    from trainer.run.guard import Guard

LEAVING_S = 0.5
"""Seconds of --stop.grace-s that are kept for the exit after the uploads."""
LASTING_AFTER_S = 5.0
"""Seconds after a complete run until a warning names what keeps the process alive."""


class RankProcess:
    """The process of one rank. The handlers of `stop` are installed; `commands` are the names of
    the other commands, which a misspelt one is compared with."""

    def __init__(self, stop: StopSignals, commands: Sequence[str] = ()) -> None:
        self._stop, self._commands = stop, ", ".join(commands)
        self._log, self._launch = Log(), LaunchInfo()
        self._training = Training(self._log, stop)
        self._grace_s, self._complete = math.inf, False

    def run(
        self, arguments: Sequence[str], config: Config[Any] | None = None, *,
        is_program: bool = True,
    ) -> int:
        """Train, by the arguments or a configuration; returns the exit code. Unless it
        `is_program`, the process continues afterwards."""
        code, last_words = EXIT_FAILURE, ""
        try:
            code = self._train(arguments, config)
        except ConfigError as error:
            code, last_words = error.exit_code, self._explain_refusal(error)
        except TrainerError as error:
            code = error.exit_code
            self._training.failure.end(error)
            if self._launch.rank == 0:
                failed = code not in (EXIT_COMPLETE, EXIT_STOPPED)
                last_words = str(error) if failed else ""
                (self._log.error if failed else self._log.info)(str(error))
        except BaseException as error:  # a SystemExit in the task's code is a failure too
            if isinstance(error, SystemExit) and self._log.status.phase is Phase.START:
                raise  # after --help
            self._stop.leave_if_idle()
            self._training.failure.note(error)
            code, last_words = self._training.failure.explain()
        _end_workers()
        self._log.close()
        self._leave(code, last_words)
        self._complete = code == EXIT_COMPLETE
        if self._complete and is_program:
            threading.Thread(target=_name_lasting, args=(self._log,), daemon=True).start()
        return code

    def _train(self, arguments: Sequence[str], config: Config[Any] | None) -> int:
        self._launch = launch = LaunchInfo.from_environment()
        allow_files()
        check_cache_folder()
        self._log = log = Log(launch.rank)
        stop, orders = self._stop, Orders()
        self._training = Training(log, stop)
        if (descriptor := os.environ.get("TRAINER_LAUNCHER_FD")) is not None:
            stop.watch(orders.follow(int(descriptor)), "the launcher")
        stop.leave_when(lambda: log.status.has_nothing_at_stake, self._leave_before_training)
        config = config or command_line.parse_config(arguments, show=launch.rank == 0,
                                                     commands=self._commands)
        ignore_output_errors()
        log.set_level(config.log.level)
        hide((name, value) for name, value, _ in config.leaves())
        self._training = training = Training(log, stop, config)
        self._grace_s = config.stop.grace_s
        tell("run", os.path.abspath(str(config.run)))
        stop.limit(self._grace_s, self._leave_late)
        log.status.enter(Phase.JOIN)
        set_determinism(config.numerics.deterministic == "on")
        with World.form(device=config.device, timeout_s=config.world.timeout_s,
                        threads=config.world.threads, launch=launch) as world:
            if world.users_nccl_settings:
                log.info(f"kept from the environment: {', '.join(world.users_nccl_settings)}; "
                         "torch may end a rank before it has saved (docs/gpus.md)")
            orders.attach(world)
            training.run(config, world)
        return EXIT_COMPLETE

    def _explain_refusal(self, error: ConfigError) -> str:
        """Log a refused configuration on one rank; returns the message for the launcher."""
        self._log.event("refused", why=str(error))
        # Rank 0 reports errors that all ranks have; in training each rank reports its own.
        alone = (self._log.status.phase not in (Phase.START, Phase.BUILD)
                 and error.origin_rank is None)
        if self._launch.rank != 0 and not alone:
            return ""
        show_cause(error)
        self._log.error(str(error))
        return str(error)

    def _leave(self, code: int, last_words: str = "") -> None:
        stop = self._stop
        leave_launcher(code, self._launch, lambda: stop.senders[stop.launcher],
                       last_words=last_words)

    def _leave_before_training(self) -> int:
        """Report a stop before the first step, with nothing to save; returns the exit code."""
        stop, log, launch = self._stop, self._log, self._launch
        if stop.only_from(stop.launcher) and has_lost_rank(launch):  # torchrun restarts all ranks
            log.event("failure", why="the launcher ends the attempt: a rank is gone", echo=True)
            return EXIT_FAILURE
        why = f"stopped on request ({stop.reason}) before the first step of this start"
        log.event("stop", why=why, exit_code=EXIT_STOPPED)
        log.info(f"{why}; run the same command to continue")
        self._leave(EXIT_STOPPED)
        return EXIT_STOPPED

    def _leave_late(self) -> int:
        """Save the last step, in another thread, if a stop has exceeded --stop.grace-s; returns the
        exit code."""
        if self._complete:  # the process waits for threads or processes of the task
            tell("returned", EXIT_COMPLETE)
            return EXIT_COMPLETE
        guard, log, status = self._training.guard, self._log, self._log.status
        # In the last phase the last step is already saved, and the best weights are tested.
        saved = guard is not None and status.phase is Phase.FINISH
        if saved or (guard is not None and guard.emergency_save_from_watchdog(lost=False)):
            what = "the test of the best weights" if saved else "the next step"
            why = (f"stopped on request after step {status.step}: {what} didn't end within "
                   f"--stop.grace-s {self._grace_s:g}; run the same command to continue")
            log.event("stop", why=why, exit_code=EXIT_STOPPED)
            log.warn_once(why)
            self._leave(EXIT_STOPPED)
            return EXIT_STOPPED
        log.error(f"--stop.grace-s {self._grace_s:g}: step {status.step} ({status.phase}) didn't "
                  "end in that time; the process exits without saving it")
        return EXIT_FAILURE


class Training:
    """The training of one attempt on this rank, and what is saved if it fails."""

    def __init__(self, log: Log, stop: StopSignals, config: Config[Any] | None = None) -> None:
        self._log, self._stop = log, stop
        self.failure = Failure(log, config)
        self.guard: Guard | None = None  # of the run, once it is built

    def run(self, config: Config[Any], world: World, *, watched: bool = True) -> None:
        """Collective. Build the run and train to its end; after a failure, save what can be saved.
        `--watchdog.limit-s auto` sets no limit unless `watched`."""
        from trainer.loop import train
        from trainer.resilience.watchdog import Watchdog
        from trainer.run.build import build
        from trainer.run.warmup import start

        limit_s: Any = config.watchdog.limit_s
        own, stop = os.getpid(), self._stop
        if limit_s == "auto":
            limit_s = None if watched else math.inf
        start_s = None if config.watchdog.start_s == "auto" else config.watchdog.start_s
        with (self._notices(config, world), self._uploads_finished(config, world),
              Watchdog(world, self._log, limit_s=limit_s, start_s=start_s) as watchdog):
            world.connect_gpus()
            built = build(config, world, self._log, stop, watchdog.marks)
            guard = self.guard = built.guard
            watchdog.guard(lambda: guard.emergency_save_from_watchdog() is not None,
                           lambda: guard.checkpoint.in_flight, guard.timing)
            try:
                try:
                    train(start(built))
                except BaseException:
                    if os.getpid() != own:  # a process forked by the task, not a rank
                        traceback.print_exc()
                        os._exit(EXIT_FAILURE)
                    forget_workers()  # first: torch's handler could raise during the cleanup below
                    raise
            except StopRequested:
                stop.disarm()
                with contextlib.suppress(OSError):  # the checkpoint has the metric lines too
                    guard.close()
                raise
            except BaseException as error:
                watchdog.stop()  # from here on this thread saves and reports
                self._survive(guard, error)
                if isinstance(error, SystemExit):
                    raise RuntimeError(f"the training called sys.exit({error.code!r})") from error
                raise
            guard.close()

    def _notices(self, config: Config[Any], world: World) -> contextlib.AbstractContextManager[Any]:
        """Collective. On one rank of each machine, a notice requests a stop."""
        if (value := config.stop.on_notice) == "off":
            return contextlib.nullcontext()
        from trainer.resilience.notices import NoticeWatch

        return world.fail_together(
            lambda: contextlib.nullcontext() if world.local_rank else
            NoticeWatch(value, self._stop.request, self._log))

    @contextlib.contextmanager
    def _uploads_finished(self, config: Config[Any], world: World) -> Iterator[None]:
        """Finally wait for the uploads to the mirror: at the end of a run without a limit; after a
        stop for --stop.grace-s from the signal on; after a failure as long, unless the launcher
        restarts the ranks: the next attempt has this disk."""
        ended_s, restarts = math.inf, False

        def left_s() -> float:
            began_s = self._stop.since_s if self._stop.requested else ended_s
            return began_s + config.stop.grace_s - LEAVING_S - time.monotonic()

        try:
            yield
        except BaseException as error:
            is_final = getattr(error, "exit_code", EXIT_FAILURE) in FINAL_EXIT_CODES
            restarts = world.launch.run_id is not None and not is_final
            ended_s = time.monotonic()
            raise
        finally:
            if self.guard is not None and self.guard.mirror is not None and not restarts:
                self.guard.mirror.drain(left_s)
                if self.guard.mirror.error is not None:  # of the fence: refused at the last upload
                    raise self.guard.mirror.error

    def _survive(self, guard: Guard, error: BaseException) -> None:
        """Save what can be saved after an error. Raises StopRequested in place of an error that
        came while a stop was requested, if nothing is lost."""
        if isinstance(error, TrainerError):
            guard.abandon()
            return
        stop, status, secondary = self._stop, self._log.status, lost_peer(error)
        # A signal from the launcher alone is torchrun's reaction to the death of the peer.
        asked = stop.requested and not (secondary and stop.only_from(stop.launcher))
        if not asked:
            self.failure.note(error, step=guard.current_step)
        kept = guard.emergency_save(own=not secondary)
        guard.abandon()
        if asked and kept:
            stop.leave_if_idle()
            self._log.warning(f"while stopping, step {status.step} ({status.phase}): "
                              f"{type(error).__name__}: {error}")
            raise StopRequested(f"stopped on request after step {status.step}; "
                                "run the same command to continue") from error

    def release(self) -> None:
        """Give back what the run holds, in a process that continues."""
        if self.guard is not None:
            self.guard.release()
        self.guard = None


def show_cause(error: BaseException) -> None:
    """Print the traceback of the exception in user code that caused an error, if any."""
    cause = error.__cause__
    if cause is not None and not isinstance(cause, OSError) and is_foreign(cause):
        say(writable("".join(traceback.format_exception(cause))))


def _name_lasting(log: Log) -> None:
    """Warn of threads and child processes that keep the process alive after the end of a run."""
    time.sleep(LASTING_AFTER_S)
    names = [thread.name for thread in threading.enumerate()
             if not thread.daemon and thread is not threading.main_thread()]
    names += [f"{child.name} (pid {child.pid})" for child in multiprocessing.active_children()
              if not child.daemon]
    if names:
        log.warning(f"the run is complete, but the process waits for threads or processes of the "
                    f"task or of a library: {', '.join(names)}; a stop signal ends the wait after "
                    "--stop.grace-s, and those made with daemon=True are not waited for")


def _end_workers() -> None:
    """Kill loader processes that are left after a failure. They ignore SIGTERM, which Python would
    send them at exit before it waits for them."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise for each process
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()
