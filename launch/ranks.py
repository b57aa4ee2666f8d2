"""The ranks of this node as the launcher sees them: forked on request, signalled, waited for."""

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
from typing import Any, NoReturn

from launch import forkserver
from launch.output import Output
from launch.signals import StopRequest
from launch.verdict import Exit
from trainer import processes
from trainer.errors import EXIT_COMPLETE, EXIT_FAILURE, FINAL_EXIT_CODES
from trainer.stop import is_readable

SERVER_EXIT_S = 2.0
KILL_S = 1.0

TRAINERS_OWN = (EXIT_COMPLETE, *FINAL_EXIT_CODES)
"""Exit codes that mean what they say where the trainer gives them, and only there."""

AT_ONCE = 64
"""Ranks that the fork server is asked for in one message, of which it reads `PACKET_BYTES`."""

SERVER_LOOKS, LOOK_S = 4, 0.5
"""A fork server that is found stopped so many times, while something waits for it, is continued."""


@dataclasses.dataclass(kw_only=True)
class _Rank:
    """A living rank. `pidfd` names the process itself, whoever has its number later."""

    rank: int
    pidfd: int
    channel: socket.socket
    told: bytes = b""
    forced: bool = False
    returned: bool = False
    looks_stopped: int = 0


def fork_server(entry: str, argv: Sequence[str]) -> tuple[int, socket.socket]:
    """Fork the server from this process, which must have no threads yet: its pid and socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = forkserver.fork()
    if pid == 0:
        ours.close()
        forkserver.serve(theirs, entry, argv)
    theirs.close()
    return pid, ours


def spawn_server(entry: str, argv: Sequence[str]) -> tuple[int, socket.socket]:
    """As `fork_server`, from a process with threads: the new server imports everything itself."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.set_inheritable(True)
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    command = [sys.executable, *flags, "-m", "launch.forkserver", str(theirs.fileno()), entry]
    pid = os.posix_spawn(sys.executable, [*command, *argv], os.environ)
    theirs.close()
    return pid, ours


