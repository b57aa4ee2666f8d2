"""History of a run, from the files in its folder: attempts, their phases, goodput.

Only `read_history` reads files; the other functions are pure.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError
from trainer.resilience.attempts import Attempt, Event, read_attempts
from trainer.storage import files, layout
from trainer.storage.jsonl import read_records
from trainer.telemetry.events import read_events

PARTS = ("useful", "redone", "saving", "detecting", "restarting", "waiting")
"""Uses of the wall time of a run.

useful: training and validation. redone: steps that are repeated. saving: training is held up by
saves. detecting: from a fault until it is noticed. restarting: from then, or from the start of the
processes, to the next step. waiting: no process of the run exists.
"""

FATAL = ("kill", "exit", "raise", "hang", "stop", "corrupt")
"""Injected faults that end the step in which they happen."""
_NOTICES = ("failure", "lost-peer", "death", "hang")
_BEFORE_TRAINING = ("stop", "rendezvous", "fork")  # phases of the launcher, in the field `entered`


@dataclass(kw_only=True)
class AttemptTimes:
    """Times of an attempt, in this order, in seconds since the epoch. None: not reached."""

    attempt: Attempt
    begun: float
    """The processes start."""
    trains: float | None
    """The first step begins."""
    fault: float | None
    """The fault that ends the attempt happens."""
    noticed: float | None
    """The fault is noticed."""
    over: float
    """Time of the last record."""
    ranks: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Time of the first and the last record of each rank."""


@dataclass(kw_only=True)
class History:
    """Contents of a run folder, of a finished or an unfinished run."""

    name: str
    path: Path
    events: list[dict[str, Any]]
    steps: list[dict[str, Any]]
    """Lines of training steps in metrics.jsonl."""
    validations: list[dict[str, Any]]
    timing: list[dict[str, Any]]
    config: dict[str, Any]
    """Dotted name → value."""
    environment: dict[str, Any]
    summary: dict[str, Any] | None
    attempt_times: list[AttemptTimes] = field(default_factory=list)
    goodput: dict[str, float] = field(default_factory=dict)
    """Seconds for each of `PARTS`; their sum is `wall_s`."""

    @property
    def begun(self) -> float:
        """Time at which the first process of the first attempt started."""
        return self.attempt_times[0].begun if self.attempt_times else 0.0

    @property
    def over(self) -> float:
        """Time of the last record of the run."""
        return max((p.over for p in self.attempt_times), default=0.0)

    @property
    def wall_s(self) -> float:
        """Seconds from the start of the first process to the last record."""
        return self.over - self.begun

    @property
    def useful_share(self) -> float | None:
        """Share of the wall time that is useful."""
        return self.goodput["useful"] / self.wall_s if self.wall_s > 0 else None

    @property
    def useful_share_running(self) -> float | None:
        """Share of the wall time without waiting that is useful."""
        running_s = self.wall_s - self.goodput["waiting"]
        return self.goodput["useful"] / running_s if running_s > 0 else None

    @property
    def lost_steps(self) -> int:
        """Number of finished steps that were repeated."""
        return sum(lost_steps(p, after) for p, after in _pairs(self.attempt_times)) + sum(
            steps_repeated_by_rollback(e) for e in self.events)


def read_history(path: Path, *others: Path) -> History:
    """Read a run folder. The run may still be writing to it.

    Args:
        others: folders of the same run on other nodes. Their events are included.

    Raises:
        ConfigError: the folder contains no run.
    """
    if not path.is_dir():
        raise ConfigError(f"{path}: there is no such folder")
    if files.read_json(path / layout.IDENTITY) is None and not (path / layout.EVENTS).exists():
        raise ConfigError(f"{path}: there is no run in this folder (no {layout.IDENTITY})")
    lines = read_records(path / layout.METRICS)
    history = History(
        name=path.resolve().name, path=path,
        events=[e for e in read_events(*(run / layout.EVENTS for run in (path, *others)))
                if {"time", "attempt", "rank", "step", "event"} <= e.keys()],
        steps=[line for line in lines if "loss" in line],
        validations=[line for line in lines if "val_loss" in line],
        timing=[line for line in read_records(path / layout.TIMING) if "step_s" in line],
        config=_config(path / layout.CONFIG),
        environment=files.read_json(path / layout.ENVIRONMENT) or {},
        summary=files.read_json(path / layout.SUMMARY),
    )  # fmt: skip
    history.attempt_times = attempt_times(history.events, history.timing)
    history.goodput = goodput(history.attempt_times, history.events, history.timing)
    return history


