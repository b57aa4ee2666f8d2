"""Messages of a rank to its launcher: the run has ended for good, and what failed first."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trainer.errors import EXIT_FAILURE, EXIT_STOPPED, FINAL_EXIT_CODES
from trainer.storage import processes

if TYPE_CHECKING:  # a rank imports this before torch
    from trainer.distributed.world import LaunchInfo, World


class Orders:
    """Reads the launcher's orders in a thread. `lost`: this rank may wait for a rank that is gone;
    close all connections, so that every wait fails. `stale`: the same, and save nothing. `absent`:
    a rank has ended before all have joined, which waiting ranks cannot detect."""

    def __init__(self) -> None:
        self._world: World | None = None

    def attach(self, world: World) -> None:
        """Apply orders to this world from now on. Before, an order ends the process: it has nothing
        to save, and may wait for a rank that never joins."""
        self._world = world

    def follow(self, channel_fd: int) -> int:
        """Listen to the launcher; returns a descriptor that becomes readable when it is gone."""
        gone, signal_end = os.pipe()
        threading.Thread(target=self._listen, args=(channel_fd, signal_end), name="orders",
                         daemon=True).start()
        return gone

    def _listen(self, channel_fd: int, signal_end: int) -> None:
        with contextlib.suppress(ConnectionError):
            while words := os.read(channel_fd, 4096).decode():
                for word in words.split():
                    self._obey(word)
        os.write(signal_end, b"!")  # closing it has no effect: loader processes have inherited it

    def _obey(self, word: str) -> None:
        if self._world is None:
            os._exit(EXIT_FAILURE)
        if word == "stale":
            self._world.supersede()
        if word != "absent":
            self._world.abandon()


SIGNALLED_TIMEOUT_S, LEAVE_TIMEOUT_S = 0.5, 5.0
TORCH_AGENTS = ("torchrun", "torch.distributed.run", "torch.distributed.launch")


def leave_launcher(
    exit_code: int, launch: LaunchInfo, count_signals: Callable[[], int], *, last_words: str = ""
) -> None:
    """Wait until this rank may exit with `exit_code` without being restarted by torchrun.

    torchrun restarts every exit code but 0. So when the trainer itself ends the run, local rank 0
    sends SIGTERM to torchrun, and no rank of the host leaves before torchrun's own SIGTERM has
    reached it (torchrun would count an earlier exit as a failure) or 5 s have passed. If local rank
    0 has sent nothing by then, the others do, and wait another second. After a stop that torchrun
    requested nothing happens: torchrun knows whether this ends the run. `count_signals` returns how
    many signals torchrun has sent this rank; `last_words` are printed below torchrun's traceback.
    """
    agent, before = os.getppid(), count_signals()
    if exit_code not in FINAL_EXIT_CODES:
        return
    tell("returned", exit_code)  # so `python -m launch` knows that the code is the trainer's
    # The command line tells: environment variables are inherited, and SIGTERM to a shell is worse.
    if launch.run_id is None or launch.knows_exit_codes or (
            processes.program(agent) not in TORCH_AGENTS):
        return

    def signalled() -> bool:
        return count_signals() > before

    # The sender of a stop signal to a rank often signals torchrun as well.
    if exit_code == EXIT_STOPPED and (before or _wait(signalled, agent, SIGNALLED_TIMEOUT_S)):
        return
    if last_words:
        _say_after(agent, f"trainer: exit code {exit_code}: {last_words}\n")
    if launch.local_rank == 0:
        _terminate(agent)
        _wait(signalled, agent, LEAVE_TIMEOUT_S)
    elif not _wait(signalled, agent, SIGNALLED_TIMEOUT_S if before else LEAVE_TIMEOUT_S):
        _terminate(agent)
        _wait(signalled, agent, 1.0)


def has_lost_rank(launch: LaunchInfo) -> bool:
    """Whether torchrun, the parent, has fewer children than this host has ranks."""
    return 0 < len(processes.children(os.getppid())) < launch.local_size


def tell(word: str, value: Any) -> None:
    """Send a line to `python -m launch`, if it is the launcher: a keyword and a JSON value."""
    if (descriptor := os.environ.get("TRAINER_LAUNCHER_FD")) is not None:
        with contextlib.suppress(OSError):  # the launcher is gone, which its watcher notices
            os.write(int(descriptor), f"{word} {json.dumps(value)}\n".encode())


def record_failure(message: str, stack: str, *, secondary: bool) -> None:
    """Write the failure into torchrun's error file. torchrun shows the earliest as root cause, and
    the death of a killed rank when it has noticed it: a secondary failure gets a later time."""
    if not (path := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        return
    at_s = math.ceil(time.time()) + 2 if secondary else int(time.time())
    content = {"message": message,
               "extraInfo": {"py_callstack": f"{stack}{message}", "timestamp": str(at_s)}}
    with contextlib.suppress(OSError), open(path, "w") as file:  # only people read it
        json.dump({"message": content}, file)


def _wait(signalled: Callable[[], bool], agent: int, timeout_s: float) -> bool:
    """Whether torchrun signals this rank to leave, or ends, within the time."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if signalled() or os.getppid() != agent:
            return True
        time.sleep(0.02)
    return False


def _say_after(agent: int, text: str) -> None:
    """Let a separate process write to stderr when the agent is gone."""
    descriptor = os.pidfd_open(agent)
    wait = ("import select, sys; poll = select.poll(); poll.register(int(sys.argv[1])); "
            "poll.poll(10_000); sys.stderr.write(sys.argv[2])")
    subprocess.Popen([sys.executable, "-ISc", wait, str(descriptor), text], pass_fds=[descriptor],
                     stdin=subprocess.DEVNULL, start_new_session=True)
    os.close(descriptor)


def _terminate(agent: int) -> None:
    if os.getppid() == agent:  # else it is dead, and its pid may be another process's
        os.kill(agent, signal.SIGTERM)
