"""What the watchdog sees: places in shared memory, processes, whom a thread waits for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from trainer.distributed.waits import WaitsFor, waiting_for
from trainer.distributed.world import LaunchInfo, World
from trainer.resilience import progress_marks, stack_dumps
from trainer.resilience.fault_injection import PHASES
from trainer.resilience.hang_detection import RankReport
from trainer.resilience.heartbeats import Heartbeats
from trainer.resilience.progress_marks import ProgressMarks
from trainer.resilience.watchdog import Watchdog
from trainer.storage import processes
from trainer.telemetry.events import Log
from trainer.telemetry.status import Phase

ROOT = Path(__file__).parents[3]


def test_main_thread_and_writer_are_told_apart():
    seen = ProgressMarks()

    for phase in PHASES:
        seen.mark(phase, 3)
        place = seen.writer if phase.startswith("save") else seen.main
        assert (place.point, place.step) == (phase, 3)
    seen.mark("reading")

    assert (seen.main.point, seen.main.step) == ("reading", 3)
    assert seen.main.at_s >= seen.writer.at_s > 0
    seen.writer_is_idle()
    assert seen.writer.point is None


def test_the_main_thread_leaves_at_the_next_point_once_a_peer_is_gone():
    seen = ProgressMarks()
    seen.report_lost_peer()

    for other in ("optimizer", "step-end", "save-mid", "start", "restore", "warm-up"):
        seen.mark(other, 1)
    for point in ("reading", "data", "forward", "backward", "evaluate"):
        with pytest.raises(RuntimeError, match="connection closed by peer"):
            seen.mark(point, 1)


@pytest.fixture
def child():
    """Starts a python process, which is stopped or not; ends it after the test."""
    started = []

    def start(code: str) -> int:
        process = subprocess.Popen([sys.executable, "-c", f"{code}\nprint('ready', flush=True)\n"
                                    "import time; time.sleep(600)"],
                                   stdout=subprocess.PIPE, cwd=ROOT)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        return process.pid

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def until(condition, timeout_s: float = 100.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_stopped_process_still_tells_where_it_is(child):
    pid = child("from trainer.resilience.progress_marks import ProgressMarks; marks = "
                "ProgressMarks()\n"
                "marks.mark('backward', 12)")
    os.kill(pid, signal.SIGSTOP)
    until(lambda: processes.is_stopped(pid))

    places = progress_marks.read_marks(pid)

    assert places is not None
    assert (places[0].point, places[0].step) == ("backward", 12)
    assert "State:\tT (stopped)" in processes.describe_process(pid)


def test_only_the_process_that_is_meant_is_killed(child):
    pid = child("")
    started = processes.start_time(pid)
    assert started is not None

    assert not processes.kill(pid, started + 1)
    assert processes.start_time(pid) == started
    assert processes.kill(pid, started)
    until(lambda: processes.start_time(pid) is None)
    assert not processes.kill(pid, started)


def test_a_process_that_computes_or_whose_child_does_is_active_and_a_sleeping_one_is_not(child):
    loop = "import os; p = os.getppid()\nwhile os.getppid() == p: pass"  # ends with its parent
    busy = f"import threading; threading.Thread(target=exec, args=({loop!r},)).start()"
    nested = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {busy!r}])"
    looks = {name: processes.Activity(child(code))
             for name, code in (("busy", busy), ("nested", nested), ("asleep", ""))}
    seen = {name: [] for name in looks}
    # When a process falls asleep, after its first words, is the machine's affair: some time it has.
    until(lambda: [seen[n].append(look.seen()) for n, look in looks.items()] and all(
        any(seen[n]) for n in ("busy", "nested")) and len(seen["asleep"]) > 200
        and not any(seen["asleep"][-100:]))


def test_a_loader_worker_that_has_ended_is_told_as_that():
    pid = os.fork()
    if pid == 0:
        Path("/proc/self/comm").write_text(f"{stack_dumps.WORKER}3")
        os._exit(0)
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

        _, blamed = stack_dumps.worker_stacks()
    finally:
        os.waitpid(pid, 0)

    assert blamed == [f"its loader 3 (pid {pid}) has ended (os._exit, or a library's)"]


def test_ranks_hear_each_other_and_agree_on_one_alarm():
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told = [RankReport(phase="forward", step=rank, idle_s=0.0, waits=False, over=False)
            for rank in range(3)]
    beats = [Heartbeats(host.clone(), rank=rank, size=3, report=told[rank], tick_s=0.05)
             for rank in range(3)]
    try:
        beats[0].listening = True
        until(lambda: all(p.report is not None for p in beats[0].peers().values()))
        assert {r: p.report for r, p in beats[0].peers().items()} == {1: told[1], 2: told[2]}
        until(lambda: beats[0].identities.keys() == {0, 1, 2})

        beats[2].stop()  # as a stopped process falls silent
        until(lambda: (seen := beats[0].peers())[2].silent_s > 1.0 > seen[1].silent_s)

        first = beats[0].raise_alarm({"by": 0}, 60.0)
        second = beats[1].raise_alarm({"by": 1}, 60.0)
        assert (first, second) == (True, False)
        assert beats[0].alarm == beats[1].alarm == {"by": 0}
    finally:
        for beat in beats:
            beat.stop()


@pytest.mark.parametrize("whom", [WaitsFor.DEVICE, WaitsFor.PEERS])
def test_a_wait_for_a_device_is_found_although_it_takes_processor_time(whom, monkeypatch):
    log = Log(level="error")
    log.status.enter(Phase.TRAIN)
    watchdog = Watchdog(World(LaunchInfo(), torch.device("cpu"), 1), log, limit_s=4.0)
    watchdog.marks.mark(Phase.BACKWARD, 3, 0)
    monkeypatch.setattr(watchdog._main_quiet, "measure", lambda *_: 0.0)  # it computes

    with waiting_for(whom):
        over = [watchdog._look(time.monotonic() + past_s).over for past_s in (3.0, 5.0)]

    assert over == [False, whom is WaitsFor.DEVICE]


@pytest.mark.parametrize(("device", "at_once"), [("cuda", True), ("cpu", False)])
def test_a_rank_that_waits_for_a_gpu_leaves_at_once_when_a_peer_is_gone(
    device: str, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere the main thread gets an error by itself, and leaves."""
    watchdog = Watchdog(World(LaunchInfo(), torch.device(device), 1), Log(level="error"),
                        limit_s=60.0)
    left = threading.Event()

    def leave(*, late: bool) -> None:
        left.set()
        watchdog.stop()

    monkeypatch.setattr("trainer.resilience.watchdog.LEAVE_S", 1e9)
    monkeypatch.setattr(watchdog._alarm, "leave", leave)
    with waiting_for(WaitsFor.DEVICE):
        thread = threading.Thread(target=watchdog._wait_for_main_thread)
        thread.start()
        found = left.wait(60.0 if at_once else 1.0)
        watchdog.stop()
        thread.join()

    assert found is at_once
