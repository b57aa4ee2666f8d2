"""Stops by real signals, at any time, to any process, any number of times."""

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

# Imported here, in the process that launchers are forked from.
import launch.__main__
import launch.agent
import launch.rendezvous
import launch.workers  # noqa: F401
import trainer.__main__
import trainer.loop
import trainer.run.build
from benchmarks.chaos_run import _fork, children
from trainer.commands.compare import differences
from trainer.commands.inspect import inspect
from trainer.telemetry.events import read_events

TASK = ["--task=slow_task:Slow", "--device=cpu", "--batch.global-size=8", "--batch.micro-size=2",
        "--task.samples=160", "--task.norm=batch", "--task.dropout=0.2", "--world.threads=1",
        "--checkpoint.every=1000"]  # fmt: skip
GRACE_S = 30.0
DEADLINE_S = 200.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stop:
    """When and how a launch is stopped.

    Attributes:
        when: a regular expression that a line of events.jsonl or of the output must match first;
            "": immediately.
        after_s: seconds to wait after the match.
        who: "launcher", "rank 0", "rank 1", "ranks", "all" (every process), or "orphans": the
            ranks, with their loader processes killed as well.
        number: the signal.
        times: how often it is sent.
        gap_s: seconds between two signals.
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
    """In a warm process, launch `size` ranks, stop them, and return how the launch ended.

    Args:
        size: number of ranks; 0: `python -m trainer` without a launcher.
    """
    os.environ.update(env)
    warnings.simplefilter("ignore")
    log = Path(run).with_suffix(".log")
    before = log.stat().st_size if log.exists() else 0
    events = Path(run, "events.jsonl")
    seen = events.stat().st_size if events.exists() else 0
    own = [*TASK, *arguments, f"--run-dir={run}"]
    pid = _fork(["--nproc-per-node", str(size), "--", *own], log) if size else alone(own, log)
    pidfd = os.pidfd_open(pid)

    def output() -> str:
        text = log.read_text()[before:] if log.exists() else ""
        return text + (events.read_text()[seen:] if events.exists() else "")

    deadline_s = time.monotonic() + DEADLINE_S
    ended = False
    while not ended and time.monotonic() < deadline_s and not (
            listens(pid) and re.search(stop.when, output())):
        ended = bool(select.select([pidfd], [], [], 0.005)[0])
    ended = ended or bool(select.select([pidfd], [], [], stop.after_s)[0])
    began_s = time.monotonic()
    if not ended:
        for _ in range(stop.times):
            send_signal(pid, stop)
            if select.select([pidfd], [], [], stop.gap_s)[0]:
                break
    if not select.select([pidfd], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
        os.killpg(pid, signal.SIGKILL)
        return End(code=None, took_s=DEADLINE_S)
    took_s = time.monotonic() - began_s
    return End(code=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), took_s=took_s)


def alone(arguments: list[str], log: Path) -> int:
    """Start a process that trains without a launcher; returns its pid."""
    if pid := os.fork():
        return pid
    os.setpgid(0, 0)
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    for name in ("RANK", "WORLD_SIZE"):
        del os.environ[name]
    os._exit(trainer.__main__.main(arguments))


def send_signal(launcher: int, stop: Stop) -> None:
    """Send the signal of a stop to its targets."""
    if stop.who == "launcher":
        os.kill(launcher, stop.number)
        return
    ranks = {name(pid): pid for server in children(launcher) for pid in children(server)}
    processes = [launcher, *(q for p in ranks.values() for q in [p, *children(p)])]
    targets = {"ranks": list(ranks.values()), "orphans": list(ranks.values()), "all": processes}
    for pid in targets.get(stop.who) or [ranks[stop.who]]:
        with contextlib.suppress(ProcessLookupError):  # it has exited after another rank's stop
            os.kill(pid, stop.number)
    if stop.who == "orphans":
        for pid in children(ranks["rank 0"]):
            os.kill(pid, signal.SIGKILL)


def listens(pid: int) -> bool:
    """Whether a process has installed its SIGTERM handler."""
    found = re.search(r"SigCgt:\s(\w+)", Path(f"/proc/{pid}/status").read_text())
    return found is not None and bool(int(found[1], 16) >> (signal.SIGTERM - 1) & 1)


def name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def until_done(warm: Any, run: Path, size: int, arguments: Sequence[str], stops: Sequence[Stop],
               **slow: float) -> list[End]:
    """Launch once per stop, then once more until completion; returns the ends of the former."""
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


@pytest.fixture(scope="module")
def straight(warm: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run of 80 steps."""
    run = tmp_path_factory.mktemp("undisturbed") / "straight"
    finish(warm, run, 2, ["--steps=80", "--data.workers=0"])
    return run


