"""History of a run, from the files in its folder: attempts, their phases, goodput.

Only `read_history` reads files; the other functions are pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError, FileDamaged
from trainer.resilience.attempts import RUN, Attempt, Event, Key, by_attempt, read_attempts
from trainer.run.run_dir import ENVIRONMENT, SUMMARY
from trainer.storage import layout
from trainer.storage.jsonl import read_records
from trainer.storage.locks import living_owner
from trainer.storage.records import (
    Kind,
    is_number,
    is_positive,
    is_text,
    optional,
    read_json,
    read_toml,
)
from trainer.storage.secrets import masked
from trainer.telemetry.events import ALWAYS, read_events
from trainer.telemetry.metrics import METRIC_LINE
from trainer.telemetry.step_timing import TIMING_LINE

CONFIG = Kind(known={"restart.max_same_step": is_positive, "clip.norm": optional(is_number),
                     "eval.best": is_text})
"""Content of config.toml by dotted name: the entries that readers use."""

Timing = Sequence[Mapping[str, Any]]
"""Lines of timing.jsonl."""

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
    """Times of an attempt, in seconds since the epoch, in this order. None: not reached."""

    attempt: Attempt
    begun: float
    trains: float | None  # the first step begins
    fault: float | None  # the fault that ends the attempt happens
    noticed: float | None  # the fault is noticed
    over: float  # the last record
    ranks: dict[int, tuple[float, float]]  # the first and the last record of each rank

    def put_in_order(self) -> None:
        """Make the times monotonic: clocks of nodes may differ."""
        earliest = self.begun
        for name in ("trains", "fault", "noticed"):
            value = getattr(self, name)
            if value is not None:
                earliest = min(max(earliest, value), self.over)
                setattr(self, name, earliest)


@dataclass(kw_only=True)
class History:
    """Contents of a run folder, of a finished or an unfinished run."""

    name: str
    path: Path
    events: list[dict[str, Any]]
    steps: list[dict[str, Any]]  # lines of training steps in metrics.jsonl
    validations: list[dict[str, Any]]
    timing: list[dict[str, Any]]
    config: dict[str, Any]  # dotted name → value
    environment: dict[str, Any]
    summary: dict[str, Any] | None
    owner: str | None = None  # nonce of the attempt that is running
    damage: list[str] = field(default_factory=list)  # files and lines that can't be used
    attempt_times: list[AttemptTimes] = field(init=False)
    goodput: dict[str, float] = field(init=False)  # seconds for each of `PARTS`

    def __post_init__(self) -> None:
        self.attempt_times = attempt_times(self.events, self.timing, self.owner)
        self.goodput = goodput(self.attempt_times, self.events, self.timing)

    @property
    def deaths(self) -> list[AttemptTimes]:
        """The attempts whose processes have all died without an event, as in a power cut."""
        return [times for times in self.attempt_times
                if times.attempt.end == "died" and times.attempt.cause is None]

    @property
    def last_timing(self) -> list[dict[str, Any]]:
        """The lines of timing.jsonl whose steps have not been repeated."""
        kept: list[dict[str, Any]] = []
        for line in reversed(self.timing):
            if not kept or line["step"] < kept[-1]["step"]:
                kept.append(line)
        return kept[::-1]

    @property
    def begun(self) -> float:
        """Time at which the first process of the first attempt started."""
        return self.attempt_times[0].begun if self.attempt_times else 0.0

    @property
    def over(self) -> float:
        """Time of the last record of the run."""
        return max((times.over for times in self.attempt_times), default=0.0)

    @property
    def wall_s(self) -> float:
        return self.over - self.begun

    @property
    def device_s(self) -> float:
        """Seconds for which the devices of all ranks computed, repeated steps included."""
        return sum(seconds or 0.0 for line in self.timing for seconds in line.get("compute_s", ()))

    @property
    def lost_steps(self) -> int:
        return sum(lost_steps(*pair, self.events) for pair in _pairs(self.attempt_times))


def read_history(path: Path, *others: Path) -> History:
    """Read a run folder, also while the run is writing to it, with the events of `others`, folders
    of the same run on other nodes."""
    if not path.is_dir():
        raise ConfigError(f"{path}: there is no such folder")
    damage: list[str] = []
    tell = damage.append
    read_json(path / layout.IDENTITY, RUN, tell)
    if not is_run(path):
        raise ConfigError(f"{path}: there is no run in this folder (no {layout.IDENTITY})")
    lines = read_records(path / layout.METRICS, kind=METRIC_LINE, tell=tell)
    return History(
        name=path.resolve().name, path=path, damage=damage,
        events=[e for e in read_events(*(run / layout.EVENTS for run in (path, *others)), tell=tell)
                if e.keys() >= ALWAYS],
        steps=[line for line in lines if "loss" in line],
        validations=[line for line in lines if "val_loss" in line],
        timing=read_records(path / layout.TIMING, kind=TIMING_LINE, tell=tell),
        config=_config(path / layout.CONFIG, tell),
        environment=read_json(path / layout.ENVIRONMENT, ENVIRONMENT, tell) or {},
        summary=read_json(path / layout.SUMMARY, SUMMARY, tell),
        owner=living_owner(path / layout.LOCK))


def is_run(path: Path) -> bool:
    """Whether a folder is a run folder, also of a run that has just begun."""
    return (path / layout.IDENTITY).exists() or (path / layout.EVENTS).exists()


def attempt_times(
    events: Sequence[Event], timing: Timing, owner: str | None = None
) -> list[AttemptTimes]:
    """Return the times of each attempt. Attempts do not overlap."""
    attempts = read_attempts(events, owner)
    of_attempt: dict[Key, list[Event]] = {(a.number, a.nonce): [] for a in attempts}
    for key, event in by_attempt(events):
        of_attempt.get(key, []).append(event)
    found: list[AttemptTimes] = []
    for attempt, following in _pairs(attempts):
        limit = None if following is None else min(
            event["time"] for event in of_attempt[following.number, following.nonce])
        found.append(_times_of(attempt, of_attempt[attempt.number, attempt.nonce],
                               [t for t in timing if t["attempt"] == attempt.number], limit))
    for before, after in itertools.pairwise(found):
        before.over = min(before.over, max(before.begun, after.begun))
        before.put_in_order()
    return found


def _times_of(
    attempt: Attempt, events: Sequence[Event], timing: Timing, limit: float | None
) -> AttemptTimes:
    """Times of an attempt that ends before `limit`."""
    entered = [e["entered"] for e in events if e["event"] == "first-step" and e.get("entered")]
    starts = [time for phases in entered for phase, time in phases.items()
              if phase not in _BEFORE_TRAINING]
    trains = [time for phases in entered for phase, time in phases.items()
              if phase in ("train", "evaluate")]
    noticed = min((e["time"] for e in events if e["event"] in _NOTICES), default=None)
    fault = None
    if noticed is not None:
        faults = [e["time"] for e in events if e["event"] == "fault" and e["time"] <= noticed
                  and str(e.get("fault", "")).split(":")[0] in FATAL]
        hangs = [e["time"] - e.get("idle_s", 0.0) for e in events if e["event"] == "hang"]
        fault = min([*faults[-1:], *hangs, noticed])
    last, step = max((record["time"], record["step"]) for record in (*events, *timing))
    over = last
    if noticed is None and attempt.end == "died" and attempt.reached is not None and (
            limit is not None):
        # The ranks and their launcher died without an event. The next attempt has read from
        # metrics.jsonl which step was reached: extrapolate the end from the last record.
        left = max(0, attempt.reached - step)
        over = min(limit, max(last, last + left * step_seconds(timing)))
    ranks = {}
    for rank in sorted({e["rank"] for e in events}):
        own = [e for e in events if e["rank"] == rank]
        times = [e["time"] for e in own]
        times += [e["entered"]["start"] for e in own if "start" in (e.get("entered") or {})]
        has_end = any(e["event"] in (*_NOTICES, "stop", "end", "refused") for e in own)
        ranks[rank] = (min(times), max(times) if has_end else max(*times, noticed or over))
    found = AttemptTimes(
        attempt=attempt, begun=min([e["time"] for e in events] + starts),
        trains=min(trains, default=None), fault=fault, noticed=noticed, over=over, ranks=ranks)
    found.put_in_order()
    return found


def goodput(
    found: Sequence[AttemptTimes], events: Sequence[Event], timing: Timing
) -> dict[str, float]:
    """Return the seconds for each of `PARTS`. Their sum is the wall time."""
    parts = dict.fromkeys(PARTS, 0.0)
    for times, after in _pairs(found):
        number = times.attempt.number
        lines = [line for line in timing if line["attempt"] == number]
        save_s = {kind: sum(e.get("seconds", 0.0) for e in events if e["attempt"] == number
                            and e["event"] == "save" and e.get("kind") == kind)
                  for kind in ("stop", "survivor")}
        trains = times.over if times.trains is None else times.trains
        stopped = max(trains, times.over if times.fault is None else times.fault)
        noticed = max(stopped, times.over if times.noticed is None else times.noticed)
        training, rest = stopped - trains, times.over - noticed

        held_s = sum(line["save_s"][0] or 0.0 for line in lines) + save_s["stop"]
        saving = min(training, held_s)
        redone = min(training - saving,
                     lost_steps(times, after, events) * step_seconds(lines, times))
        last_save = min(rest, save_s["survivor"])
        parts["useful"] += training - saving - redone
        parts["redone"] += redone
        parts["saving"] += saving + last_save
        parts["detecting"] += noticed - stopped
        parts["restarting"] += trains - times.begun + rest - last_save
        if after is not None:  # the time in between is part of a restart by the same launcher
            parts["restarting" if times.attempt.relaunched else "waiting"] += (
                after.begun - times.over)
    return parts


def lost_steps(times: AttemptTimes, after: AttemptTimes | None, events: Sequence[Event]) -> int:
    """Return the number of finished steps of an attempt that are repeated: by the next attempt,
    those after its checkpoint; in the same attempt, those of a rollback."""
    attempt = times.attempt
    found = 0 if after is None else max(
        0, max(attempt.end_step, attempt.reached or 0) - after.attempt.start_step)
    rollbacks = [e for e in events if e["event"] == "rollback" and e["rank"] == 0
                 and e["attempt"] == attempt.number and {"at_step", "to_step"} <= e.keys()]
    return found + sum(max(0, e["at_step"] - e["to_step"]) for e in rollbacks)


def step_seconds(timing: Timing, times: AttemptTimes | None = None) -> float:
    """Return the mean time of a step, from the length of the attempt if no step was timed."""
    steps = sum(line["steps"] for line in timing)
    if steps:
        return float(sum(line["step_s"][0] for line in timing) / steps)
    if times is None or times.trains is None:
        return 0.0
    steps = times.attempt.end_step - times.attempt.start_step
    return ((times.fault or times.over) - times.trains) / steps if steps > 0 else 0.0


def _pairs(found: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Each item with its successor; the last one with None."""
    return list(itertools.zip_longest(found, found[1:]))


def _config(path: Path, tell: Callable[[str], object]) -> dict[str, Any]:
    try:
        table = flatten(read_toml(path))
        if why := CONFIG.problem(table):
            raise FileDamaged(f"{path.name}: {why}")
    except FileNotFoundError:
        return {}
    except FileDamaged as error:
        tell(str(error))
        return {}
    return dict(masked("", table))


def flatten(nested: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dict with the items of inner dicts under dotted names."""
    found: dict[str, Any] = {}
    for key, value in nested.items():
        found |= ({f"{key}.{name}": inner for name, inner in value.items()}
                  if isinstance(value, dict) else {key: value})
    return found
