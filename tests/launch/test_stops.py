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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from runs import TAPE, events

from benchmarks.chaos_run import _fork, children
from trainer.commands.compare import differences
from trainer.commands.inspect import inspect
from trainer.storage import processes

TASK = [*TAPE, "--task=failing_task:Failing", "--task.norm=batch", "--task.dropout=0.2",
        "--world.threads=1", "--checkpoint.every=1000"]
GRACE_S = 30.0
DEADLINE_S = 200.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stop:
    """When and how a launch is stopped."""

    when: str = ""  # regular expression that events.jsonl or the output must match first
    after_s: float = 0.0  # seconds to wait after the match
    who: str = "launcher"
    """Or "rank 0", "rank 1", "ranks", "all" processes, "orphans": ranks without loader processes"""
    number: int = signal.SIGTERM
    times: int = 1
    gap_s: float = 0.0  # seconds between two signals


def stopped(run: str, size: int, arguments: Sequence[str], stop: Stop,
            env: Mapping[str, str] = {}) -> tuple[int | None, float]:
    """In a rank, whose process has imported everything, launch `size` ranks (0: `python -m
    trainer`) and stop them; returns the exit code, and the seconds since the first signal."""
    os.environ.update(env)
    for name in ("RANK", "WORLD_SIZE"):
        del os.environ[name]
    warnings.simplefilter("ignore")
    log = Path(run).with_suffix(".log")
    before = log.stat().st_size if log.exists() else 0
    events = Path(run, "events.jsonl")
    seen = events.stat().st_size if events.exists() else 0
    own = [*TASK, *arguments, f"--run-dir={run}"]
    pid = (_fork(["--nproc-per-node", str(size), "--", *own], log) if size
           else _fork(own, log, "trainer"))
    pidfd = os.pidfd_open(pid)

    def output() -> str:
        new = (path.read_bytes()[begin:] for path, begin in ((log, before), (events, seen))
               if path.exists())
        return b"".join(new).decode(errors="replace")  # a character may be half written

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
        return None, DEADLINE_S
    took_s = time.monotonic() - began_s
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), took_s


def send_signal(launcher: int, stop: Stop) -> None:
    if stop.who == "launcher":
        os.kill(launcher, stop.number)
        return
    ranks = {processes.name(pid): pid for server in children(launcher) for pid in children(server)}
    every = [launcher, *(q for p in ranks.values() for q in [p, *children(p)])]
    targets = {"ranks": list(ranks.values()), "orphans": list(ranks.values()), "all": every}
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


@pytest.fixture(scope="module")
def start(ranks: Any) -> Callable[..., tuple[int | None, float]]:
    def started(run: Path, size: int, arguments: Sequence[str], stop: Stop | None = None,
                 **slow: float) -> tuple[int | None, float]:
        env = {f"SLOW_{key}_S": str(value) for key, value in slow.items()}
        return ranks(1, stopped, str(run), size, arguments, stop or Stop(when="$^never"), env,
                     group=False, timeout_s=DEADLINE_S + 10)[0]

    return started


@pytest.fixture(scope="module")
def finish(start: Any) -> Callable[..., Path]:
    def finished(run: Path, arguments: Sequence[str], size: int = 2) -> Path:
        assert start(run, size, arguments)[0] == 0, log(run)
        return run

    return finished


@pytest.fixture(scope="module")
def until_done(start: Any, finish: Any) -> Callable[..., list[int | None]]:
    """Launch once per stop, whose codes are returned, then until completion."""
    def done(run: Path, arguments: Sequence[str], stops: Sequence[Stop],
             **slow: float) -> list[int | None]:
        ends = [start(run, 2, arguments, stop, **slow) for stop in stops]
        assert max(took_s for _, took_s in ends) < GRACE_S
        finish(run, arguments)
        return [code for code, _ in ends]

    return done


