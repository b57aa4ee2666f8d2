"""Turn a fork of the server into a rank: its session, environment, output streams and exit."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from trainer.errors import EXIT_COMPLETE, EXIT_FAILURE
from trainer.resilience import processes
from trainer.resilience.stop_signals import STOP_SIGNALS
from trainer.telemetry.std_streams import say

Entry = Callable[[list[str]], int]


def run_worker(
    main: Entry, argv: Sequence[str], env: dict[str, str], *, launcher_fd: int,
    output_fds: Sequence[int], close_fds: Sequence[int],
) -> NoReturn:
    """Turn this new fork into a rank, call `main(argv)` and exit with its return value. The stop
    signals stay blocked until `main` handles and unblocks them, so that none is lost. `output_fds`
    become stdout and stderr (empty: keep the inherited ones)."""
    try:
        os.setsid()  # Ctrl-C in the terminal must not reach a rank a second time
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in STOP_SIGNALS:
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default)
        for fd in close_fds:
            os.close(fd)
        _set_streams(output_fds)
        processes.separate_reads()  # of files that the task's module has opened
        os.environ |= {**env, "TRAINER_LAUNCHER_FD": str(launcher_fd)}
        sys.argv = ["trainer", *argv]
        processes.set_name(f"rank {env['RANK']}")
        code = _call(main, list(argv))
        _finish(code)
        with contextlib.suppress(OSError):  # the launcher has died
            os.write(launcher_fd, b"returned\n")
        os._exit(code)
    except BaseException:
        traceback.print_exc()
    finally:  # always: this process must never return into the fork server's loop
        os._exit(EXIT_FAILURE)


def _set_streams(output_fds: Sequence[int]) -> None:
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for fd, target in zip(output_fds, (1, 2), strict=False):
        os.dup2(fd, target)
        os.close(fd)
    # A rank may be killed at any time: flush its output after each line.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _call(main: Entry, argv: list[str]) -> int:
    try:
        return int(main(argv) or EXIT_COMPLETE)
    except SystemExit as end:
        return exit_code(end, EXIT_FAILURE)
    except BaseException:
        traceback.print_exc()
        return EXIT_FAILURE


def exit_code(end: SystemExit, default: int) -> int:
    """The code with which Python would exit; `default` after printing a message."""
    if end.code is None or isinstance(end.code, int):
        return end.code or EXIT_COMPLETE
    print(end.code, file=sys.stderr)
    return default


def _finish(code: int) -> None:
    """Shut down as the interpreter does, without unloading every module (about a second). A failed
    rank only flushes its output: a thread of the task may never end."""
    if code == EXIT_COMPLETE:
        threading._shutdown()  # type: ignore[attr-defined]  # joins non-daemon threads
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        say("", stream)
