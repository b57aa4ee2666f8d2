"""What a rank tells its launcher: that the run is over for good, and what failed first."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

from trainer.errors import EXIT_STOPPED, FINAL_EXIT_CODES
from trainer.world import Launch

LEAVE_TIMEOUT_S = 5.0
SIGNALLED_TIMEOUT_S = 0.5
_AGENTS = ("torchrun", "torch.distributed.run", "torch.distributed.launch")


def leave_launcher(
    exit_code: int, launch: Launch, num_told: Callable[[], int], *, last_words: str = "",
    timeout_s: float = LEAVE_TIMEOUT_S,
) -> None:  # fmt: skip
    """Returns when this rank may exit with `exit_code`, so that torchrun doesn't start it again.

    torchrun restarts every exit but 0. So where the trainer itself ends the run, local rank 0 sends
    SIGTERM to torchrun, and no rank of the host leaves before torchrun's own SIGTERM has reached it
    (a rank that left earlier would be taken for a failure), or `timeout_s` seconds have passed. If
    local rank 0 has not spoken by then, the others do, and wait another second. Nothing happens
    with other exit codes, or under a launcher that knows them. Nor after a stop that torchrun has
    asked for: it knows whether it is the end, or the answer to a rank's death or a new node.

    Args:
        num_told: how often torchrun has sent this rank a signal so far. Once it has, another one
            will not come unless torchrun is told once more, soon.
        last_words: why the run is over, said once more below the traceback with which torchrun
            reports that signal.
    """
    agent, before = os.getppid(), num_told()
    if exit_code not in FINAL_EXIT_CODES:
        return
    tell("returned", exit_code)  # so that `python -m launch` takes the code for the trainer's own
    if not _restarts_us(agent, launch):
        return

    def told() -> bool:
        return num_told() > before

    # Whoever signals a rank to stop often signals torchrun as well.
    if exit_code == EXIT_STOPPED and (before or _wait(told, agent, SIGNALLED_TIMEOUT_S)):
        return
    if last_words:
        _say_after(agent, f"trainer: exit code {exit_code}: {last_words}\n")
    if launch.local_rank == 0:
        _terminate(agent)
        _wait(told, agent, timeout_s)
    elif not _wait(told, agent, min(timeout_s, SIGNALLED_TIMEOUT_S) if before else timeout_s):
        _terminate(agent)
        _wait(told, agent, 1.0)


def has_lost_rank(launch: Launch) -> bool:
    """Whether torchrun, the parent, has fewer children than this host has ranks. Linux."""
    agent = os.getppid()
    try:
        with open(f"/proc/{agent}/task/{agent}/children") as children:
            return len(children.read().split()) < launch.local_size
    except OSError:
        return False


def tell(word: str, value: Any) -> None:
    """A line for `python -m launch`, if it is there: `word`, and a value as JSON."""
    descriptor = os.environ.get("TRAINER_LAUNCHER_FD")
    if descriptor is not None:
        with contextlib.suppress(OSError):  # it is gone, and its watcher knows
            os.write(int(descriptor), f"{word} {json.dumps(value)}\n".encode())


def record_failure(told: str, stack: str, *, echo: bool) -> None:
    """Tell torchrun, in the file that it gives each rank, what it shows when it gives up.

    It shows the failure with the earliest second as the root cause, and takes the second in which
    it noticed an end for a rank that was killed. So an echo bears a somewhat later one.

    Args:
        told: the failure in one line.
        stack: its traceback.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    at_s = math.ceil(time.time()) + 2 if echo else int(time.time())
    message = {"message": told,
               "extraInfo": {"py_callstack": f"{stack}{told}", "timestamp": str(at_s)}}
    with contextlib.suppress(OSError), open(path, "w") as file:  # it is for people only
        json.dump({"message": message}, file)


def _wait(told: Callable[[], bool], agent: int, timeout_s: float) -> bool:
    """Whether torchrun has told this rank to leave, or is gone, within the time."""
    deadline = time.monotonic() + timeout_s
    while not told() and os.getppid() == agent:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _say_after(agent: int, text: str) -> None:
    """Let a process of its own write to stderr when the agent is gone."""
    if not hasattr(os, "pidfd_open"):
        return
    descriptor = os.pidfd_open(agent)
    wait = ("import select, sys; poll = select.poll(); poll.register(int(sys.argv[1])); "
            "poll.poll(10_000); sys.stderr.write(sys.argv[2])")
    subprocess.Popen([sys.executable, "-ISc", wait, str(descriptor), text], pass_fds=[descriptor],
                     stdin=subprocess.DEVNULL, start_new_session=True)
    os.close(descriptor)


def _restarts_us(parent: int, launch: Launch) -> bool:
    """Whether the parent is torch's elastic agent in its own process, and doesn't know our codes.

    Its command line is looked at as well, since a variable may have been handed on: SIGTERM to a
    shell or a test runner would be much worse than one restart too many.
    """
    if launch.run_id is None or launch.knows_exit_codes:
        return False
    return any(PurePath(word).name in _AGENTS for word in _command_line(parent)[:8])


def _command_line(pid: int) -> list[str]:
    if sys.platform == "linux":
        try:
            with open(f"/proc/{pid}/cmdline") as words:
                return words.read().split("\0")
        except FileNotFoundError:
            return []
    listed = subprocess.run(["ps", "-o", "command=", "-p", str(pid)], capture_output=True,
                            text=True, check=False)
    return listed.stdout.split()


def _terminate(agent: int) -> None:
    if os.getppid() == agent:  # else it is dead, and its number may be another process's
        os.kill(agent, signal.SIGTERM)