def log(run: Path) -> str:
    return run.with_suffix(".log").read_text()


def events(run: Path, event: str) -> list[dict[str, Any]]:
    return [e for e in read_events(run / "events.jsonl") if e["event"] == event]


@pytest.mark.parametrize("count", [2, pytest.param(20, marks=[pytest.mark.long,
                                                              pytest.mark.timeout(600)])])
def test_stops_at_random_times_with_loader_workers_change_no_bit(warm, tmp_path, count):
    draw = random.Random(count)
    # Samples of 20 ms, read by two processes per rank: at least 12 s; all stops come within 9 s.
    arguments = [f"--steps={50 * count}", "--data.workers=2", "--task.validation=12",
                 "--eval.every=25", "--checkpoint.every=30"]
    stops = [Stop(after_s=draw.uniform(0, 3.0)) for _ in range(count)]
    finish(warm, tmp_path / "straight", 2, arguments)

    ends = until_done(warm, tmp_path / "run", 2, arguments, stops, TRAIN=0.02, VALIDATION=0.02)

    assert [end.code for end in ends] == [75] * count, log(tmp_path / "run")
    assert max(end.took_s for end in ends) < GRACE_S
    assert list(differences(tmp_path / "straight", tmp_path / "run")) == []


def test_a_burst_of_signals_to_one_rank_stops_all_at_the_same_step(warm, tmp_path, straight):
    arguments = ["--steps=80", "--data.workers=0"]
    stops = [Stop(when="first-step", who="rank 1", number=signal.SIGUSR1, times=20),
             Stop(when="first-step", who="ranks", number=signal.SIGHUP)]

    ends = until_done(warm, tmp_path / "run", 2, arguments, stops, TRAIN=0.01)

    assert [end.code for end in ends] == [75, 75], log(tmp_path / "run")
    steps = [(e["rank"], e["step"]) for e in events(tmp_path / "run", "stop")]
    assert len(set(steps)) == 4
    assert len({step for _, step in steps}) == 2
    assert list(differences(straight, tmp_path / "run")) == []


@pytest.mark.parametrize("phase", [
    "restore", *(pytest.param(other, marks=pytest.mark.long) for other in ("start", "data"))])
def test_before_the_first_step_a_stop_is_immediate_even_if_the_main_thread_hangs(
        warm, tmp_path, phase):
    run, fault = tmp_path / "run", f"--inject=hang:phase={phase}:rank=1"
    arguments = ["--steps=30", "--data.workers=0", "--checkpoint.every=10", fault]
    stops = [Stop(when='"event": "fault"', who="rank 0")]
    if phase == "restore":
        stops.insert(0, Stop(when="first-step"))

    ends = until_done(warm, run, 2, arguments, stops, TRAIN=0.01)

    assert [end.code for end in ends] == [75] * len(stops), log(run)
    assert "failure" not in log(run)


def test_a_stop_interrupts_validation_and_test_which_the_next_start_repeats(warm, tmp_path):
    arguments = ["--steps=20", "--eval.every=10", "--task.validation=60", "--data.workers=0",
                 "--inject=slow:phase=evaluate:step=10:seconds=0.5"]
    finish(warm, tmp_path / "straight", 2, arguments)
    stops = [Stop(when='"at_phase": "evaluate"'), Stop(when='"event": "save".*"at_step": 20')]

    ends = until_done(warm, tmp_path / "run", 2, arguments, stops, VALIDATION=0.05, TEST=0.2)

    assert [end.code for end in ends] == [75, 75], log(tmp_path / "run")
    assert [e["step"] for e in events(tmp_path / "run", "stop")] == [10, 10, 20, 20]
    assert list(differences(tmp_path / "straight", tmp_path / "run")) == []


