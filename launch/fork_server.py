"""The fork server: imports torch and the trainer once, then forks ranks on request. The launcher
forks it; `python -m launch.fork_server` replaces a killed one. JSON packets over a socket:

- to the launcher: `{"ready": true}` or `{"nothing_to_start": EXIT_CODE}`, once; `{"started":
  LOCAL_RANK, "pid": PID}` with the rank's pidfd, its channel and the read ends of its output, if
  it is not rank 0; `{"exited": PID, "code": CODE}`;
- to the server: `{"fork": LOCAL_RANK, "env": {…}}`.

When the launcher dies, the server waits a few seconds for the ranks to save, then kills the rest.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from trainer.errors import EXIT_COMPLETE, EXIT_CONFIG, EXIT_FAILURE
from trainer.resilience.stop_signals import STOP_SIGNALS, drain, is_readable, wakeup_pipe
from trainer.storage import processes
from trainer.telemetry.std_streams import say

Entry = Callable[[list[str]], int]

ORPHAN_TIMEOUT_S = 4.3  # how long ranks may run after the launcher's death before they are killed
PACKET_BYTES = 1 << 17
MAX_FDS = 4


def send(control: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Send a message with file descriptors. Raises OSError if the peer has died."""
    socket.send_fds(control, [json.dumps(message).encode()], fds)