class Ranks:
    """The ranks of one node, and the fork server that starts them.

    Attributes:
        server_lives: whether the fork server is there.
        run_folder: where the run's files are, once a rank has told; None before.
        failures: what the ranks of this attempt have told of their own, as events.
    """

    def __init__(
        self,
        server: tuple[int, socket.socket],
        *,
        entry: str,
        argv: Sequence[str],
        stop: StopRequest,
        output: Output,
    ) -> None:
        self.run_folder: str | None = None
        self.failures: list[dict[str, Any]] = []
        self._entry = entry
        self._argv = list(argv)
        self._stop = stop
        self._output = output
        self._living: dict[int, _Rank] = {}  # by pid
        self._exits: list[Exit] = []  # those that the caller doesn't know yet
        self._starting: dict[int, int] = {}  # local rank -> rank, of those without a pid so far
        self._pids: dict[int, int] = {}  # local rank -> pid
        self._selector = selectors.DefaultSelector()
        self._watch(stop.wakeup_fd, stop.drain)
        self.server_lives = False
        self._adopt(server)

    @property
    def living(self) -> list[int]:
        """The ranks that haven't ended, in order."""
        return sorted(rank.rank for rank in self._living.values())

    def wait_ready(self, *, until_stop: bool = False) -> int | None:
        """Wait for the server's imports: None, or, where there is nothing to start, the exit code.

        Args:
            until_stop: return early, with None, at a stop request.
        """
        while self._server_loads and not (until_stop and self._stop.signal is not None):
            self._poll(LOOK_S)
        return self._code

    def start(self, envs: dict[int, dict[str, str]]) -> dict[int, int]:
        """Fork one rank for each environment, by local rank, and return their pids likewise.

        A server that was killed is replaced first, which takes as long as importing torch. A rank
        that can't be started is one that has ended, for `wait` to tell.
        """
        self._pids, self.failures = {}, []
        self._starting = {local_rank: int(env["RANK"]) for local_rank, env in envs.items()}
        if not self.server_lives:
            self._adopt(spawn_server(self._entry, self._argv))
            if (code := self.wait_ready()) is not None:
                self._end_starting(code)
                return {}
        order = [
            {"local_rank": local_rank, "env": env, "tagged": env["RANK"] != "0"}
            for local_rank, env in envs.items()
        ]
        for first in range(0, len(order), AT_ONCE):
            asked = order[first : first + AT_ONCE]
            with contextlib.suppress(OSError):  # the server has died: `_poll` will find that
                forkserver.send(self._control, {"fork": asked})
            while any(rank["local_rank"] in self._starting for rank in asked):
                self._poll(LOOK_S)
        return self._pids

    def wait(self, timeout_s: float) -> list[Exit]:
        """The ends since the last call, after waiting for something to happen if there is none."""
        if not self._exits:
            self._poll(timeout_s)
        exits, self._exits = self._exits, []
        return exits

    def signal(self, number: signal.Signals, *, forced: bool = False) -> None:
        """Send a signal to each living rank; `forced` marks their ends as not their own doing."""
        for rank in self._living.values():
            rank.forced |= forced
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(rank.pidfd, number)

    def tell(self, word: str) -> None:
        """Say a word to each living rank, over its channel; `lost`, `stale` or `absent`."""
        for rank in self._living.values():
            with contextlib.suppress(OSError):  # it is just leaving
                rank.channel.send(f"{word}\n".encode())

    def kill_stopped(self, looks: int) -> list[int]:
        """Kill each rank that was found stopped (SIGSTOP) at so many calls in a row; these ranks.

        Counted in calls and not in time, since the launcher may have been stopped with them.
        """
        killed = []
        for pid, rank in self._living.items():
            rank.looks_stopped = rank.looks_stopped + 1 if processes.state(pid) == "T" else 0
            if rank.looks_stopped == looks:
                killed.append(rank.rank)
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(rank.pidfd, signal.SIGKILL)
        return killed

    def kill_and_exit(self) -> NoReturn:
        """End everything at once, from a signal handler too."""
        if self._server_loads:
            os.kill(self._server_pid, signal.SIGKILL)
        self.signal(signal.SIGKILL)
        deadline_s = time.monotonic() + KILL_S
        for rank in list(self._living.values()):
            is_readable(rank.pidfd, deadline_s - time.monotonic())
        self._output.finish(KILL_S)
        os._exit(EXIT_FAILURE)

    def close(self) -> None:
        """Let the server go; it kills ranks that still live after a few seconds."""
        if self.server_lives:
            self._forget(self._control.fileno())
            self._control.close()
            pidfd = os.pidfd_open(self._server_pid)
            if not is_readable(pidfd, SERVER_EXIT_S):
                os.kill(self._server_pid, signal.SIGKILL)
            os.close(pidfd)
            os.waitpid(self._server_pid, 0)
            self.server_lives = False
        self._selector.close()

    def _adopt(self, server: tuple[int, socket.socket]) -> None:
        self._server_pid, self._control = server
        self.server_lives = True
        self._server_loads = True
        self._looks_stopped = 0
        self._code: int | None = None  # where it has found that there is nothing to start
        self._watch(self._control.fileno(), self._on_message)

    def _watch(self, fd: int, on_readable: Callable[[], object]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, on_readable)

    def _forget(self, fd: int) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(fd)

    def _poll(self, timeout_s: float) -> None:
        events = self._selector.select(timeout_s)
        if not events:
            self._continue_server()
        for key, _ in events:
            # One event may settle the others that came with it: an end closes the rank's channel.
            if self._selector.get_map().get(key.fileobj) == key:
                key.data()

    def _continue_server(self) -> None:
        """Nobody but the server starts ranks and tells of their ends: it must not stay stopped.

        Counted in looks, since the launcher may have been stopped with it.
        """
        stopped = self.server_lives and processes.is_stopped(self._server_pid) and (
            self._server_loads or self._starting
            or any(processes.state(pid) in "ZX" for pid in self._living))
        self._looks_stopped = self._looks_stopped + 1 if stopped else 0
        if self._looks_stopped >= SERVER_LOOKS:
            self._looks_stopped = 0
            self._output.say("the fork server was stopped, and ranks wait for it: continued")
            os.kill(self._server_pid, signal.SIGCONT)

    def _on_message(self) -> None:
        message, fds = forkserver.receive(self._control)
        if message is None:
            self._lose_server()
        elif "started" in message:
            self._add(message["started"], message["pid"], *fds)
        elif "exited" in message:
            self._remove(message["exited"], message["code"])
        else:
            self._server_loads = False
            self._code = message.get("nothing_to_start")

    def _add(self, local_rank: int, pid: int, pidfd: int, channel_fd: int, *output: int) -> None:
        rank = _Rank(
            rank=self._starting.pop(local_rank),
            pidfd=pidfd,
            channel=socket.socket(fileno=channel_fd),
        )
        self._living[pid] = rank
        self._pids[local_rank] = pid
        self._watch(channel_fd, functools.partial(self._on_channel, rank))
        streams = (sys.stdout.fileno(), sys.stderr.fileno())
        for fd, to_fd in zip(output, streams, strict=False):
            self._output.follow(fd, tag=f"[rank {rank.rank}] ", to_fd=to_fd)

    def _on_channel(self, rank: _Rank) -> bool:
        """Read what a rank has told; whether there may be more."""
        try:
            data = rank.channel.recv(1 << 16, socket.MSG_DONTWAIT)
        except OSError:
            return False
        if not data:
            self._forget(rank.channel.fileno())
        *lines, rank.told = (rank.told + data).split(b"\n")
        for line in lines:
            word, _, value = line.decode(errors="replace").partition(" ")
            with contextlib.suppress(ValueError):
                if word == "returned":
                    rank.returned = True
                elif word == "run":
                    self.run_folder = json.loads(value)
                elif word == "failure":
                    self.failures.append(json.loads(value))
        return bool(data)

    def _remove(self, pid: int, code: int | None) -> None:
        if pid not in self._living:
            return
        rank = self._living.pop(pid)
        while self._on_channel(rank):
            pass  # its last words
        self._forget(rank.channel.fileno())
        self._forget(rank.pidfd)
        rank.channel.close()
        os.close(rank.pidfd)
        end = Exit(rank=rank.rank, code=code, at_s=time.monotonic(), forced=rank.forced,
                   early=code in TRAINERS_OWN and not rank.returned)
        self._exits.append(end)

    def _lose_server(self) -> None:
        """The server has died: nobody will tell how its ranks end, only that they do."""
        self._forget(self._control.fileno())
        self._control.close()
        os.waitpid(self._server_pid, 0)
        self.server_lives = False
        if self._server_loads:
            self._output.say("the fork server has died while it was starting")
            self._server_loads, self._code = False, EXIT_FAILURE
        self._end_starting(None)
        for pid, rank in self._living.items():
            self._watch(rank.pidfd, functools.partial(self._remove, pid, None))

    def _end_starting(self, code: int | None) -> None:
        now_s = time.monotonic()
        self._exits += [Exit(rank=r, code=code, at_s=now_s) for r in self._starting.values()]
        self._starting = {}
