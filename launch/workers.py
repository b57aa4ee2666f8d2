"""The ranks of this node: start them through the fork server, signal them, wait for them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from launch import fork_server
from launch.exit_policy import Exit
from launch.output import Output
from launch.signals import LauncherStop
from trainer.errors import EXIT_COMPLETE, EXIT_FAILURE, FINAL_EXIT_CODES
from trainer.resilience.stop_signals import drain, is_readable
from trainer.storage import processes

KILL_S = 1.0
CHECK_S, SERVER_CHECKS, RANK_CHECKS = 1.0, 2, 120
"""A process found stopped (SIGSTOP) in so many consecutive checks, this many seconds apart, is
continued if it is the fork server, and killed if it is a rank. A running peer kills it earlier."""


@dataclasses.dataclass(kw_only=True)
class _Worker:
    """A living rank."""

    rank: int
    pidfd: int  # refers to the process itself, even if its pid is reused
    channel: socket.socket
    unparsed: bytes = b""
    forced: bool = False
    returned: bool = False


def start_server(
    entry: str, argv: Sequence[str], *, by_fork: bool
) -> tuple[int, socket.socket]:
    """Start a fork server; returns its pid and the socket to it. `by_fork`: this process has no
    threads yet. Otherwise the server has to import everything itself."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if by_fork:
        pid = fork_server.fork()
        if pid == 0:
            ours.close()
            fork_server.run_server(theirs, entry, argv)
    else:
        theirs.set_inheritable(True)
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        command = [sys.executable, *flags, "-m", "launch.fork_server", str(theirs.fileno()), entry]
        pid = os.posix_spawn(sys.executable, [*command, *argv], os.environ)
    theirs.close()
    return pid, ours


