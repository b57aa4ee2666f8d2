"""`python -m launch.chaos` signals only ranks of the run, and the bits stay the same."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from launches import ROOT, Launch, finish
from machine import alive, wait_gone
from scripted import wait_for

from launch import chaos
from trainer.commands.compare import differences
from trainer.storage.processes import program as process_program
from trainer.storage.processes import state

CHAOS = [sys.executable, "-m", "launch.chaos"]

RANK = """\
import json, os, socket, sys, time
from trainer.storage.jsonl import AppendFile
rank, attempt, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
events = AppendFile(path)
start = {"time": time.time(), "event": "start", "attempt": attempt, "rank": rank,
         "node": socket.gethostname(), "step": 0, "pid": os.getpid()}
events.append((json.dumps(start) + "\\n").encode())
sys.stdin.read()
"""


class Processes(contextlib.ExitStack):
    """Child processes that are killed at the end of the test."""

    def start(self, *command: str, at: Path = ROOT, **options: object) -> subprocess.Popen:
        process = self.enter_context(subprocess.Popen(
            command, cwd=at, env={**os.environ, "PYTHONPATH": str(at)}, **options))
        self.callback(process.kill)
        return process

    def rank(self, run: Path, rank: int, attempt: int = 0) -> subprocess.Popen:
        """A process that the tool takes for a rank."""
        process = self.start(sys.executable, "-c", RANK, str(rank), str(attempt),
                             str(run / "events.jsonl"), stdin=subprocess.PIPE)
        wait_for(lambda: [e for e in chaos.read_events(run / "events.jsonl")
                          if e["pid"] == process.pid])
        return process


@pytest.fixture
def processes():
    with Processes() as stack:
        yield stack


def drill(run: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CHAOS, str(run), *options], cwd=ROOT, capture_output=True, text=True,
                          timeout=250, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)})


FLAGS = ("--task=benchmarks.chaos_task:Chaos", "--steps=400", "--device=cpu",
         "--log.level=warning", "--batch.global-size=8", "--batch.micro-size=2",
         "--checkpoint.every=20", "--eval.every=100", "--seed=3")


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_run_whose_ranks_and_whole_node_are_killed_ends_with_the_same_bits(tmp_path):
    with Launch(tmp_path / "run", *FLAGS).start() as launch:
        ranks = drill(launch.run, "--mtbf=0.2", "--kinds=kill", "--count=3", "--seed=1")
        node = drill(launch.run, "--mtbf=0.1", "--kinds=node", "--count=1")

        assert (ranks.returncode, node.returncode) == (0, 0), ranks.stderr + node.stderr
        kill = r"\d\d:\d\d:\d\d \+[\d.]+ s  kill: SIGKILL to rank [01] \(pid \d+\) at step \d+"
        assert [bool(re.fullmatch(kill, line)) for line in ranks.stdout.splitlines()] == [True] * 3
        assert f"and the launcher (pid {launch.process.pid})" in node.stdout
        launch.end(-signal.SIGKILL)
    finish(launch.run, *FLAGS)

    straight = finish(tmp_path / "straight", *FLAGS)
    assert not list(differences(straight.run, launch.run))
    assert len({e["attempt"] for e in launch.events("start")}) > 2
    assert "the run is complete" in drill(launch.run, "--mtbf=60").stdout


def test_each_kind_sends_its_signal_to_a_rank_of_the_newest_attempt_only(tmp_path, processes):
    old = processes.rank(tmp_path, 0, attempt=0)
    new = {r: processes.rank(tmp_path, r, attempt=1) for r in range(3)}

    stop = drill(tmp_path, "--mtbf=0.01", "--kinds=stop", "--count=1")
    held = int(re.search(r"rank (\d)", stop.stdout)[1])
    ranks = chaos.local_ranks(tmp_path)
    assert wait_for(lambda: [r for r, pid in ranks.items() if state(pid) == "T"]) == [held]
    assert chaos._targets("stop", ranks) == {}  # the other ranks must notice this one first
    assert chaos._targets("term", ranks) == {r: new[r].pid for r in new if r != held}
    assert chaos._targets("kill", ranks) == ranks
    new[held].send_signal(signal.SIGCONT)
    term = drill(tmp_path, "--mtbf=0.01", "--kinds=term", "--count=1")
    first = int(re.search(r"rank (\d)", term.stdout)[1])
    assert new.pop(first).wait(200) == -signal.SIGTERM
    drill(tmp_path, "--mtbf=0.01", "--kinds=kill", "--count=1")
    assert wait_for(lambda: [p.poll() for p in new.values() if p.poll()]) == [-signal.SIGKILL]
    node = drill(tmp_path, "--mtbf=0.01", "--kinds=node", "--count=1")

    assert "the launcher (none)" in node.stdout  # the parent is this test, no launcher
    assert wait_gone({process.pid for process in new.values()}, 60) == set()
    assert alive(old.pid)


def test_a_process_without_the_events_file_open_for_appending_is_no_target(tmp_path, processes):
    events = tmp_path / "events.jsonl"
    rank = processes.rank(tmp_path, 0)
    with events.open("rb") as reading:
        reader = processes.start(sys.executable, "-c", "import sys; sys.stdin.read()",
                                 stdin=subprocess.PIPE, pass_fds=[reading.fileno()])
    for number, (node, pid) in enumerate([(socket.gethostname(), reader.pid),
                                          (socket.gethostname(), os.getpid()),
                                          ("elsewhere", rank.pid)], start=1):
        line = {"event": "start", "attempt": 0, "rank": number, "node": node, "pid": pid}
        with events.open("a") as file:
            file.write(json.dumps(line) + "\n")

    assert chaos.local_ranks(tmp_path) == {0: rank.pid}
    rank.kill()
    rank.wait()
    assert chaos.local_ranks(tmp_path) == {}
    ended = drill(tmp_path, "--mtbf=0.01", "--wait-s=0.2")
    assert "after 0 faults: the run has ended" in ended.stdout
    assert reader.poll() is None


WAITS = "import sys; print(flush=True); sys.stdin.read()"


@pytest.mark.parametrize(("command", "program"), [
    (["-u", "-X", "dev", "-m", "launch", "--", "x"], "launch"), (["{here}/torchrun"], "torchrun"),
    (["-c", WAITS, "-m", "launch"], "")])
def test_a_launcher_is_found_by_its_program_not_by_arguments(tmp_path, processes, command, program):
    for name in ("launch.py", "torchrun"):
        (tmp_path / name).write_text(WAITS)
    process = processes.start(sys.executable, *(word.format(here=tmp_path) for word in command),
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE, at=tmp_path)
    assert process.stdout.readline() == b"\n"

    assert process_program(process.pid) == program


@pytest.mark.parametrize(("arguments", "message"), [
    (["--mtbf=0"], "--mtbf: '0'"), (["--mtbf=1", "--kinds=kill,maim"], "'maim'"),
    (["--mtbf=1", "--count=0"], "--count: '0'"), (["--mtbf=1", "--wait-s=-1"], "--wait-s: '-1'"),
    ([], "--mtbf"),
])
def test_invalid_arguments_are_refused(arguments, message, tmp_path, capsys):
    assert chaos.main([str(tmp_path), *arguments]) == 2
    assert message in capsys.readouterr().err