def test_a_stop_waits_for_a_slow_save_within_the_grace_time(warm, tmp_path):
    arguments = ["--steps=30", "--data.workers=0", "--checkpoint.every=10"]
    slow = [*arguments, "--inject=slow:phase=save-mid:step=10:seconds=2"]
    late = [*arguments, "--stop.grace-s=1", "--inject=slow:phase=save-mid:step=10:seconds=40"]
    stop = Stop(when='"at_phase": "save-mid"')

    [saved] = until_done(warm, tmp_path / "slow", 2, slow, [stop], TRAIN=0.01)
    [cut] = until_done(warm, tmp_path / "late", 2, late, [stop], TRAIN=0.01)

    assert saved.code == 75
    assert "--stop.grace-s 1: step" in log(tmp_path / "late")
    # From the beginning, or from the save of rank 1 after it noticed the exit of rank 0.
    first, second = inspect(tmp_path / "late")["attempts"]
    assert first["start_step"] == 0
    assert second["start_step"] == 0 or second["start_step"] >= 10
    # The time of rank 1 is up too, unless it notices the exit of rank 0 first, and saves.
    assert cut.code == 1 or (cut.code == 75 and second["start_step"] >= 10)
    assert inspect(tmp_path / "slow")["attempts"][1]["start_step"] >= 10


def test_without_a_launcher_one_ctrl_c_stops_and_a_second_one_exits_immediately(warm, tmp_path):
    run, arguments = tmp_path / "run", ["--steps=1000", "--data.workers=0"]
    hang, env = [*arguments, "--inject=hang:step=50"], {"SLOW_TRAIN_S": "0.01"}
    once = Stop(when="first-step", number=signal.SIGINT)
    twice = Stop(when='"event": "fault"', number=signal.SIGINT, times=100, gap_s=0.05)

    [first] = warm(1, stopped, str(run), 0, arguments, once, env, group=False)
    [second] = warm(1, stopped, str(run), 0, hang, twice, env, group=False)

    assert (first.code, second.code) == (75, 130), log(run)


def test_threads_that_delay_the_exit_are_named_and_a_stop_ends_the_wait(warm, tmp_path):
    run, arguments = tmp_path / "run", ["--steps=2", "--data.workers=0", "--stop.grace-s=0.2"]

    [end] = warm(1, stopped, str(run), 1, arguments, Stop(when="waits for threads.*: upload;"),
                 {"SLOW_THREAD_S": "80"}, group=False)

    assert end.code == 0, log(run)
    assert end.took_s < 40
    assert inspect(run)["finished"]


def test_loader_workers_survive_a_signal_to_every_process(warm, tmp_path, straight):
    arguments = ["--steps=80", "--data.workers=2"]

    ends = until_done(warm, tmp_path / "run", 2, arguments,
                      [Stop(when="first-step", who="all", times=3)], TRAIN=0.05)

    assert [end.code for end in ends] == [75], log(tmp_path / "run")
    assert list(differences(straight, tmp_path / "run")) == []
    assert "while stopping" not in log(tmp_path / "run")


def test_an_error_while_stopping_still_ends_as_a_stop(warm, tmp_path, straight):
    arguments = ["--steps=80", "--data.workers=2"]

    ends = until_done(warm, tmp_path / "run", 2, arguments,
                      [Stop(when="first-step", who="orphans")], TRAIN=0.3)

    assert [end.code for end in ends] == [75], log(tmp_path / "run")
    assert "warning: while stopping, step" in log(tmp_path / "run")
    assert events(tmp_path / "run", "failure") == []
    assert list(differences(straight, tmp_path / "run")) == []
