"""The attempts of a run, read from its events: how each ended, and which step fails repeatedly."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.errors import EXIT_COMPLETE, EXIT_FAILURE, EXIT_GAVE_UP
from trainer.storage.records import Kind, is_count, is_text, optional
from trainer.telemetry.events import ALWAYS

Event = Mapping[str, Any]
Key = tuple[int, str | None]

RUN = Kind(needed={"run": is_text, "attempt": is_count}, known={"launch": optional(is_text)})
"""Content of run.json."""

CAUSES = ("failure", "death", "hang", "stop")
"""Events that give the cause of an attempt's end; other ranks report it as `lost-peer`."""
_ENDS = {"end": "finished", "refused": "refused", "failure": "failure"}
_STOPS = {EXIT_COMPLETE: "finished", EXIT_FAILURE: "failure", EXIT_GAVE_UP: "gave up"}


@dataclass(kw_only=True)
class Attempt:
    """One attempt, from the events of all ranks."""

    number: int
    world_size: int
    start_step: int
    end_step: int
    end: str = "died"  # or finished, stopped, gave up, refused, failure, running
    nonce: str | None = None  # in its events, and in the lock file while it runs
    launch: str | None = None  # equal in all attempts started by one launcher
    version: str | None = None  # digest of the configuration and the task's code
    cause: Event | None = None  # the first failure, or a secondary one if there is no other
    relaunched: bool = False  # by the same launcher, so the end was no preemption
    reached: int | None = None  # the last step in metrics.jsonl when the next attempt started

    @property
    def failed(self) -> bool:
        """Whether a failure ended it; if it died with its launcher, it was preempted."""
        return self.end in ("failure", "died") and (self.cause is not None or self.relaunched)

    @property
    def failed_step(self) -> int | None:
        """The step of the failure; without an event, the step after the last recorded one."""
        if self.cause is not None:
            return failed_step(self.cause)
        return None if self.reached is None else self.reached + 1


def by_attempt(events: Iterable[Event]) -> Iterator[tuple[Key, Event]]:
    """Each event with number and nonce of its attempt. The launcher's have no nonce: they are of
    the latest attempt with their number."""
    latest: dict[int, str | None] = {}
    for event in events:
        if event.keys() >= ALWAYS:
            number = event["attempt"]
            latest[number] = event.get("nonce") or latest.get(number)
            yield (number, latest[number]), event


def read_attempts(events: Iterable[Event], owner: str | None = None) -> list[Attempt]:
    """All attempts, in order, from events in order. An attempt without an event of its end died,
    unless `owner`, the nonce of the living owner of the run folder, is its own. Two attempts may
    have the same number: on an empty disk, the number of one that no mirror knows is given again.
    """
    attempts: dict[Key, Attempt] = {}
    reached: dict[Key, int | None] = {}
    for key, event in by_attempt(events):
        if event["event"] == "start" and (event["rank"] == 0 or key not in attempts):
            # Use rank 0's event; in the folder of a node without rank 0, the first one.
            reached[key] = event.get("reached") if event["rank"] == 0 else None
            attempts[key] = Attempt(
                number=key[0], nonce=key[1], world_size=event.get("world_size", 0),
                start_step=event["step"], end_step=event["step"], launch=event.get("launch"),
                version=event.get("version"))
        elif key in attempts:
            _add(attempts[key], event)
    found = list(attempts.values())
    for attempt in found[-1:]:
        if attempt.end == "died" and owner is not None and attempt.nonce == owner:
            attempt.end = "running"
    for attempt, following in itertools.pairwise(found):
        attempt.reached = reached[following.number, following.nonce]
        attempt.relaunched = attempt.launch is not None and attempt.launch == following.launch
    return found


def running_s(records: Iterable[Event]) -> float:
    """Seconds from the first to the last record of each attempt, summed."""
    spans: dict[int, tuple[float, float]] = {}
    for record in records:
        time, number = record["time"], record["attempt"]
        begin, end = spans.get(number, (time, time))
        spans[number] = min(begin, time), max(end, time)
    return sum(end - begin for begin, end in spans.values())


def _add(attempt: Attempt, event: Event) -> None:
    attempt.end_step = max(attempt.end_step, event["step"])
    if event.get("error") == "StaleAttempt":
        return  # from an orphan that was superseded by a newer attempt
    end = _ENDS.get(event["event"])
    if event["event"] == "stop":
        end = _STOPS.get(event.get("exit_code", -1), "stopped")
    if end is not None and attempt.end in ("died", "failure"):
        attempt.end = end
    is_primary = event["event"] in CAUSES and not _is_secondary(event) and end in ("failure", None)
    replaces = attempt.cause is None or (is_primary and _is_secondary(attempt.cause))
    if replaces and (is_primary or _is_secondary(event)):
        attempt.cause = event


def _is_secondary(event: Event) -> bool:
    return event["event"] == "lost-peer" or bool(event.get("echo"))


def repeated_failures(attempts: Sequence[Attempt], *, version: str) -> list[Attempt]:
    """The most recent consecutive attempts that failed at the same step, oldest first. Preempted
    ones are ignored; a failure at another or an unknown step, a stop and another `version` end it.
    """
    row: list[Attempt] = []
    for attempt in reversed(attempts):
        if attempt.end not in ("failure", "died") or attempt.version != version:
            break
        if not attempt.failed:
            continue
        step = attempt.failed_step
        if step is None or (row and step != row[-1].failed_step):
            break
        row.append(attempt)
    return row[::-1]


def failed_step(event: Event) -> int:
    step: int | None = event.get("failed_step")
    return event["step"] if step is None else step


def failure_sentence(event: Event) -> str:
    """A failure in one line: rank, step, phase, attempt and reason."""
    phase = event.get("failed_phase") or event.get("phase")
    place = f"step {failed_step(event)} ({phase}), attempt {event['attempt']}"
    if _is_secondary(event):
        return f"a peer of rank {event['rank']} was lost at {place}"
    reason, where = event.get("why") or event["event"], event.get("where")
    if event["event"] == "hang":  # possibly reported by another rank
        who = "all ranks" if event.get("culprit") is None else f"rank {event['culprit']}"
        return f"{who}, {place}: hang: {reason}"
    return f"rank {event['rank']}, {place}: {reason}" + (f" ({where})" if where else "")
