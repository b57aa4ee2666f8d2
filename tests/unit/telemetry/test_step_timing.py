"""Timing of the steps: messages of the ranks, the lines of rank 0, its warnings."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from trainer.distributed.comm_timer import CommunicationTimer
from trainer.resilience.hang_detection import RankReport
from trainer.resilience.heartbeats import Heartbeats
from trainer.telemetry import step_timing
from trainer.telemetry.step_timing import EVERY_S, LONGEST_S, StepTiming


class World:
    """Simulated ranks in lock step on a simulated clock. Rank 0 receives all messages."""

    now = 1000.0

    def __init__(self, path: Path, *, size: int = 2, workers: int = 0, cores: int = 4) -> None:
        self.warnings, self.path = list[str](), path
        self.ranks = [
            StepTiming(rank=rank, size=size, workers=workers, cores=cores,
                       warn=self.warnings.append, memory=lambda rank=rank: 100.0 + rank)
            for rank in range(size)
        ]
        self.ranks[0].open(path)
        self.step = 0

    def train(self, steps: int, own: list[float], *, data: float = 0.0, beat: bool = True) -> None:
        """Each step takes as long as its slowest rank; the others wait."""
        for _ in range(steps):
            self.step += 1
            World.now += max(own)
            for timing, own_s in zip(self.ranks, own, strict=True):
                times = {"step": max(own), "data": data, "compute": own_s - data,
                         "communication": max(own) - own_s}
                timing.add(self.step, times, samples=8, blocked_s=0.0)
            if beat and len(self.ranks) > 1 and self.ranks[0].due:
                self.ranks[0].collect([timing.message() for timing in self.ranks])

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(text) for text in self.path.read_text().splitlines() if text]


@pytest.fixture(autouse=True)
def _clock(monkeypatch):
    now = lambda: World.now  # noqa: E731
    monkeypatch.setattr(step_timing, "time", SimpleNamespace(monotonic=now, time=now))


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("step_s", [0.001, 0.09, 3.0])
def test_the_lines_cover_each_step_once(tmp_path, size, step_s):
    world = World(tmp_path / "timing.jsonl", size=size)

    world.train(1000, [step_s] * size)
    world.ranks[0].close()

    lines = world.lines
    assert sum(line["steps"] for line in lines) == 1000
    assert sum(line["samples"] for line in lines) == 8000
    assert lines[-1]["step"] == 1000
    assert sum(line["step_s"][0] for line in lines) == pytest.approx(1000 * step_s)
    assert sum(line["wall_s"] for line in lines) == pytest.approx(1000 * step_s)
    assert all(line["memory_mb"][0] == 100.0 for line in lines)
    assert all(None not in line["step_s"] for line in lines[:-1])


def test_the_interval_of_lines_grows_with_the_age_of_an_attempt(tmp_path):
    world = World(tmp_path / "timing.jsonl")

    world.train(20_000, [1.0, 1.0])

    apart = [line["wall_s"] for line in world.lines]
    assert apart[0] <= 2 * EVERY_S
    assert LONGEST_S <= apart[-1] <= LONGEST_S + 5
    assert len(apart) < 800


def test_ranks_that_publish_at_different_times_are_compared_by_the_same_number_of_steps(tmp_path):
    world = World(tmp_path / "timing.jsonl")
    world.train(2000, [0.001, 0.001], beat=False)
    early = world.ranks[1].message()
    world.train(700, [0.001, 0.001], beat=False)  # 0.7 s later

    world.ranks[0].collect([world.ranks[0].message(), early])

    [line] = world.lines
    assert (line["step"], line["steps"]) == (2700, 2700)
    assert line["step_s"] == pytest.approx([line["steps"] / 1000] * 2)


def test_a_slow_rank_is_reported_once(tmp_path):
    world = World(tmp_path / "timing.jsonl", size=4)

    world.train(200, [0.06, 0.06, 0.09, 0.06])

    assert world.warnings == ["rank 2 holds the others back: it needs 90 ms a step, they 60 ms: "
                          "33% of each step is spent on waiting for it"]


def test_a_problem_in_few_lines_is_not_reported(tmp_path):
    world = World(tmp_path / "timing.jsonl")

    for _ in range(20):
        world.train(12, [0.06, 0.09])  # two lines at most
        world.train(30, [0.06, 0.063])

    assert world.warnings == []


@pytest.mark.parametrize(("workers", "cores", "remedy"), [
    (0, 4, "--data.workers 2"), (2, 4, "--data.workers 4"), (4, 4, "cheaper samples"),
    (0, 1, "--data.workers 2")])
def test_a_slow_loader_is_reported_once_with_a_remedy(tmp_path, workers, cores, remedy):
    world = World(tmp_path / "timing.jsonl", size=1, workers=workers, cores=cores)

    world.train(200, [0.1], data=0.038)

    [warnings] = world.warnings
    assert warnings.startswith("your loader is the bottleneck: 38% of each step waits for data "
                           f"(38 ms of 100 ms); try {remedy}")


def test_heartbeats_carry_the_messages_to_rank_0(tmp_path):
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world = World(tmp_path / "timing.jsonl", size=3)
    world.train(100, [0.1, 0.1, 0.1], beat=False)
    report = RankReport(phase="forward", step=100, idle_s=0.0, waits=False, over=False)
    beats = [Heartbeats(host.clone(), rank=rank, size=3, report=report, tick_s=0.02)
             for rank in range(3)]
    try:
        for beat, timing in zip(beats, world.ranks, strict=True):
            beat.times = timing
        deadline_s = time.monotonic() + 100
        while not world.lines and time.monotonic() < deadline_s:
            time.sleep(0.01)
    finally:
        for beat in beats:
            beat.stop()

    [line] = world.lines
    assert line["step_s"] == [pytest.approx(10.0)] * 3
    assert line["memory_mb"] == [100.0, 101.0, 102.0]


def test_a_warm_up_does_not_count_in_a_step():
    communication = CommunicationTimer(clock=iter(range(9)).__next__)
    communication.add_collective(communication.clock())
    communication.time_backward(loss := torch.ones(2, requires_grad=True).sum())
    loss.backward()
    communication.end_backward()

    communication.reset()

    assert communication.take_wait_s() == 0.0
