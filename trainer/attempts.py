"""The attempts of a run, read from its events: how each ended, and which step fails repeatedly."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.errors import EXIT_COMPLETE, EXIT_FAILURE, EXIT_GAVE_UP

Event = Mapping[str, Any]

CAUSES = ("failure", "death", "hang", "stop")
"""Events that may tell why an attempt ended; `lost-peer` is what others see of it."""


@dataclass(kw_only=True)
class Attempt:
    """One attempt: from rank 0's start to what every rank noted after it."""

    number: int
    world_size: int
    start_step: int
    end_step: int
    end: str = "died"
    """finished, stopped, gave up, refused, failure, or died where nobody could tell."""
    launch: str | None = None
    """Equal in the attempts that one launcher has started."""
    version: str | None = None
    """Of the configuration and the task's code."""
    cause: Event | None = None
    """The first failure, or an echo of it where none is told."""
    relaunched: bool = False
    """Whether its launcher has outlived it: it was no preemption, though nobody could tell."""
    reached: int | None = None
    """The last step that metrics.jsonl had when the attempt after it began."""

    @property
    def failed(self) -> bool:
        """Whether a failure ended it. One that vanished with its launcher was taken away."""
        return self.end in ("failure", "died") and (self.cause is not None or self.relaunched)

    @property
    def failed_step(self) -> int | None:
        """The step that it was in; where nobody could tell, the one after the last that shows."""
        if self.cause is not None:
            return failed_step(self.cause)
        return None if self.reached is None else self.reached + 1


def read_attempts(events: Iterable[Event]) -> list[Attempt]:
    """All attempts, in order.

    Args:
        events: in time's order.
    """
    attempts: dict[int, Attempt] = {}
    reached: dict[int, int | None] = {}
    for event in events:
        number, name = event.get("attempt", -1), event.get("event")
        if name == "start" and (event["rank"] == 0 or number not in attempts):
            # Rank 0's, or, in the folder of a node without it, the first.
            reached[number] = event.get("reached") if event["rank"] == 0 else None
            attempts[number] = Attempt(
                number=number, world_size=event["world_size"], start_step=event["step"],
                end_step=event["step"], launch=event.get("launch"), version=event.get("version"),
            )  # fmt: skip
        elif number in attempts:
            _add(attempts[number], event)
    found = [attempts[number] for number in sorted(attempts)]
    for attempt, following in itertools.pairwise(found):
        attempt.reached = reached[following.number]
        attempt.relaunched = attempt.launch is not None and attempt.launch == following.launch
    return found


def _add(attempt: Attempt, event: Event) -> None:
    attempt.end_step = max(attempt.end_step, event["step"])
    if event.get("error") == "StaleAttempt":
        return  # an orphan of it, which a newer attempt has sent away
    end = _end(event)
    if end is not None and attempt.end in ("died", "failure"):
        attempt.end = end
    tells = event["event"] in CAUSES and not event.get("echo") and end in ("failure", None)
    echoes = event["event"] == "lost-peer" or event.get("echo")
    known = attempt.cause is not None and attempt.cause["event"] in CAUSES and (
        not attempt.cause.get("echo"))
    if (tells and not known) or (echoes and attempt.cause is None):
        attempt.cause = event


def _end(event: Event) -> str | None:
    """How an attempt ends by this event; None if it is another kind of event."""
    match event["event"]:
        case "end":
            return "finished"
        case "refused":
            return "refused"
        case "failure":
            return "failure"
        case "stop":
            ends = {EXIT_COMPLETE: "finished", EXIT_FAILURE: "failure", EXIT_GAVE_UP: "gave up"}
            return ends.get(event.get("exit_code", -1), "stopped")
    return None


def repeated(attempts: Sequence[Attempt], *, version: str) -> list[Attempt]:
    """The newest attempts in a row that failed at the same step, the first one first.

    Those that were taken away count neither way. A failure at another step, or at one that nobody
    can tell, is progress, or another failure; a stop, or changed code or configuration, begins
    anew.

    Args:
        version: of the next attempt's configuration and task.
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
    """The step, in the making or just made, in which a failure happened."""
    step = event.get("failed_step")
    return event["step"] if step is None else step


def sentence(event: Event) -> str:
    """A failure in one line: rank, step, phase, attempt, and what it was."""
    place = (f"step {failed_step(event)} ({event.get('failed_phase') or event['phase']}), "
             f"attempt {event['attempt']}")
    if event["event"] == "lost-peer" or event.get("echo"):
        return f"a peer of rank {event['rank']} was lost at {place}"
    told = event.get("why") or event["event"]
    where = event.get("where")
    if event["event"] == "hang":  # of which another rank may tell
        culprit = event.get("culprit")
        who = "all ranks" if culprit is None else f"rank {culprit}"
        return f"{who}, {place}: hang: {told}"
    return f"rank {event['rank']}, {place}: {told}" + (f" ({where})" if where else "")