def receive(control: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Receive the next message and its file descriptors; None if the peer has died."""
    try:
        packet, fds, _, _ = socket.recv_fds(control, PACKET_BYTES, MAX_FDS)
    except ConnectionError:
        return None, []
    return (json.loads(packet) if packet else None), fds


def fork() -> int:
    """`os.fork` without Python's warning about threads, which counts numpy's: they survive it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def run_server(control: socket.socket, entry: str, argv: Sequence[str]) -> NoReturn:
    """Import `entry` (`module:function`), then fork ranks on request until the launcher dies."""
    os.setsid()
    processes.set_name("fork server")
    # Blocked, not ignored: an early stop request stays pending until the new rank handles it.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        _Server(control, entry, argv).run()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


class _Server:
    def __init__(self, control: socket.socket, entry: str, argv: Sequence[str]) -> None:
        self._control, self._entry, self._argv = control, entry, list(argv)
        self._living: set[int] = set()  # pids of ranks
        self._wakeup_fd, write_fd = wakeup_pipe()
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # only wakes the loop
        self._inherited = [control.fileno(), self._wakeup_fd, write_fd]

    def run(self) -> NoReturn:
        processes.die_with_parent(signal.SIGKILL)  # there are no ranks to wait for yet
        code, main = load_entry(self._entry, self._argv)
        sys.stdout.flush()  # output of `--help`, or of an import, which each fork would repeat
        # A stopped server has to notice the launcher's death, too.
        processes.die_with_parent(signal.SIGCONT)
        if main is None:
            send(self._control, {"nothing_to_start": code})
            os._exit(code)
        # Freezing what is imported keeps a rank's garbage collections cheap, and its pages shared.
        gc.collect()
        gc.freeze()
        with contextlib.suppress(OSError):  # the launcher has exited: the loop notices it
            send(self._control, {"ready": True})
        while True:
            readable, _, _ = select.select([self._control.fileno(), self._wakeup_fd], [], [])
            drain(self._wakeup_fd)
            self._reap()
            if self._control.fileno() in readable:
                message, _ = receive(self._control)
                if message is None:
                    self._wait_for_orphans()
                self._fork(main, message["fork"], message["env"])

    def _fork(self, main: Entry, local_rank: int, env: dict[str, str]) -> None:
        launcher_end, rank_end = socket.socketpair()
        pipes = [os.pipe(), os.pipe()] if env["RANK"] != "0" else []  # their output gets a tag
        read_fds, write_fds = [pipe[0] for pipe in pipes], [pipe[1] for pipe in pipes]
        pid = fork()
        if pid == 0:
            run_worker(main, self._argv, env, launcher_fd=rank_end.detach(), output_fds=write_fds,
                       close_fds=[*self._inherited, launcher_end.detach(), *read_fds])
        self._living.add(pid)
        pidfd = os.pidfd_open(pid)  # by the parent: before it reaps, the pid is not reused
        with contextlib.suppress(OSError):  # the launcher has died: the loop notices it
            send(self._control, {"started": local_rank, "pid": pid},
                 [pidfd, launcher_end.fileno(), *read_fds])
        for fd in (pidfd, launcher_end.detach(), rank_end.detach(), *read_fds, *write_fds):
            os.close(fd)

    def _reap(self) -> None:
        while ended := _ended_child():
            complete = (ended.si_code, ended.si_status) == (os.CLD_EXITED, EXIT_COMPLETE)
            if ended.si_pid in self._living and not complete:
                # Child processes of a failed rank (loader workers, compilers) keep its sockets
                # open, so its peers would wait for it. Before waitpid its pid cannot be reused.
                _kill_group(ended.si_pid)
            _, status = os.waitpid(ended.si_pid, 0)
            self._living.discard(ended.si_pid)
            with contextlib.suppress(OSError):
                code = os.waitstatus_to_exitcode(status)
                send(self._control, {"exited": ended.si_pid, "code": code})

    def _wait_for_orphans(self) -> NoReturn:
        deadline_s = time.monotonic() + ORPHAN_TIMEOUT_S
        self._control.close()
        self._reap()
        while self._living and time.monotonic() < deadline_s:
            is_readable(self._wakeup_fd, deadline_s - time.monotonic())
            drain(self._wakeup_fd)
            self._reap()
        for pid in self._living:
            _kill_group(pid)
        os._exit(EXIT_COMPLETE)


def load_entry(entry: str, argv: Sequence[str]) -> tuple[int, Entry | None]:
    """Import the entry function and what it will need: (0, the function), or (exit code, None) if
    there is nothing to start, after `--help` or an error, which is printed."""
    module_name, _, function_name = entry.partition(":")
    _keep_cuda_usable()
    try:
        module = importlib.import_module(module_name)
        main = getattr(module, function_name)
        preload: Callable[[list[str]], int] | None = getattr(module, "preload", None)
        if preload is None:
            importlib.import_module("torch._dynamo")  # else the first optimizer imports it: 1-4 s
        elif code := preload(list(argv)):
            return code, None
    except SystemExit as end:
        return _exit_code(end, EXIT_CONFIG), None
    except BaseException:
        traceback.print_exc()
        print(f"launch: cannot import {entry} (see above); nothing was started",
              file=sys.stderr)
        return EXIT_CONFIG, None
    if "torch" in sys.modules and _has_spoilt_cuda():
        print(f"launch: importing {entry} for {list(argv)} has initialized CUDA, which does not "
              "survive a fork; use CUDA only in the task's methods", file=sys.stderr)
        return EXIT_CONFIG, None
    if names := ", ".join(sorted(t.name for t in threading.enumerate()[1:])):
        print(f"launch: warning: importing {entry} has started threads ({names}), which do not "
              "survive a fork; start them in the task's methods", file=sys.stderr)
    return EXIT_COMPLETE, main


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
        try:
            code = int(main(list(argv)) or EXIT_COMPLETE)
        except SystemExit as end:
            code = _exit_code(end, EXIT_FAILURE)
        if code == EXIT_COMPLETE:  # after a failure, a thread of the task may never end
            # Shut down as the interpreter does, but for unloading every module (about a second).
            threading._shutdown()  # type: ignore[attr-defined]  # joins non-daemon threads
            atexit._run_exitfuncs()
        _flush()
        with contextlib.suppress(OSError):  # the launcher has died
            os.write(launcher_fd, b"returned\n")
        os._exit(code)
    except BaseException:
        traceback.print_exc()
        _flush()
    finally:  # always: this process must never return into the server's loop
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


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        say("", stream)


def _exit_code(end: SystemExit, default: int) -> int:
    """The code with which Python would exit; `default` after printing a message."""
    if end.code is None or isinstance(end.code, int):
        return end.code or EXIT_COMPLETE
    print(end.code, file=sys.stderr)
    return default


def _keep_cuda_usable() -> None:
    """Let `torch.cuda.is_available()` in an imported module not initialise the driver, which no
    fork could use then: torch then asks NVML, or sees no device."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:  # no driver
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")


def _has_spoilt_cuda() -> bool:
    """Whether a fork of this process can't use CUDA: only a fork can tell."""
    from trainer.distributed.torch_private import is_in_bad_fork

    if (pid := fork()) == 0:
        os._exit(is_in_bad_fork())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0


def _ended_child() -> os.waitid_result | None:
    """A child that has exited, without reaping it; None if there is none."""
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None


def _kill_group(pid: int) -> None:
    # A rank that exited before it had its own process group has no child processes.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    run_server(socket.socket(fileno=int(sys.argv[1])), sys.argv[2], sys.argv[3:])
