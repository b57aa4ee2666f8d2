"""Select the checkpoint to resume from: the newest valid one that any rank can read."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.checkpoint.store import Store
from trainer.distributed.world import World
from trainer.errors import CheckpointDamaged, ConfigError

STATE = "state.json"


@dataclass(frozen=True)
class Found:
    """The checkpoint to resume from; equal on all ranks."""

    step: int
    generation: int
    holder: int
    """A rank that can read it from its disk."""
    facts: dict[str, Any]
    skipped: tuple[str, ...] = ()
    """Newer checkpoints that were skipped, and why."""
    path: Path | None = None
    """Its folder, if it belongs to another run (`--resume PATH`)."""


def find(
    store: Store, world: World, run_id: str, *, newest: int | None = None
) -> Found | None:
    """Collective. The newest valid checkpoint that any rank can read; None without checkpoints.

    The best weights are in a checkpoint of their own. If it is damaged, the newest checkpoint from
    before it is selected, if there is one: resuming from there computes the best weights again.

    Args:
        newest: step of the newest checkpoint to consider; None: all.

    Raises:
        ConfigError: there are checkpoints, and none of them is valid; nothing was changed.
    """
    skipped: list[str] = []
    without_best, best = None, 0
    bad: set[tuple[int, int]] = set()
    while True:
        mine = [[i.generation, i.step] for i in store.checkpoints() if i.why is None
                and (i.generation, i.step) not in bad and i.run == run_id
                and (newest is None or i.step <= newest)]
        broken = [f"{i.path.name}: {i.why}" for i in store.checkpoints() if i.why is not None]
        seen = world.gather_json({"good": mine, "broken": broken})
        skipped += [w for view in seen for w in view["broken"] if w not in skipped]
        every = [tuple(pair) for view in seen for pair in view["good"]]
        if not every:
            if without_best is not None:
                return without_best
            if skipped and newest is None:
                raise ConfigError(
                    "no valid checkpoint is left; nothing was changed. "
                    + " · ".join(skipped)
                    + " · Restore one from a backup, or start again in another --run-dir."
                )
            return None
        latest = max(every)
        holder = next(r for r, view in enumerate(seen) if list(latest) in view["good"])
        report: dict[str, Any] = {}
        if holder == world.rank:
            report = _read_facts(store, latest[1])
        report = world.broadcast_json(report, holder)
        if "facts" in report:
            found = Found(latest[1], latest[0], holder, report["facts"], tuple(skipped))
            if without_best is None:
                best = found.facts["best"]["step"]
                if best in (0, found.step) or holder_of(best, store, world) is not None:
                    return found
                without_best = found
            elif found.step < best:
                return found
            report["why"] = (f"step-{found.step:08d}: the best weights so far, of step {best}, "
                             "are damaged")
        skipped.append(report["why"])
        bad.add(latest)


def holder_of(step: int, store: Store, world: World) -> int | None:
    """Collective. A rank with a valid checkpoint of this step on its disk; None if there is none.

    Rank 0 verifies its disk first; the other ranks do so only if it finds none.
    """
    valid = world.broadcast_json(world.is_main and _is_valid(store, step))
    if valid:
        return 0
    every = world.gather_json(not world.is_main and _is_valid(store, step))
    return every.index(True) if any(every) else None


def find_at(path: Path, world: World) -> Found:
    """Collective. The checkpoint at a path given by the user.

    Args:
        path: the folder of a checkpoint, or of a run (its newest valid checkpoint is taken).

    Raises:
        ConfigError: there is no checkpoint, or it is damaged.
    """
    report: dict[str, Any] = {}
    if world.is_main:
        report = _look_at(path)
    report = world.broadcast_json(report)
    if "why" in report:
        raise ConfigError(f"--resume {path}: {report['why']}; give the folder of a "
                          "checkpoint, such as RUN/checkpoints/step-00000100, or of a run.")
    return Found(report["step"], 0, 0, report["facts"], tuple(report["skipped"]),
                 Path(report["path"]))


def _is_valid(store: Store, step: int) -> bool:
    try:
        store.verify(step)
    except (CheckpointDamaged, OSError):
        return False
    return True


def _read_facts(store: Store, step: int) -> dict[str, Any]:
    try:
        path = store.open(step)[STATE]
        return {"facts": json.loads(path.read_bytes())}
    except (CheckpointDamaged, KeyError, ValueError, OSError) as error:
        return {"why": str(error)}


def _look_at(path: Path) -> dict[str, Any]:
    """The facts of the checkpoint at a path, or why there is none."""
    match = re.fullmatch(r"step-(\d{8,})", path.name)
    folder = path.parent if match else path / "checkpoints"
    if not path.is_dir():
        return {"why": "there is no such folder"}
    store = Store(folder)
    try:
        if match:
            info, skipped = store.verify(int(match[1])), list[str]()
        else:
            found, skipped = store.newest_valid()
            if found is None:
                return {"why": "; ".join(["it holds no valid checkpoint", *skipped])}
            info = found
        facts = json.loads((info.path / STATE).read_bytes())
    except (CheckpointDamaged, OSError, ValueError) as error:
        return {"why": str(error)}
    return {"step": info.step, "facts": facts, "skipped": skipped, "path": str(info.path)}
