"""`--inject`: what it understands, where a fault fires, how often, and what it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainer.errors import ConfigError
from trainer.resilience import fault_injection
from trainer.resilience.fault_injection import Fault, FaultInjector, InjectedFault
from trainer.telemetry.events import Log, read_events

ROOT, parse = Path(__file__).parents[3], fault_injection.parse_fault


def arm(
    folder: Path | None, *texts: str, rank: int = 0, attempt: int = 0, **actions: Any
) -> FaultInjector:
    return FaultInjector([parse(text) for text in texts], rank=rank, attempt=attempt,
                         fired=folder and folder / "faults", actions=actions)


def fires(armed: FaultInjector, step: int = 1, phase: str = "forward", epoch: int = 0) -> bool:
    """Whether a fault of kind raise fires at a place."""
    try:
        armed(phase, step, epoch)
    except InjectedFault:
        return True
    return False


# --- the grammar

def test_parts_stand_in_any_order():
    parts = {"rank": 1, "step": 7, "epoch": 2, "attempt": 3, "phase": "backward"}
    words = [*(f"{name}={value}" for name, value in parts.items()), "seconds=0.25", "always"]

    for order in (words, words[::-1]):
        text = ":".join(["slow", *order])
        assert parse(text) == Fault(text=text, kind="slow", seconds=0.25, always=True, **parts)
    assert parse("kill") == Fault(text="kill", kind="kill", rank=0, phase="forward")


@pytest.mark.parametrize(("text", "told"), [
    ("kil", "no fault 'kil'; there are kill, exit"),
    ("", "no fault ''; there are kill"),
    ("kill:phase=bakward", "no phase 'bakward'; there are start"),
    ("kill:stp=3", "no part 'stp=3'; there are rank, step"),
    ("kill:step", "step= is not a number"), ("kill:rank=1.5", "rank=1.5 is not a number"),
    ("kill:rank=-1", "rank=-1 is not a number from 0 on"),
    ("kill:step=0", "steps count from 1"),
    ("kill:seconds=3", "no part 'seconds=3'; there are rank")])
def test_a_mistake_names_the_flag_the_text_and_what_there_is(text, told):
    with pytest.raises(ConfigError) as caught:
        parse(text)

    assert str(caught.value).startswith(f"--inject {text}: {told}")


@pytest.mark.parametrize(("text", "told"), [
    ("kill:rank=2", "there is no rank 2; the last one is 1"),
    ("kill:step=11", "the run ends with step 10")])
def test_a_fault_whose_place_is_not_in_the_run_is_refused(text, told):
    with pytest.raises(ConfigError) as caught:
        fault_injection.refuse_unreachable([parse(text)], ranks=2, total=10)

    assert str(caught.value).startswith(f"--inject {text}: {told}")
    fault_injection.refuse_unreachable([parse("kill:rank=1:step=10")], ranks=2, total=10)
    fault_injection.refuse_unreachable([parse("kill:rank=2")], ranks=None, total=10)


def test_what_has_not_happened_is_told_of_this_rank_only(tmp_path):
    armed = arm(tmp_path, "slow:seconds=0", "slow:attempt=3", "slow:rank=1", "slow:step=9:always")

    armed("forward", 1)

    assert armed.unfired() == ["slow:attempt=3"]


# --- where, and how often

@pytest.mark.parametrize(("text", "place", "fired"), [
    ("raise", {}, True), ("raise", {"rank": 1}, False),
    ("raise:step=7:phase=backward", {"step": 7, "phase": "backward"}, True),
    ("raise:step=7:phase=backward", {"step": 6, "phase": "backward"}, False),
    ("raise:step=7:phase=backward", {"step": 7}, False),
    ("raise:rank=1", {"rank": 1}, True), ("raise:rank=1", {}, False),
    ("raise:epoch=2", {"epoch": 2}, True), ("raise:epoch=2", {"epoch": 1}, False),
    ("raise:attempt=1", {"attempt": 1}, True), ("raise:attempt=1", {}, False)])
def test_a_fault_fires_at_its_place_only(text, place, fired):
    armed = arm(None, "raise:step=99", text, rank=place.pop("rank", 0),
                attempt=place.pop("attempt", 0))

    assert fires(armed, **place) is fired


@pytest.mark.parametrize(("texts", "times"), [
    (["raise:step=3"], 1), (["raise:step=3", "raise:step=3"], 2), (["raise:always"], 6)])
def test_a_fault_fires_once_also_across_restarts_unless_it_says_always(tmp_path, texts, times):
    fired = 0
    for attempt in range(3):
        armed = arm(tmp_path, *texts, attempt=attempt)
        fired += sum(fires(armed, 3) for _ in range(2))

    assert fired == times


# --- what


def test_the_mark_and_the_event_of_a_fault_are_on_disk_before_it_happens(tmp_path):
    log, seen = Log(level="error"), []

    def look() -> None:
        seen.extend((tmp_path / "f").iterdir())
        seen.extend(read_events(tmp_path / "events.jsonl"))

    log.open_events(tmp_path / "events.jsonl", attempt=2, nonce="n")
    armed = FaultInjector([parse("nan:phase=step-end")], attempt=2, log=log, fired=tmp_path / "f",
                          actions={"nan": look})
    armed("step-end", 5)
    log.close()

    mark, event = seen
    assert mark.name == "0-nan:phase=step-end"
    assert (event["event"], event["fault"], event["at_step"], event["at_phase"]) == (
        "fault", "nan:phase=step-end", 5, "step-end")


def test_an_event_after_a_torn_line_is_a_line_of_its_own(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'5\nnull\n{"attempt": "q"}\n{"time": 2.0, "event": "save"}\n{"ti\xff\x00')

    for attempt in (1, 2):
        log = Log()
        log.open_events(path, attempt=attempt, nonce="n")
        log.event("start")
        log.close()

    assert [e["event"] for e in read_events(path)] == ["save", "start", "start"]
    assert path.read_bytes().count(b"\n") == 7, "and no line is empty"