def attempt_times(
    events: Sequence[Event], timing: Sequence[Mapping[str, Any]]
) -> list[AttemptTimes]:
    """Return the times of each attempt. Attempts do not overlap."""
    found: list[AttemptTimes] = []
    attempts = read_attempts(events)
    by_number: dict[int, list[Event]] = {a.number: [] for a in attempts}
    for event in events:
        by_number.get(event["attempt"], []).append(event)
    for number, attempt in enumerate(attempts):
        own = by_number[attempt.number]
        lines = [line for line in timing if line["attempt"] == attempt.number]
        following = attempts[number + 1] if number + 1 < len(attempts) else None
        limit = min((e["time"] for e in by_number[following.number]), default=None) if (
            following is not None) else None
        found.append(_passage(attempt, own, lines, limit))
    for before, after in itertools.pairwise(found):
        before.over = min(before.over, max(before.begun, after.begun))
        _in_order(before)
    return found


def _passage(
    attempt: Attempt, events: Sequence[Event], timing: Sequence[Mapping[str, Any]],
    limit: float | None,
) -> AttemptTimes:  # fmt: skip
    entered = [e["entered"] for e in events if e["event"] == "first-step" and e.get("entered")]
    starts = [min(v for k, v in phases.items() if k not in _BEFORE_TRAINING) for phases in entered
              if set(phases) - set(_BEFORE_TRAINING)]
    trains = [min(phases[k] for k in ("train", "evaluate") if k in phases) for phases in entered
              if {"train", "evaluate"} & set(phases)]
    ends = [e["time"] for e in events if e["event"] in _NOTICES]
    noticed = min(ends, default=None)
    fault = None
    if noticed is not None:
        faults = [e["time"] for e in events if e["event"] == "fault" and e["time"] <= noticed
                  and str(e.get("fault", "")).split(":")[0] in FATAL]
        hangs = [e["time"] - e.get("idle_s", 0.0) for e in events if e["event"] == "hang"]
        fault = min([*faults[-1:], *hangs, noticed])
    over = max([e["time"] for e in events] + [line["time"] for line in timing])
    reached, steps = attempt.reached, [(e["time"], e["step"]) for e in events]
    steps += [(line["time"], line["step"]) for line in timing]
    if noticed is None and attempt.end == "died" and reached is not None and limit is not None:
        # The ranks and their launcher died without an event. The next attempt has read from
        # metrics.jsonl which step was reached: extrapolate the end from the last record.
        last, step = max(steps)
        over = min(limit, max(over, last + max(0, reached - step) * step_seconds(timing)))
    passage = AttemptTimes(
        attempt=attempt, begun=min([e["time"] for e in events] + starts),
        trains=min(trains, default=None), fault=fault, noticed=noticed, over=over,
    )  # fmt: skip
    for rank in sorted({e["rank"] for e in events}):
        times = [e["time"] for e in events if e["rank"] == rank]
        times += [e["entered"]["start"] for e in events if e["event"] == "first-step"
                  and e["rank"] == rank and "start" in e.get("entered", {})]
        silent = not any(e["rank"] == rank and e["event"] in (*_NOTICES, "stop", "end", "refused")
                         for e in events)
        last = (noticed or over) if silent else max(times)
        passage.ranks[rank] = (min(times), max(*times, last))
    _in_order(passage)
    return passage


