"""Goodput: the uses of the wall time of a run, from its events, sum to the wall time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.commands.report.figures import DEATH, notable_events, summary
from trainer.commands.report.history import PARTS, History, read_history
from trainer.commands.report.plots import shorten_waiting

Event = dict[str, Any]


def event(time: float, attempt: int, name: str, *, rank: int = 0, step: int = 0,
          **more: Any) -> Event:
    return {"time": time, "attempt": attempt, "rank": rank, "step": step, "phase": "train",
            "event": name, **more}


def begun(time: float, attempt: int, *, step: int = 0, launch: str | None = "a", reached: int = 0,
          trains: float | None = 1.0) -> list[Event]:
    """Events of an attempt of two ranks that starts at `time` and trains from `time + trains`."""
    events = [event(time + 0.5, attempt, "start", rank=rank, step=step, world_size=2,
                    launch=launch, version="v", reached=reached) for rank in (0, 1)]
    if trains is not None:
        entered = {"stop": time - 0.3, "fork": time - 0.1, "start": time, "train": time + trains}
        events += [event(time + trains + 0.1, attempt, "first-step", rank=rank, step=step + 1,
                         entered=entered) for rank in (0, 1)]
    return events


def line(time: float, attempt: int, step: int, steps: int, *, step_s: float, save_s: float = 0.0
         ) -> dict[str, Any]:
    both = {f"{part}_s": [0.0, 0.0] for part in ("data", "compute", "communication")}
    return {"time": time, "attempt": attempt, "step": step, "steps": steps, "samples": 8 * steps,
            "step_s": [step_s * steps] * 2, "save_s": [save_s, 0.0], "memory_mb": [1.0, 1.0],
            **both}


def history(events: list[Event], timing: Sequence[dict[str, Any]] = (), *,
            running: bool = False) -> History:
    return History(name="run", path=Path("run"), events=sorted(events, key=lambda e: e["time"]),
                   steps=[], validations=[], timing=list(timing), config={}, environment={},
                   summary=None, running=running)


def parts(events: list[Event], timing: list[dict[str, Any]]) -> dict[str, float]:
    run = history(events, timing)
    assert sum(run.goodput.values()) == pytest.approx(run.wall_s)
    return {part: round(seconds, 6) for part, seconds in run.goodput.items() if seconds > 1e-9}


END = event(21.0, 0, "end", step=9)
KILLED = [event(11.0, 0, "fault", rank=1, step=9, fault="kill:rank=1"),
          event(11.5, 0, "lost-peer", step=9, failed_step=10),
          event(11.6, 0, "death", rank=1, step=9),
          event(12.0, 0, "save", step=9, kind="survivor", seconds=0.25)]
STOP = event(11.0, 0, "stop", step=9, exit_code=75)
FAILURE = event(11.0, 0, "failure", step=10, why="x", failed_step=11)
ROLLBACK = event(8.0, 0, "rollback", step=7, at_step=7, to_step=4, left_out=[])


@pytest.mark.parametrize(("events", "timing", "expected"), [
    pytest.param([*begun(10.0, 0), END], [], {"useful": 10.0, "restarting": 1.0}, id="no fault"),
    pytest.param(
        [*begun(0.0, 0), *KILLED, *begun(13.0, 1, step=9, reached=9),
         event(24.0, 1, "end", step=19)], [],
        {"useful": 20.0, "saving": 0.25, "detecting": 0.5, "restarting": 1.0 + 1.25 + 1.0},
        id="a death costs until it is noticed, then until the next step"),
    pytest.param(
        [*begun(0.0, 0), event(21.0, 0, "hang", step=9, culprit=1, idle_s=4.0, why="stuck"),
         *begun(22.0, 1, step=9, reached=9), event(33.0, 1, "end", step=19)], [],
        {"useful": 16.0 + 10.0, "detecting": 4.0, "restarting": 3.0},
        id="a hang begins with the last progress of the culprit"),
    pytest.param(
        [*begun(0.0, 0, launch="a"), STOP, *begun(3600.0, 1, step=9, launch="b", reached=9),
         event(3611.0, 1, "end", step=19)], [],
        {"useful": 20.0, "restarting": 2.0, "waiting": 3589.0}, id="between a stop and a launch"),
    pytest.param(
        [*begun(0.0, 0), FAILURE, *begun(12.0, 1, step=6, reached=10),
         event(23.0, 1, "end", step=16)],
        [line(11.0, 0, 10, 10, step_s=1.0), line(23.0, 1, 16, 10, step_s=1.0)],
        {"useful": 16.0, "redone": 4.0, "restarting": 3.0}, id="the next attempt repeats steps"),
    pytest.param(
        [*begun(0.0, 0), event(11.0, 0, "end", step=10)],
        [line(6.0, 0, 5, 5, step_s=1.0, save_s=0.5), line(11.0, 0, 10, 5, step_s=1.0)],
        {"useful": 9.5, "saving": 0.5, "restarting": 1.0}, id="saves"),
    pytest.param(  # the last record is of step 10; metrics.jsonl had 25 when the next one began
        [*begun(0.0, 0, launch="a"), *begun(1000.0, 1, step=20, launch="b", reached=25),
         event(1006.0, 1, "end", step=25)],
        [line(11.0, 0, 10, 10, step_s=1.0), line(1006.0, 1, 25, 5, step_s=1.0)],
        {"useful": 20.0 + 5.0, "redone": 5.0, "restarting": 2.0, "waiting": 1000.0 - 26.0},
        id="an attempt that died with its launcher lasted as long as its steps"),
    pytest.param(
        [*begun(0.0, 0), ROLLBACK, event(21.0, 0, "end", step=17)],
        [line(21.0, 0, 17, 20, step_s=1.0)],
        {"useful": 17.0, "redone": 3.0, "restarting": 1.0}, id="a rollback in an attempt"),
    pytest.param(  # the first record is of the start, half a second after the processes began
        [*begun(0.0, 0, trains=None), event(2.0, 0, "refused", why="no"),
         *begun(5.0, 1, launch="b"), event(16.0, 1, "end", step=10)], [],
        {"useful": 10.0, "restarting": 1.5 + 1.0, "waiting": 3.0}, id="no training")])
def test_the_wall_time_is_divided_into_its_uses(events, timing, expected):
    assert parts(events, timing) == expected


ATTEMPT = st.fixed_dictionaries({
    "after": st.floats(-1.0, 50.0), "trains": st.none() | st.floats(0.0, 5.0),
    "lasts": st.floats(0.0, 100.0), "launch": st.sampled_from(["a", "b", None]),
    "step": st.integers(0, 50), "skew": st.floats(-2.0, 2.0),
    "end": st.sampled_from(["end", "stop", "failure", "lost-peer", "death", "hang", None]),
    "fault": st.sampled_from(["kill", "nan", "stop", None]), "save": st.floats(0.0, 30.0),
    "idle": st.floats(0.0, 300.0), "reached": st.integers(0, 80)})


@settings(deadline=None)
@given(st.lists(ATTEMPT, min_size=1, max_size=6))
def test_the_parts_sum_to_the_wall_time(attempts):
    now, events, timing = 0.0, [], []
    for number, a in enumerate(attempts):
        now += a["after"]
        events += begun(now, number, step=a["step"], launch=a["launch"], reached=a["reached"],
                        trains=a["trains"])
        now += a["lasts"]
        step = a["step"] + 7
        if a["fault"]:
            events.append(event(now + a["skew"], number, "fault", rank=1, step=step,
                                fault=a["fault"]))
        if a["end"]:
            events.append(event(now, number, a["end"], step=step, idle_s=a["idle"], why="w",
                                exit_code=75, failed_step=step))
        events.append(event(now + 0.1, number, "save", step=step, seconds=a["save"],
                            kind="survivor" if a["save"] > 15 else "stop"))
        timing.append(line(now, number, step, 7, step_s=a["lasts"] / 7, save_s=a["save"] / 9))

    spent = parts(events, timing)

    assert set(spent) <= set(PARTS)
    assert all(seconds >= 0 for seconds in spent.values())


def test_a_folder_with_little_content_can_be_read(tmp_path):
    (tmp_path / "run.json").write_text('{"run": "x", "attempt": 0}')

    story = read_history(tmp_path)

    assert story.wall_s == 0
    assert summary(story) == {"state": "not started", "steps": "0",
                              "wall time": "0\N{NO-BREAK SPACE}s",
                              "not useful": "nothing", "attempts": "0", "repeated steps": "0",
                              "steps without an update": "0"}


def test_an_event_before_the_start_by_another_clock_has_a_position():
    events = [*begun(100.0, 0, launch="a"), event(111.0, 0, "stop", step=9, exit_code=75),
              *begun(90.0, 1, step=9, launch="b", reached=9), event(101.0, 1, "end", step=19)]
    run = history(events)

    at, _ = shorten_waiting(run)

    assert at(run.begun) == 0.0
    assert at(run.begun - 2.0) <= 0.0


def test_the_death_of_all_processes_is_an_event_at_the_last_record_unless_the_run_goes_on():
    killed = [*begun(0.0, 0), event(9.0, 0, "save", step=9), *begun(20.0, 1, step=9, reached=12)]

    for running, expected in ((True, ["0"]), (False, ["0", "1"])):
        run = history(killed, running=running)
        assert [str(times.attempt.number) for times in run.deaths] == expected
        deaths = [found for found, text in notable_events(run) if text == DEATH]
        assert [(e["rank"], e["attempt"]) for e in deaths] == [("all", int(n)) for n in expected]
        assert deaths[0]["step"] == 12
        assert summary(run)["state"] == ("running" if running else "died")
    assert not history([*begun(0.0, 0), *KILLED, *begun(13.0, 1), FAILURE], running=True).deaths


def test_a_step_that_is_repeated_is_drawn_once():
    timing = [line(5.0, 0, 10, 5, step_s=1.0), line(10.0, 0, 20, 10, step_s=1.0),
              line(20.0, 1, 12, 2, step_s=3.0), line(25.0, 1, 22, 10, step_s=3.0)]

    assert [part["step"] for part in history(begun(0.0, 0), timing).last_timing] == [10, 12, 22]
