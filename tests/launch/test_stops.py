"""Stops by real signals: at any time, to any process, any number of times."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import re
import select
import signal
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.utils.tensorboard  # noqa: F401

import launch.__main__
import launch.agent
import launch.ranks
import launch.rendezvous  # noqa: F401  imported here, in the process that launchers are forked from
import trainer.__main__
import trainer.build
import trainer.loop
from benchmarks.chaos_run import _fork, children
from trainer.commands.compare import differences
from trainer.commands.inspect import inspect
from trainer.log import read_events

TASK = ["--task=slow_task:Slow", "--device=cpu", "--batch.global-size=8", "--batch.micro-size=2",
        "--task.samples=160", "--task.norm=batch", "--task.dropout=0.2", "--world.threads=1",
        "--checkpoint.every=1000"]  # fmt: skip
GRACE_S = 30.0
DEADLINE_S = 200.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stop:
    """When a launch is stopped, and how.

    Attributes:
        when: a regular expression that a line of events.jsonl or of the output must match first;
            "": at once.
        after_s: seconds to wait from there.
        who: "launcher", "rank 0", "rank 1", "ranks", "all" (each process there is), or "orphans":
            the ranks, whose loader processes are killed as well.
    """

    when: str = ""
    after_s: float = 0.0
    who: str = "launcher"
    number: int = signal.SIGTERM
    times: int = 1
    gap_s: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class End:
    """How the launch ended: exit code, and seconds since the first signal."""

    code: int | None
    took_s: float


def stopped(run: str, size: int, arguments: Sequence[str], stop: Stop,
            env: Mapping[str, str] = {}) -> End:
    """In a warm process: launch `size` ranks, stop them, and tell how it ended.

    Args:
        size: 0: `python -m trainer` without a launcher.
    """
    os.environ.update(env)
    warnings.simplefilter("ignore")
    log = Path(run).with_suffix(".log")
    before = log.stat().st_size if log.exists() else 0
    events = Path(run, "events.jsonl")
    seen = events.stat().st_size if events.exists() else 0
    own = [*TASK, *arguments, f"--run={run}"]
    pid = _fork(["--nproc-per-node", str(size), "--", *own], log) if size else alone(own, log)
    pidfd = os.pidfd_open(pid)

    def told() -> str:
        text = log.read_text()[before:] if log.exists() else ""
        return text + (events.read_text()[seen:] if events.exists() else "")

    deadline_s = time.monotonic() + DEADLINE_S
    ended = False
    while not ended and time.monotonic() < deadline_s and not (
            listens(pid) and re.search(stop.when, told())):
        ended = bool(select.select([pidfd], [], [], 0.005)[0])
    ended = ended or bool(select.select([pidfd], [], [], stop.after_s)[0])
    began_s = time.monotonic()
    if not ended:
        for _ in range(stop.times):
            strike(pid, stop)
            if select.select([pidfd], [], [], stop.gap_s)[0]:
                break
    if not select.select([pidfd], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
        os.killpg(pid, signal.SIGKILL)
        return End(code=None, took_s=DEADLINE_S)
    took_s = time.monotonic() - began_s
    return End(code=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), took_s=took_s)


def alone(arguments: list[str], log: Path) -> int:
    """The pid of one process that trains without a launcher."""
    if pid := os.fork():
        return pid
    os.setpgid(0, 0)
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    for name in ("RANK", "WORLD_SIZE"):
        del os.environ[name]
    os._exit(trainer.__main__.main(arguments))


def strike(launcher: int, stop: Stop) -> None:
    """Send the signal."""
    if stop.who == "launcher":
        os.kill(launcher, stop.number)
        return
    ranks = {name(pid): pid for server in children(launcher) for pid in children(server)}
    everybody = [launcher, *(q for p in ranks.values() for q in [p, *children(p)])]
    among = {"ranks": list(ranks.values()), "orphans": list(ranks.values()), "all": everybody}
    for pid in among.get(stop.who) or [ranks[stop.who]]:
        with contextlib.suppress(ProcessLookupError):  # told by another one, it has left
            os.kill(pid, stop.number)
    if stop.who == "orphans":
        for pid in children(ranks["rank 0"]):
            os.kill(pid, signal.SIGKILL)


def listens(pid: int) -> bool:
    """Whether a process handles SIGTERM; in its first moments none does."""
    found = re.search(r"SigCgt:\s(\w+)", Path(f"/proc/{pid}/status").read_text())
    return found is not None and bool(int(found[1], 16) >> (signal.SIGTERM - 1) & 1)


def name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def until_done(warm: Any, run: Path, size: int, arguments: Sequence[str], stops: Sequence[Stop],
               **slow: float) -> list[End]:
    """Launch once for each stop, and once more, undisturbed; that one is not among the ends."""
    env = {f"SLOW_{key}_S": str(value) for key, value in slow.items()}
    ends = [warm(1, stopped, str(run), size, arguments, stop, env, group=False,
                 timeout_s=DEADLINE_S + 10)[0] for stop in stops]
    finish(warm, run, size, arguments)
    return ends


def finish(warm: Any, run: Path, size: int, arguments: Sequence[str]) -> None:
    never = Stop(when="$^never")
    [end] = warm(1, stopped, str(run), size, arguments, never, {}, group=False,
                 timeout_s=DEADLINE_S + 10)
    assert end.code == 0, run.with_suffix(".log").read_text()


def told(run: Path) -> str:
    return run.with_suffix(".log").read_text()


def events(run: Path, event: str) -> list[dict[str, Any]]:
    return [e for e in read_events(run / "events.jsonl") if e["event"] == event]


@pytest.mark.parametrize("count", [2, pytest.param(20, marks=[pytest.mark.long,
                                                              pytest.mark.timeout(600)])])
def test_stops_at_random_times_with_loader_workers_change_no_bit(warm, tmp_path, count):
    draw = random.Random(count)
    # Samples of 20 ms, read by two processes a rank: 12 s at least, and the stops have come by 9 s.
    arguments = [f"--steps={50 * count}", "--data.workers=2", "--task.validation=12",
                 "--eval.every=25", "--checkpoint.every=30"]
    stops = [Stop(after_s=draw.uniform(0, 3.0)) for _ in range(count)]
    finish(warm, tmp_path / "straight", 2, arguments)

    ends = until_done(warm, tmp_path / "run", 2, arguments, stops, TRAIN=0.02, VALIDATION=0.02)

    assert [end.code for end in ends] == [75] * count, told(tmp_path / "run")
    assert max(end.took_s for end in ends) < GRACE_S
    assert list(differences(tmp_path / "straight", tmp_path / "run")) == []


def test_a_burst_of_signals_to_one_rank_stops_all_at_the_same_step(warm, tmp_path):
    arguments = ["--steps=120", "--data.workers=0"]
    finish(warm, tmp_path / "straight", 2, arguments)
    stops = [Stop(when="first-step", who="rank 1", number=signal.SIGUSR1, times=20),
             Stop(when="first-step", who="ranks", number=signal.SIGHUP)]

    ends = until_done(warm, tmp_path / "run", 2, arguments, stops, TRAIN=0.01)

    assert [end.code for end in ends] == [75, 75], told(tmp_path / "run")
    steps = [(e["rank"], e["step"]) for e in events(tmp_path / "run", "stop")]
    assert len(set(steps)) == 4
    assert len({step for _, step in steps}) == 2
    assert list(differences(tmp_path / "straight", tmp_path / "run")) == []


@pytest.mark.parametrize("phase", ["start", "restore", "data"])
def test_before_the_first_step_a_stop_is_at_once_though_the_main_thread_hangs(
        warm, tmp_path, phase):
    run, fault = tmp_path / "run", f"--inject=hang:phase={phase}:rank=1"
    arguments = ["--steps=30", "--data.workers=0", "--checkpoint.every=10", fault]
    stops = [Stop(when='"event": "fault"', who="rank 0")]
    if phase == "restore":
        stops.insert(0, Stop(when="first-step"))

    ends = until_done(warm, run, 2, arguments, stops, TRAIN=0.01)

    assert [end.code for end in ends] == [75] * len(stops), told(run)
    assert "failure" not in told(run)


def test_a_stop_leaves_a_validation_and_the_test_which_are_done_when_it_goes_on(warm, tmp_path):
    arguments = ["--steps=20", "--eval.every=10", "--task.validation=60", "--data.workers=0",
                 "--inject=slow:phase=evaluate:step=10:seconds=0.5"]
    finish(warm, tmp_path / "straight", 2, arguments)
    stops = [Stop(when='"at_phase": "evaluate"'), Stop(when='"event": "save".*"at_step": 20')]

    ends = until_done(warm, tmp_path / "run", 2, arguments, stops, VALIDATION=0.05, TEST=0.2)

    assert [end.code for end in ends] == [75, 75], told(tmp_path / "run")
    assert [e["step"] for e in events(tmp_path / "run", "stop")] == [10, 10, 20, 20]
    assert list(differences(tmp_path / "straight", tmp_path / "run")) == []


def test_a_stop_waits_for_a_slow_save_as_long_as_the_grace_allows(warm, tmp_path):
    arguments = ["--steps=30", "--data.workers=0", "--checkpoint.every=10"]
    slow = [*arguments, "--inject=slow:phase=save-mid:step=10:seconds=2"]
    late = [*arguments, "--stop.grace-s=1", "--inject=slow:phase=save-mid:step=10:seconds=40"]
    stop = Stop(when='"at_phase": "save-mid"')

    [saved] = until_done(warm, tmp_path / "slow", 2, slow, [stop], TRAIN=0.01)
    [cut] = until_done(warm, tmp_path / "late", 2, late, [stop], TRAIN=0.01)

    assert saved.code == 75
    assert "--stop.grace-s 1: step" in told(tmp_path / "late")
    # From the beginning, or from what rank 1 still saved when it saw rank 0 leave.
    first, second = inspect(tmp_path / "late")["attempts"]
    assert first["start_step"] == 0
    assert second["start_step"] == 0 or second["start_step"] >= 10
    # Rank 1's own time is up too, unless it sees rank 0 leave before, and saves in peace.
    assert cut.code == 1 or (cut.code == 75 and second["start_step"] >= 10)
    assert inspect(tmp_path / "slow")["attempts"][1]["start_step"] >= 10


def test_without_a_launcher_one_ctrl_c_stops_and_a_second_one_leaves_at_once(warm, tmp_path):
    run, arguments = tmp_path / "run", ["--steps=1000", "--data.workers=0"]
    hang, env = [*arguments, "--inject=hang:step=50"], {"SLOW_TRAIN_S": "0.01"}
    once = Stop(when="first-step", number=signal.SIGINT)
    twice = Stop(when='"event": "fault"', number=signal.SIGINT, times=100, gap_s=0.05)

    [first] = warm(1, stopped, str(run), 0, arguments, once, env, group=False)
    [second] = warm(1, stopped, str(run), 0, hang, twice, env, group=False)

    assert (first.code, second.code) == (75, 130), told(run)


def test_threads_that_hold_up_the_end_are_named_and_a_stop_ends_that(warm, tmp_path):
    run, arguments = tmp_path / "run", ["--steps=2", "--data.workers=0", "--stop.grace-s=0.2"]

    [end] = warm(1, stopped, str(run), 1, arguments, Stop(when="waits for threads.*: upload;"),
                 {"SLOW_THREAD_S": "80"}, group=False)

    assert end.code == 0, told(run)
    assert end.took_s < 40
    assert inspect(run)["finished"]


def test_a_signal_to_every_process_spares_the_loader_workers(warm, tmp_path):
    arguments = ["--steps=80", "--data.workers=2"]
    finish(warm, tmp_path / "straight", 2, arguments)

    ends = until_done(warm, tmp_path / "run", 2, arguments,
                      [Stop(when="first-step", who="all", times=3)], TRAIN=0.05)

    assert [end.code for end in ends] == [75], told(tmp_path / "run")
    assert list(differences(tmp_path / "straight", tmp_path / "run")) == []
    assert "while stopping" not in told(tmp_path / "run")


def test_an_error_that_comes_up_while_stopping_ends_as_the_stop(warm, tmp_path):
    arguments = ["--steps=30", "--data.workers=2"]
    finish(warm, tmp_path / "straight", 2, arguments)

    ends = until_done(warm, tmp_path / "run", 2, arguments,
                      [Stop(when="first-step", who="orphans")], TRAIN=0.3)

    assert [end.code for end in ends] == [75], told(tmp_path / "run")
    assert "warning: while stopping, step" in told(tmp_path / "run")
    assert events(tmp_path / "run", "failure") == []
    assert list(differences(tmp_path / "straight", tmp_path / "run")) == []