def _in_order(passage: AttemptTimes) -> None:
    """Make the times of an attempt monotonic: the clocks of several nodes may differ."""
    earliest = passage.begun
    for name in ("trains", "fault", "noticed"):
        value = getattr(passage, name)
        if value is not None:
            earliest = min(max(earliest, value), passage.over)
            setattr(passage, name, earliest)


def goodput(
    found: Sequence[AttemptTimes], events: Sequence[Event], timing: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """Return the seconds for each of `PARTS`. Their sum is the wall time."""
    parts = dict.fromkeys(PARTS, 0.0)
    for passage, after in _pairs(found):
        number = passage.attempt.number
        lines = [line for line in timing if line["attempt"] == number]
        saves = [e for e in events if e["attempt"] == number and e["event"] == "save"]
        trains = passage.over if passage.trains is None else passage.trains
        stopped = passage.over if passage.fault is None else passage.fault
        noticed = passage.over if passage.noticed is None else passage.noticed
        stopped = max(trains, stopped)
        noticed = max(noticed, stopped)
        parts["restarting"] += trains - passage.begun

        training = stopped - trains
        held = sum(line["save_s"][0] or 0.0 for line in lines)
        held += sum(e.get("seconds", 0.0) for e in saves if e.get("kind") == "stop")
        saving = min(training, held)
        steps = lost_steps(passage, after) + sum(
            steps_repeated_by_rollback(e) for e in events
            if e["attempt"] == number and e["rank"] == 0)
        redone = min(training - saving, steps * step_seconds(lines, passage))
        parts["saving"] += saving
        parts["redone"] += redone
        parts["useful"] += training - saving - redone

        parts["detecting"] += noticed - stopped
        # The rest of the attempt is part of the restart, if one launcher started both attempts.
        rest = passage.over - noticed
        last_save = min(rest, sum(e.get("seconds", 0.0) for e in saves
                                  if e.get("kind") == "survivor"))
        parts["saving"] += last_save
        parts["restarting"] += rest - last_save
        if after is not None:
            gap = after.begun - passage.over
            parts["restarting" if passage.attempt.relaunched else "waiting"] += gap
    return parts


def lost_steps(passage: AttemptTimes, after: AttemptTimes | None) -> int:
    """Return the number of finished steps of an attempt that the next attempt repeats."""
    if after is None:
        return 0
    reached = max(passage.attempt.end_step, passage.attempt.reached or 0)
    return max(0, reached - after.attempt.start_step)


def steps_repeated_by_rollback(event: Event) -> int:
    """Return the number of finished steps that a rollback within an attempt repeats."""
    if event["event"] != "rollback" or "at_step" not in event or event["rank"] != 0:
        return 0
    return int(max(0, event["at_step"] - event["to_step"]))


def step_seconds(timing: Sequence[Mapping[str, Any]], passage: AttemptTimes | None = None) -> float:
    """Return the mean time of a step, from the length of the attempt if no step was timed."""
    steps = sum(line["steps"] for line in timing)
    if steps:
        return float(sum(line["step_s"][0] for line in timing) / steps)
    if passage is None or passage.trains is None:
        return 0.0
    steps = passage.attempt.end_step - passage.attempt.start_step
    return ((passage.fault or passage.over) - passage.trains) / steps if steps > 0 else 0.0


def _pairs(found: Sequence[AttemptTimes]) -> list[tuple[AttemptTimes, AttemptTimes | None]]:
    return list(itertools.zip_longest(found, found[1:]))


def _config(path: Path) -> dict[str, Any]:
    try:
        return flatten(tomllib.loads(path.read_text()))
    except (OSError, ValueError):
        return {}


def flatten(nested: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dict with the items of inner dicts under dotted names."""
    found: dict[str, Any] = {}
    for key, value in nested.items():
        found |= {f"{key}.{name}": inner for name, inner in value.items()} if (
            isinstance(value, dict)) else {key: value}
    return found