class Workers:
    """The ranks of one node, and the fork server that starts them."""

    def __init__(
        self, server: tuple[int, socket.socket], entry: str, argv: Sequence[str],
        stop: LauncherStop, output: Output,
    ) -> None:
        self.run_folder: Path | None = None  # None until a rank has reported it
        self.failures: list[dict[str, Any]] = []  # events that ranks of this attempt have reported
        self._entry, self._argv, self._output = entry, list(argv), output
        self._living: dict[int, _Worker] = {}  # by pid
        self._exits: list[Exit] = []  # not yet returned by `wait`
        self._starting: dict[int, int] = {}  # local rank -> rank, of ranks without a pid so far
        self._stopped_checks: dict[int, int] = {}  # by pid
        self._checked_s = 0.0
        self._selector = selectors.DefaultSelector()
        self._watch(stop.wakeup_fd, functools.partial(drain, stop.wakeup_fd))
        self._adopt(server)

    @property
    def living(self) -> list[int]:
        """Ranks that have not exited."""
        return sorted(rank.rank for rank in self._living.values())

    def wait_ready(self) -> int | None:
        """Wait for the fork server's imports; returns the exit code if nothing is to be started."""
        while self._server_imports:
            self._poll(CHECK_S)
        return self._code

    def start(self, envs: dict[int, dict[str, str]]) -> None:
        """Fork one rank for each environment, by local rank. A killed fork server is replaced
        first. A rank that cannot be started counts as exited."""
        self.failures = []
        self._starting = {local_rank: int(env["RANK"]) for local_rank, env in envs.items()}
        if not self.server_lives:
            self._adopt(start_server(self._entry, self._argv, by_fork=False))
            if (code := self.wait_ready()) is not None:
                return self._end_starting(code)
        for local_rank, env in envs.items():
            with contextlib.suppress(OSError):  # the server has died: `_poll` detects it
                fork_server.send(self._control, {"fork": local_rank, "env": env})
            while local_rank in self._starting:
                self._poll(CHECK_S)

    def wait(self, timeout_s: float) -> list[Exit]:
        """The exits since the last call; if there are none, wait for an event first."""
        if not self._exits:
            self._poll(timeout_s)
        exits, self._exits = self._exits, []
        return exits

    def signal(self, number: signal.Signals, *, forced: bool = False) -> None:
        """Send a signal to each living rank; `forced` marks their exits as the launcher's doing."""
        for rank in self._living.values():
            rank.forced |= forced
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(rank.pidfd, number)

    def send_keyword(self, word: str) -> None:
        """Send a keyword to each living rank over its channel: `lost`, `stale` or `absent`."""
        for rank in self._living.values():
            with contextlib.suppress(OSError):  # it is exiting
                rank.channel.send(f"{word}\n".encode())

    def kill_and_exit(self) -> NoReturn:
        """Kill all ranks and exit immediately. May be called from a signal handler."""
        if self._server_imports:
            os.kill(self._server_pid, signal.SIGKILL)
        self.signal(signal.SIGKILL)
        deadline_s = time.monotonic() + KILL_S
        for rank in list(self._living.values()):
            is_readable(rank.pidfd, deadline_s - time.monotonic())
        self._output.finish(KILL_S)
        os._exit(EXIT_FAILURE)

    def close(self) -> None:
        """Disconnect from the fork server, which kills living ranks after a few seconds."""
        if self.server_lives:
            self._disconnect()
            os.kill(self._server_pid, signal.SIGKILL if self._server_imports else signal.SIGCONT)
            os.waitpid(self._server_pid, 0)
        self._selector.close()

    def _disconnect(self) -> None:
        self._forget(self._control.fileno())
        self._control.close()
        self.server_lives = False

    def _adopt(self, server: tuple[int, socket.socket]) -> None:
        self._server_pid, self._control = server
        self.server_lives = self._server_imports = True
        self._code: int | None = None  # exit code if the server found nothing to start
        self._watch(self._control.fileno(), self._on_message)

    def _watch(self, fd: int, on_readable: Callable[[], object]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, on_readable)

    def _forget(self, fd: int) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(fd)

    def _poll(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            # An event may make another of this batch obsolete: an exit closes the rank's channel.
            if self._selector.get_map().get(key.fileobj) == key:
                key.data()
        if time.monotonic() - self._checked_s >= CHECK_S:
            self._checked_s = time.monotonic()
            self._check_stopped()

    def _check_stopped(self) -> None:
        """Continue a stopped fork server, without which no exit is reported, and kill ranks that
        stay stopped. Checks are counted, not time: the launcher may have been stopped with them."""
        server = [self._server_pid] if self.server_lives else []
        self._stopped_checks = {pid: self._stopped_checks.get(pid, 0) + 1
                                for pid in [*server, *self._living] if processes.state(pid) == "T"}
        for pid, checks in self._stopped_checks.items():
            if pid in server and checks >= SERVER_CHECKS:
                self._output.print_line("the fork server was stopped: continued")
                os.kill(pid, signal.SIGCONT)
            elif checks == RANK_CHECKS:
                rank = self._living[pid]
                self._output.print_line(f"rank {rank.rank} has been stopped for {RANK_CHECKS} s "
                                        "without being continued: killed")
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(rank.pidfd, signal.SIGKILL)

    def _on_message(self) -> None:
        message, fds = fork_server.receive(self._control)
        if message is None:
            self._lose_server()
        elif "started" in message:
            self._add(message["started"], message["pid"], *fds)
        elif "exited" in message:
            self._remove(message["exited"], message["code"])
        else:
            self._server_imports = False
            self._code = message.get("nothing_to_start")

    def _add(self, local_rank: int, pid: int, pidfd: int, channel_fd: int, *output: int) -> None:
        rank = _Worker(rank=self._starting.pop(local_rank), pidfd=pidfd,
                       channel=socket.socket(fileno=channel_fd))
        self._living[pid] = rank
        self._watch(channel_fd, functools.partial(self._on_channel, rank))
        streams = (sys.stdout.fileno(), sys.stderr.fileno())
        for fd, to_fd in zip(output, streams, strict=False):
            self._output.follow(fd, tag=f"[rank {rank.rank}] ", to_fd=to_fd)

    def _on_channel(self, rank: _Worker) -> bool:
        """Read the messages of a rank; returns whether there may be more."""
        try:
            data = rank.channel.recv(1 << 16, socket.MSG_DONTWAIT)
        except OSError:
            return False
        if not data:
            self._forget(rank.channel.fileno())
        *lines, rank.unparsed = (rank.unparsed + data).split(b"\n")
        for line in lines:
            word, _, value = line.decode(errors="replace").partition(" ")
            with contextlib.suppress(ValueError):
                if word == "returned":
                    rank.returned = True
                elif word == "run":
                    self.run_folder = Path(json.loads(value))
                elif word == "failure":
                    self.failures.append(json.loads(value))
        return bool(data)

    def _remove(self, pid: int, code: int | None) -> None:
        rank = self._living.pop(pid, None)
        if rank is None:  # another child process of the fork server
            return
        while self._on_channel(rank):
            pass  # read its last messages
        self._forget(rank.channel.fileno())
        self._forget(rank.pidfd)
        rank.channel.close()
        os.close(rank.pidfd)
        early = code in (EXIT_COMPLETE, *FINAL_EXIT_CODES) and not rank.returned
        self._exits.append(Exit(rank=rank.rank, code=code, at_s=time.monotonic(),
                                forced=rank.forced, early=early))

    def _lose_server(self) -> None:
        """The fork server has died: exits of its ranks are still noticed, without exit codes."""
        self._disconnect()
        os.waitpid(self._server_pid, 0)
        if self._server_imports:
            self._output.print_line("the fork server died during startup")
            self._server_imports, self._code = False, EXIT_FAILURE
        self._end_starting(None)
        for pid, rank in self._living.items():
            self._watch(rank.pidfd, functools.partial(self._remove, pid, None))

    def _end_starting(self, code: int | None) -> None:
        now_s = time.monotonic()
        self._exits += [Exit(rank=r, code=code, at_s=now_s) for r in self._starting.values()]
        self._starting = {}
