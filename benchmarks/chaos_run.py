"""Runs of the trainer that are disturbed from outside, each start forked from a warm process."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import itertools
import json
import os
import random
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks import reporting
from benchmarks.chaos_plan import OUTSIDE, Fault, Run
from trainer.errors import EXIT_COMPLETE, EXIT_FAILURE, EXIT_STOPPED, ConfigError
from trainer.storage import processes
from trainer.storage.jsonl import newest_step
from trainer.storage.layout import EVENTS, IDENTITY, METRICS
from trainer.storage.records import read_json
from trainer.telemetry.events import read_events

MAX_RESTARTS = 20
POLL_S, IDLE_POLL_S = 0.004, 0.05
"""Time between two looks at a run: while a fault waits for its moment, and otherwise."""
GONE_S = 20.0
"""How long orphans may live after the end of a run: 5 s, more on a busy machine."""
APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND
PR_SET_PDEATHSIG = 1
MOST_SHOWN = 3  # differences of one run


class Launcher:
    """Starts the trainer; `kind` is launch, launch-cold or torchrun.

    `launch` forks this process, which has imported everything, and calls there what
    `python -m launch` calls. The others are new processes.
    """

    def __init__(self, kind: str, *, max_restarts: int = MAX_RESTARTS) -> None:
        self.kind, self._max_restarts = kind, max_restarts
        if kind == "launch":
            # This process must not compute with tensors: that starts threads, which a fork lacks.
            for name in ("torch._dynamo", "torch.utils.tensorboard", "launch.__main__",
                         "launch.agent", "launch.workers", "launch.rendezvous", "trainer.run.build",
                         "trainer.loop", "trainer.config.command_line", "trainer.commands.compare",
                         "benchmarks.chaos_task"):
                importlib.import_module(name)

    def start(self, num_ranks: int, arguments: Sequence[str], log: Path) -> int:
        """The pid of a new launcher, leader of a process group; its output goes to `log`."""
        options = ["--nproc-per-node", str(num_ranks), "--max-restarts", str(self._max_restarts)]
        if self.kind == "launch":
            return _fork([*options, "--", *arguments], log)
        command = (["launch", *options, "--"] if self.kind == "launch-cold" else
                   ["torch.distributed.run", "--standalone", *options, "-m", "trainer"])
        actions = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                   (os.POSIX_SPAWN_OPEN, 1, str(log), APPEND, 0o666),
                   (os.POSIX_SPAWN_DUP2, 1, 2)]
        return os.posix_spawn(sys.executable, [sys.executable, "-m", *command, *arguments],
                              reporting.environment(), file_actions=actions, setpgroup=0)

    def ranks(self, launcher: int) -> list[int]:
        """Pids of the living ranks."""
        if self.kind == "torchrun":
            return children(launcher)
        return [pid for server in children(launcher) for pid in children(server)
                if processes.name(pid).startswith("rank ")]

    def server(self, launcher: int) -> int | None:
        """Pid of the fork server, if there is one."""
        return next(iter(children(launcher)), None) if self.kind != "torchrun" else None


class Watch:
    """Starts and follows the launchers of one run, and strikes from outside when it is time."""

    def __init__(self, run: Run, folder: Path, launcher: Launcher) -> None:
        self.injected = [fault for fault in run.faults if fault.kind not in OUTSIDE]
        self.faults, self.killed_launcher = len(run.faults), False
        self._num_ranks = run.setting.ranks
        self.folder, self._launcher = folder, launcher
        self._waiting = [fault for fault in run.faults if fault.kind in OUTSIDE]
        self._struck: list[tuple[Fault, int]] = []  # with the starts seen until then
        self._known: set[tuple[int, int]] = set()  # (pid, start) of every process that was seen
        self._group: set[int] = set()  # the ranks of the present attempt
        self._starts, self._step = 0, 0
        self._due_s: float | None = None
        self._arguments = run.setting.arguments(str(folder))
        self.sizes = list[int]()
        """Number of ranks of each launch."""
        for fault in self.injected:
            self._arguments += ["--inject", str(fault)]
        self.wall_s, self.fired = 0.0, tuple[Fault, ...]()
        """Seconds of the run, and the faults that happened."""

    def train(self, *, limit_s: float) -> str | None:
        """Give the run's command, again after each stop, until it is complete, and disturb it. The
        output goes to a file next to the run folder.

        Returns:
            why the run did not end as it should, if so.
        """
        began_s, problem = time.monotonic(), None
        while problem is None:
            code = self.follow(self.start(), until_s=began_s + limit_s)
            if code == EXIT_COMPLETE:
                break
            problem = (f"not complete after {limit_s:.0f} s" if code is None else
                       self.problem(code))
        self.wall_s = time.monotonic() - began_s
        if left := self.wait_gone():
            problem = problem or f"processes {sorted(left)} still live {GONE_S:.0f} s after the end"
        told = {e["fault"] for e in read_events(self.folder / EVENTS) if e["event"] == "fault"}
        self.fired = (*(fault for fault in self.injected if str(fault) in told),
                      *(fault for fault, starts in self._struck if self._happened(fault, starts)))
        return problem

    def start(self) -> int:
        """Give the command; the pid of the launcher."""
        self.sizes.append(self._num_ranks)
        return self._launcher.start(self._num_ranks, self._arguments,
                                    self.folder.with_suffix(".log"))

    def problem(self, code: int) -> str | None:
        """Why the command may not be given again after this exit code."""
        killed = code == -signal.SIGKILL and self.killed_launcher
        return None if killed or _stopped(self.folder, code) else f"ended with exit code {code}"

    def follow(self, pid: int, *, until_s: float) -> int | None:
        """The exit code of the launcher, -SIGKILL after a strike; None if time was up."""
        self.killed_launcher, timed_out = False, False
        while not ends(pid, POLL_S if self._waiting else IDLE_POLL_S):
            self._look(pid)
            if time.monotonic() > until_s:
                timed_out = True
                kill({pid, *self._living()})
        _, status = os.waitpid(pid, 0)
        return None if timed_out else os.waitstatus_to_exitcode(status)

    def _happened(self, fault: Fault, starts: int) -> bool:
        """Whether the ranks were started again after a strike."""
        return self._starts > starts

    def starts(self) -> int:
        """How often all ranks were started: seen here or, if some were too short, in run.json. A
        mirror does not know the starts that could not reach it."""
        attempt = (read_json(self.folder / IDENTITY) or {"attempt": -1})["attempt"]
        return max(self._starts, attempt + 1)

    def wait_gone(self) -> set[int]:
        """Processes of the run that still live after `GONE_S`."""
        deadline_s = time.monotonic() + GONE_S
        while (left := self._living()) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        return left

    def _living(self) -> set[int]:
        return {pid for pid, start in self._known if processes.start_time(pid) == start}

    def _look(self, pid: int) -> None:
        ranks = self._launcher.ranks(pid)
        if len(ranks) == self._num_ranks and set(ranks) != self._group:
            self._group = set(ranks)
            self._starts += 1
            seen = [pid, *ranks, *filter(None, [self._launcher.server(pid)])]
            self._known |= {(p, start) for p in seen if (start := processes.start_time(p))}
        if not self._waiting:
            return
        self._step = max(self._step, newest_step(self.folder / METRICS))
        fault = next((f for f in self._waiting if self._is_due(f)), None)
        if fault is None:
            return
        if self._due_s is None:
            self._due_s = time.monotonic() + fault.delay_s
        if time.monotonic() >= self._due_s and self._strike(fault, pid, ranks):
            self._waiting.remove(fault)
            self._struck.append((fault, self._starts))
            self._due_s = None

    def _is_due(self, fault: Fault) -> bool:
        if fault.step is not None:
            return self._step >= fault.step
        return self._starts > (fault.attempt or 0)

    def _strike(self, fault: Fault, launcher: int, ranks: list[int]) -> bool:
        """Whether there was something to strike, all of it alive."""
        if len(ranks) != self._num_ranks or not all(map(processes.start_time, ranks)):
            return False
        self.killed_launcher |= fault.kind == "launcher"
        victims: dict[str, list[int | None]] = {
            "ranks": [*ranks], "launcher": [launcher], "server": [self._launcher.server(launcher)]}
        kill(victims[fault.kind])
        return True


class ElasticWatch(Watch):
    """Each launch has 1 to 4 ranks, and none restarts them: a death ends it."""

    def start(self) -> int:
        self._num_ranks = random.Random(f"{self.folder.name} {len(self.sizes)}").randint(1, 4)
        return super().start()

    def problem(self, code: int) -> str | None:
        return None if code == EXIT_FAILURE else super().problem(code)


def kill(pids: Iterable[int | None]) -> None:
    """Send SIGKILL to the processes that still live."""
    for pid in filter(None, pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def ends(pid: int, timeout_s: float) -> bool:
    """Whether a child process ends within that time."""
    pidfd = os.pidfd_open(pid)
    try:
        return bool(select.select([pidfd], [], [], timeout_s)[0])
    finally:
        os.close(pidfd)


def differences(reference: Path, run: Path) -> list[str]:
    """The first differences of two runs, or why one cannot be read.

    Compared in a fork, since work with tensors starts threads, and a process with threads must not
    be forked.
    """
    read_fd, write_fd = os.pipe()

    def report() -> int:
        import torch

        from trainer.commands import compare

        torch.set_num_threads(1)
        try:
            found = list(itertools.islice(compare.differences(reference, run), MOST_SHOWN))
        except ConfigError as problem:
            found = [str(problem)]
        with os.fdopen(write_fd, "w") as pipe:
            json.dump(found, pipe)
        return 0

    pid = _in_fork(report)
    os.close(write_fd)
    with os.fdopen(read_fd) as pipe:
        text = pipe.read()
    if os.waitpid(pid, 0)[1]:
        raise RuntimeError("the comparison failed: see above")
    return list(json.loads(text))


def children(pid: int) -> list[int]:
    """Pids of the children of a process; none if it is gone."""
    try:
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _fork(argv: Sequence[str], log: Path, program: str = "launch") -> int:
    main = importlib.import_module(f"{program}.__main__").main

    def run() -> int:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        for path, flags, target in ((os.devnull, os.O_RDONLY, (0,)), (log, APPEND, (1, 2))):
            fd = os.open(path, flags, 0o666)
            for number in target:
                os.dup2(fd, number)
            os.close(fd)
        return main(argv)

    return _in_fork(run)


def _in_fork(function: Callable[[], int]) -> int:
    """The pid of a fork of this process that exits with what the function returns."""
    from launch.fork_server import fork

    sys.stdout.flush()
    sys.stderr.flush()
    pid = fork()
    if pid:
        return pid
    code = 1
    try:
        code = function()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _stopped(folder: Path, code: int) -> bool:
    """Whether the run has saved and stopped on request. torchrun itself always ends with 1."""
    ends = [e for e in read_events(folder / EVENTS) if e["event"] in ("stop", "failure")]
    return code == EXIT_STOPPED or (bool(ends) and ends[-1].get("exit_code") == EXIT_STOPPED)
