"""`--inject`: what it understands, where a fault fires, how often, and what it does."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.errors import ConfigError
from trainer.resilience import fault_injection
from trainer.resilience.fault_injection import Fault, FaultInjector, InjectedFault
from trainer.telemetry.events import Log, read_events

ROOT = Path(__file__).parents[3]


def fires(*texts: str, rank: int = 0, attempt: int = 0, **place: object) -> bool:
    """Whether one of the faults, all of kind raise, fires at a place."""
    armed = FaultInjector([fault_injection.parse_fault(text) for text in texts], rank=rank,
                          attempt=attempt)
    where = {"phase": "forward", "step": 1, "epoch": 0} | place
    try:
        armed(where.pop("phase"), **where)
    except InjectedFault:
        return True
    return False


# --- the grammar

@pytest.mark.parametrize("kind", fault_injection.KINDS)
def test_a_kind_alone_means_rank_0_in_the_first_forward(kind):
    assert fault_injection.parse_fault(kind) == Fault(
        text=kind, kind=kind, rank=0, step=None, epoch=None, phase="forward", attempt=None,
        always=False)


@pytest.mark.parametrize(("part", "field", "value"), [
    ("rank=3", "rank", 3), ("step=12", "step", 12), ("epoch=2", "epoch", 2),
    ("attempt=1", "attempt", 1), ("seconds=0.25", "seconds", 0.25), ("always", "always", True),
    *((f"phase={phase}", "phase", phase) for phase in fault_injection.PHASES),
])
def test_each_part_sets_its_field_and_no_other(part, field, value):
    found = fault_injection.parse_fault(f"slow:{part}")

    default = fault_injection.parse_fault("slow")
    assert getattr(found, field) == value
    assert dataclasses.replace(found, **{field: getattr(default, field)}, text="slow") == default


def test_parts_stand_in_any_order():
    parts = ["rank=1", "step=7", "phase=backward", "always"]

    read = {dataclasses.replace(fault_injection.parse_fault(":".join(["kill", *order])), text="")
            for order in itertools.permutations(parts)}

    assert len(read) == 1


@pytest.mark.parametrize(("text", "told"), [
    ("kil", "no fault 'kil' (did you mean 'kill'?); there are kill, exit"),
    ("", "no fault ''; there are kill"),
    ("explode", "no fault 'explode'"),
    ("kill:phase=bakward", "no phase 'bakward' (did you mean 'backward'?); there are start"),
    ("kill:phase", "no phase ''"),
    ("kill:stp=3", "no part 'stp=3' (did you mean 'step'?); there are rank, step"),
    ("kill:step=x", "step=x is not a number"),
    ("kill:step=", "step= is not a number"),
    ("kill:step", "step= is not a number"),
    ("kill:rank=1.5", "rank=1.5 is not a number"),
    ("slow:seconds=long", "seconds=long is not a number"),
    ("kill:always=yes", "no part 'always=yes'"),
    ("kill:", "no part ''"),
    ("kill:rank=-1", "rank=-1 is below 0"),
    ("kill:step=0", "steps count from 1"),
    ("kill:epoch=1:phase=start", "phase 'start' belongs to no epoch"),
    ("nan:phase=start", "there is no loss yet"),
    ("kill:seconds=3", "kill takes no duration; only slow has seconds="),
])
def test_a_mistake_names_the_flag_the_text_and_what_there_is(text, told):
    with pytest.raises(ConfigError) as caught:
        fault_injection.parse_fault(text)

    assert str(caught.value).startswith(f"--inject {text}: {told}")


@pytest.mark.parametrize(("text", "told"), [
    ("kill:rank=2", "there is no rank 2; the ranks are 0 to 1"),
    ("kill:step=11", "the run ends with step 10"),
    ("kill:epoch=2", "the run's last epoch is 1"),
    ("kill:phase=evaluate:step=3", "step 3 isn't evaluated"),
])
def test_a_fault_whose_place_is_not_in_the_run_is_refused(text, told):
    def check(text: str, **other: object) -> None:
        place: dict = {"ranks": 2, "total": 10, "epochs": 2, "evaluated": lambda s: s % 5 == 0}
        fault_injection.refuse_unreachable([fault_injection.parse_fault(text)], **(place | other))

    with pytest.raises(ConfigError) as caught:
        check(text)

    assert str(caught.value).startswith(f"--inject {text}: {told}")
    for good in ("kill:rank=1:step=10", "kill:epoch=1", "kill:phase=evaluate:step=10",
                 "kill:phase=evaluate", "kill:phase=start"):
        check(good)
    check("kill:rank=2", ranks=None)
    check("kill:epoch=2", epochs=None)
    with pytest.raises(ConfigError, match="nothing is evaluated"):
        check("kill:phase=evaluate", evaluated=None)


def test_what_has_not_happened_is_told_of_this_rank_only(tmp_path):
    armed = arm(tmp_path, "slow:seconds=0", "slow:attempt=3", "slow:rank=1", "slow:step=9:always")

    armed("forward", 1)

    assert armed.unfired() == ["slow:attempt=3"]


# --- where

def test_a_fault_fires_at_its_place_only():
    assert fires("raise")
    assert fires("raise:step=7:phase=backward", step=7, phase="backward")
    assert not fires("raise:step=7:phase=backward", step=6, phase="backward")
    assert not fires("raise:step=7:phase=backward", step=7, phase="forward")
    assert fires("raise:rank=1", rank=1)
    assert not fires("raise:rank=1", rank=0)
    assert not fires("raise", rank=1)
    assert fires("raise:epoch=2", epoch=2)
    assert not fires("raise:epoch=2", epoch=1)
    assert fires("raise:attempt=1", attempt=1)
    assert not fires("raise:attempt=1", attempt=0)
    assert fires("raise:step=9", "raise:step=1", step=1)


# --- how often

def arm(folder: Path, *texts: str, attempt: int = 0, **actions: Callable) -> FaultInjector:
    return FaultInjector([fault_injection.parse_fault(text) for text in texts],
                         marks=folder / "faults", attempt=attempt, actions=actions)


def test_a_fault_fires_once_also_across_restarts(tmp_path):
    armed = arm(tmp_path, "raise:step=3")
    with pytest.raises(InjectedFault):
        armed("forward", 3)

    armed("forward", 3)
    arm(tmp_path, "raise:step=3", attempt=1)("forward", 3)


def test_the_same_fault_given_twice_fires_twice(tmp_path):
    for attempt in range(2):
        armed = arm(tmp_path, "raise:step=3", "raise:step=3", attempt=attempt)
        with pytest.raises(InjectedFault):
            armed("forward", 3)

    arm(tmp_path, "raise:step=3", "raise:step=3", attempt=2)("forward", 3)


def test_always_fires_each_time(tmp_path):
    for attempt in range(2):
        armed = arm(tmp_path, "raise:always", attempt=attempt)
        for step in (1, 2):
            with pytest.raises(InjectedFault):
                armed("forward", step)


def test_the_mark_of_a_fault_is_on_disk_before_it_happens(tmp_path):
    seen = []
    armed = arm(tmp_path, "nan:step=2",
                nan=lambda: seen.extend((tmp_path / "faults").iterdir()))

    armed("forward", 2)

    assert [path.name for path in seen] == ["0-nan:step=2"]


# --- what

def run(text: str) -> subprocess.CompletedProcess[str]:
    """A process of its own in which the fault fires."""
    code = ("import sys; from trainer.resilience import fault_injection\n"
            f"injector = fault_injection.FaultInjector([fault_injection.parse_fault({text!r})])\n"
            "injector('forward', 1)\n"
            "print('went on')")
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT,
                          timeout=200, check=False)


@pytest.mark.parametrize(("kind", "code"), [
    ("kill", -signal.SIGKILL), ("exit", 1), ("term", -signal.SIGTERM), ("raise", 1),
])
def test_an_ending_fault_ends_the_process_its_own_way(kind, code):
    ended = run(kind)

    assert ended.returncode == code
    assert "went on" not in ended.stdout


def test_stop_stops_the_process_until_it_is_continued():
    code = ("from trainer.resilience import fault_injection\n"
            "fault_injection.FaultInjector([fault_injection.parse_fault('stop')])('forward', 1)\n"
            "print('went on')")
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
        try:
            _, status = os.waitpid(process.pid, os.WUNTRACED)  # returns when it has stopped
            assert os.WIFSTOPPED(status)
            assert os.WSTOPSIG(status) == signal.SIGSTOP
        finally:
            process.send_signal(signal.SIGCONT)
        assert process.communicate(timeout=200)[0] == b"went on\n"


def test_slow_waits_and_goes_on(monkeypatch):
    waits = []
    monkeypatch.setattr(fault_injection.time, "sleep", waits.append)

    FaultInjector([fault_injection.parse_fault("slow:seconds=2.5")])("forward", 1)
    FaultInjector([fault_injection.parse_fault("slow")])("forward", 1)

    assert waits == [2.5, 1.0]


@pytest.mark.parametrize("kind", ["nan", "flip", "enospc"])
def test_what_needs_the_runs_own_hands_is_done_by_them(kind):
    done = []
    armed = FaultInjector([fault_injection.parse_fault(f"{kind}:step=2")],
                          actions={kind: lambda: done.append(kind)})

    for step in (1, 2, 3):
        armed("forward", step)

    assert done == [kind]


def test_a_full_disk_is_the_error_that_the_system_gives():
    error = fault_injection.no_space("/some/file")

    assert error.errno == errno.ENOSPC
    assert error.filename == "/some/file"
    assert "No space left" in str(error)


def test_an_event_after_a_torn_line_is_a_line_of_its_own(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "save"}\n{"event": "sto')

    for attempt in (1, 2):
        log = Log()
        log.open_events(path, attempt=attempt, nonce="n")
        log.event("start")
        log.close()

    assert [e["event"] for e in read_events(path)] == ["save", "start", "start"]
    assert len(path.read_text().splitlines()) == 4, "and no line is empty"


def test_a_fault_is_an_event_and_a_line_before_it_happens(tmp_path):
    log = Log(level="error")
    log.open_events(tmp_path / "events.jsonl", attempt=2, nonce="n")
    armed = FaultInjector([fault_injection.parse_fault("raise:phase=step-end")], attempt=2, log=log)

    with pytest.raises(InjectedFault, match="--inject raise:phase=step-end: raised at step 5"):
        armed("step-end", 5)
    log.close()

    event, = read_events(tmp_path / "events.jsonl")
    assert event["event"] == "fault"
    assert (event["fault"], event["at_step"], event["at_phase"], event["attempt"]) == (
        "raise:phase=step-end", 5, "step-end", 2)


def test_lines_that_are_no_events_are_passed_over(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'5\nnull\n[1]\n{"time": "x"}\n{"attempt": "q"}\n'
                     b'{"time": 2.0, "attempt": 0, "event": "end"}\n{"ti\xff\x00')

    assert read_events(path) == [{"time": 2.0, "attempt": 0, "event": "end"}]