@pytest.fixture(scope="module")
def straight(finish: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finish(tmp_path_factory.mktemp("undisturbed") / "straight", ["--steps=80"])


def log(run: Path) -> str:
    return run.with_suffix(".log").read_text()


@pytest.mark.parametrize("count", [2, pytest.param(20, marks=[pytest.mark.long,
                                                              pytest.mark.timeout(600)])])
def test_stops_at_random_times_with_loader_workers_change_no_bit(
    until_done, finish, tmp_path, count
):
    draw = random.Random(count)
    # Samples of 20 ms, read by two processes per rank: at least 12 s; all stops come within 9 s.
    arguments = [f"--steps={50 * count}", "--data.workers=2", "--task.validation=12",
                 "--eval.every=25", "--checkpoint.every=30"]
    stops = [Stop(after_s=draw.uniform(0, 3.0)) for _ in range(count)]
    straight = finish(tmp_path / "straight", arguments)

    codes = until_done(tmp_path / "run", arguments, stops, TRAIN=0.02, VALIDATION=0.02)

    assert codes == [75] * count, log(tmp_path / "run")
    assert list(differences(straight, tmp_path / "run")) == []


def test_a_burst_of_signals_to_one_rank_stops_all_at_the_same_step(until_done, tmp_path, straight):
    stops = [Stop(when="first-step", who="rank 1", number=signal.SIGUSR1, times=20),
             Stop(when="first-step", who="ranks", number=signal.SIGHUP)]

    codes = until_done(tmp_path / "run", ["--steps=80"], stops, TRAIN=0.01)

    assert codes == [75, 75], log(tmp_path / "run")
    steps = [(e["rank"], e["step"]) for e in events(tmp_path / "run", "stop")]
    assert len(set(steps)) == 4
    assert len({step for _, step in steps}) == 2
    assert list(differences(straight, tmp_path / "run")) == []


@pytest.mark.parametrize("phase", [
    "restore", *(pytest.param(other, marks=pytest.mark.long) for other in ("start", "data"))])
def test_before_the_first_step_a_stop_is_immediate_even_if_the_main_thread_hangs(
        until_done, tmp_path, phase):
    run, fault = tmp_path / "run", f"--inject=hang:phase={phase}:rank=1"
    arguments = ["--steps=30", "--checkpoint.every=10", fault]
    stops = [Stop(when='"event": "fault"', who="rank 0")]
    if phase == "restore":
        stops.insert(0, Stop(when="first-step"))

    assert until_done(run, arguments, stops, TRAIN=0.01) == [75] * len(stops), log(run)

    assert "failure" not in log(run)


def test_a_stop_interrupts_validation_and_test_which_the_next_start_repeats(
    until_done, finish, tmp_path
):
    arguments = ["--steps=20", "--eval.every=10", "--task.validation=60", "--data.workers=0",
                 "--inject=slow:phase=evaluate:step=10:seconds=0.5"]
    straight, run = finish(tmp_path / "straight", arguments), tmp_path / "run"
    stops = [Stop(when='"at_phase": "evaluate"'), Stop(when='"event": "save".*"at_step": 20')]

    assert until_done(run, arguments, stops, VALIDATION=0.05, TEST=0.2) == [75, 75], log(run)

    assert [e["step"] for e in events(run, "stop")] == [10, 10, 20, 20]
    assert list(differences(straight, run)) == []


def test_a_stop_waits_for_a_slow_save_within_the_grace_time(until_done, tmp_path):
    arguments = ["--steps=30", "--checkpoint.every=10"]
    slow = [*arguments, "--inject=slow:phase=save-mid:step=10:seconds=2"]
    late = [*arguments, "--stop.grace-s=1", "--inject=slow:phase=save-mid:step=10:seconds=40"]
    stop = Stop(when='"at_phase": "save-mid"')

    [saved] = until_done(tmp_path / "slow", slow, [stop], TRAIN=0.01)
    [cut] = until_done(tmp_path / "late", late, [stop], TRAIN=0.01)

    assert saved == 75
    assert "--stop.grace-s 1: step" in log(tmp_path / "late")
    # From the beginning, or from the save of rank 1 after it noticed the exit of rank 0.
    first, second = inspect(tmp_path / "late")["attempts"]
    assert first["start_step"] == 0
    assert second["start_step"] == 0 or second["start_step"] >= 10
    # The time of rank 1 is up too, unless it notices the exit of rank 0 first, and saves.
    assert cut == 1 or (cut == 75 and second["start_step"] >= 10)
    assert inspect(tmp_path / "slow")["attempts"][1]["start_step"] >= 10


def test_without_a_launcher_one_ctrl_c_stops_and_a_second_one_exits_immediately(start, tmp_path):
    run, arguments = tmp_path / "run", ["--steps=1000"]
    once = Stop(when="first-step", number=signal.SIGINT)
    twice = Stop(when='"event": "fault"', number=signal.SIGINT, times=100, gap_s=0.05)

    first, _ = start(run, 0, arguments, once, TRAIN=0.01)
    second, _ = start(run, 0, [*arguments, "--inject=hang:step=50"], twice, TRAIN=0.01)

    assert (first, second) == (75, 130), log(run)


@pytest.mark.parametrize(("what", "name"), [
    ("THREAD", "upload"), ("PROCESS", r"packing \(pid \d+\)")])
def test_what_delays_the_exit_is_named_and_a_stop_ends_the_wait(start, tmp_path, what, name):
    run, arguments = tmp_path / "run", ["--steps=2", "--stop.grace-s=0.2"]

    code, took_s = start(run, 1, arguments, Stop(when=f"waits for.*: {name};"), **{what: 80})

    assert code == 0, log(run)
    assert took_s < 40
    assert inspect(run)["finished"]


@pytest.mark.parametrize(("stop", "slow_s", "may_warn"), [
    (Stop(when="first-step", who="all", times=3), 0.05, False),  # workers survive the signal
    (Stop(when="first-step", who="orphans"), 0.3, True),  # an error while stopping
])
def test_a_stop_with_loader_workers_ends_as_a_stop(
    until_done, tmp_path, straight, stop, slow_s, may_warn
):
    run = tmp_path / "run"

    assert until_done(run, ["--steps=80", "--data.workers=2"], [stop], TRAIN=slow_s) == [75], log(
        run)

    # Whether the death of the workers is seen before the save ends depends on the machine.
    assert may_warn or "warning: while stopping, step" not in log(run)
    assert events(run, "failure") == []
    assert list(differences(straight, run)) == []
