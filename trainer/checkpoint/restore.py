"""Restore a checkpoint on all ranks, from the disks of those that can read it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer import rng
from trainer.checkpoint.manifest import read_manifest, verify
from trainer.checkpoint.saved_state import SavedState
from trainer.checkpoint.store import Store
from trainer.checkpoint.train_state import TrainState
from trainer.distributed.world import World
from trainer.errors import CheckpointDamaged, ConfigError
from trainer.storage import layout, tensorfile
from trainer.storage.layout import EMA, MODEL, STATE, step_name
from trainer.telemetry.events import Log


@dataclass(frozen=True)
class CheckpointRef:
    """The checkpoint to resume from; equal on all ranks."""

    step: int
    generation: int
    holder: int
    """A rank that can read it from its disk."""
    state: SavedState
    skipped: tuple[str, ...] = ()
    """Newer checkpoints that were skipped, and why."""
    path: Path | None = None
    """Its folder, if it belongs to another run (`--resume PATH`)."""


def find_checkpoint(
    store: Store, world: World, run_id: str, *, newest: int | None = None
) -> CheckpointRef | None:
    """Collective. The newest valid checkpoint that any rank can read; None without checkpoints.

    The best weights are in a separate checkpoint. If it is damaged, the newest checkpoint from
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
            report = _read_state(store, latest[1])
        report = world.broadcast_json(report, holder)
        if "state" in report:
            found = CheckpointRef(latest[1], latest[0], holder,
                                  SavedState.from_json(report["state"]), tuple(skipped))
            if without_best is None:
                best = found.state.best.step
                if best in (0, found.step) or find_holder(best, store, world) is not None:
                    return found
                without_best = found
            elif found.step < best:
                return found
            report["why"] = (f"{step_name(found.step)}: the best weights so far, of step {best}, "
                             "are damaged")
        skipped.append(report["why"])
        bad.add(latest)


def find_holder(step: int, store: Store, world: World) -> int | None:
    """Collective. A rank with a valid checkpoint of this step on its disk; None if there is none.

    Rank 0 verifies its disk first; the other ranks do so only if it finds none.
    """
    valid = world.broadcast_json(world.is_main and _is_valid(store, step))
    if valid:
        return 0
    every = world.gather_json(not world.is_main and _is_valid(store, step))
    return every.index(True) if any(every) else None


def find_checkpoint_at(path: Path, world: World) -> CheckpointRef:
    """Collective. The checkpoint at a path given by the user.

    Args:
        path: the folder of a checkpoint, or of a run (its newest valid checkpoint is taken).

    Raises:
        ConfigError: there is no checkpoint, or it is damaged.
    """
    report: dict[str, Any] = {}
    if world.is_main:
        report = _look_at_source(path)
    report = world.broadcast_json(report)
    if "why" in report:
        raise ConfigError(f"--resume {path}: {report['why']}; give the folder of a "
                          "checkpoint, such as RUN/checkpoints/step-00000100, or of a run.")
    return CheckpointRef(report["step"], 0, 0, SavedState.from_json(report["state"]),
                         tuple(report["skipped"]), Path(report["path"]))


def _is_valid(store: Store, step: int) -> bool:
    try:
        store.verify(step)
    except (CheckpointDamaged, OSError):
        return False
    return True


def _read_state(store: Store, step: int) -> dict[str, Any]:
    """The content of a checkpoint's state.json, or why it is damaged."""
    try:
        state = json.loads(store.open(step)[STATE].read_bytes())
        SavedState.from_json(state)
        return {"state": state}
    except (CheckpointDamaged, KeyError, ValueError, OSError) as error:
        return {"why": str(error)}


def _look_at_source(path: Path) -> dict[str, Any]:
    """The state.json of the checkpoint at a path, or why there is none."""
    match = re.fullmatch(layout.STEP_NAME, path.name)
    folder = path.parent if match else path / layout.CHECKPOINTS
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
        state = json.loads((info.path / STATE).read_bytes())
        SavedState.from_json(state)
    except (CheckpointDamaged, OSError, ValueError) as error:
        return {"why": str(error)}
    return {"step": info.step, "state": state, "skipped": skipped, "path": str(info.path)}


TENSORS = ".safetensors"


def restore_state(
    found: CheckpointRef, store: Store, state: TrainState, world: World, log: Log
) -> None:
    """Collective. Load a checkpoint into the live tensors of all ranks.

    If every rank finds the same valid checkpoint on its disk, each rank reads it. Otherwise the
    holder broadcasts it, which takes longer.

    Raises:
        CheckpointDamaged: it doesn't fit this run; names the entry. On all ranks.
    """
    holds = found.holder == world.rank
    place, checksums = _look_at(found, store, read=not holds)
    every = world.gather_json(checksums)
    all_have_it = bool(every[found.holder]) and all(seen == every[found.holder] for seen in every)
    tensors = {} if all_have_it else _send(place if holds else None, found.holder, world)
    error = None
    try:
        if all_have_it:
            tensors = _load(place)
        state.load(tensors, found.state)
    except Exception as problem:
        error = problem
    world.raise_on_all_ranks(error)
    store.end_use()
    if found.path:  # the best weights are in another run's folder
        state.best.set_rule("", "max")
    state.key_rng(world.rank)
    saved = found.state.rng or [""] * world.size
    if len(saved) == world.size and saved[world.rank] != rng.digest(rng.snapshot()):
        log.warning(
            f"the random state of rank {world.rank} at step {found.step} differs from the saved "
            "one: another version of python, numpy or torch, or a damaged entry. The run continues "
            "with the state derived from its seed.")


def abandon_newer(found: CheckpointRef, store: Store, world: World, log: Log) -> int:
    """Collective. Abandon checkpoints newer than the restored one. Returns the generation to use.

    Newer checkpoints are damaged ones. If there are any, the run continues in a new generation, so
    that no later start resumes from them. Their generation may be later than that of the restored
    checkpoint; the new one is later than both.
    """
    latest = max(world.gather_json(store.generation if world.writes_run_dir else 0))
    following = 1 + max(latest, found.generation)
    mine: list[int] = []
    if world.writes_run_dir:
        mine = store.set_aside(after_step=found.step, generation=following)
    abandoned = sorted({step for steps in world.gather_json(mine) for step in steps})
    if abandoned:
        log.event("rollback", to_step=found.step, abandoned=abandoned, generation=following)
    return following if abandoned or latest > found.generation else found.generation


def restore_model(step: int, store: Store, state: TrainState, world: World) -> bool:
    """Collective. Load only the weights of a checkpoint, into the model of all ranks.

    Returns:
        False if there is no valid checkpoint of this step.
    """
    holder = find_holder(step, store, world)
    if holder is None:
        return False
    error = None
    try:
        if world.rank == holder:
            path = _path(store, step)
            state.load_model(tensorfile.load_tensors(path / MODEL))
            if state.ema is not None:
                held = (path / EMA).is_file()
                state.ema.load(tensorfile.load_tensors(path / EMA) if held else None,
                               {"updates": 1})
    except Exception as problem:
        error = problem
    world.raise_on_all_ranks(error)
    tensors = state.tensors()
    for name in (MODEL, EMA):
        world.broadcast(list(tensors.get(name, {}).values()), holder)
    return True


def _look_at(found: CheckpointRef, store: Store, *, read: bool) -> tuple[Path, dict[str, str]]:
    """The checkpoint's folder and the checksums of its tensor files, as this rank sees them.

    The checksums are empty if this rank can't read the checkpoint, or finds it damaged.

    Args:
        read: read the files and compare them with the checksums.
    """
    steps = {info.step: info.path for info in store.checkpoints()}
    place = found.path or steps.get(found.step, Path())
    try:
        info = verify(place, found.step) if read else read_manifest(place, found.step)
    except CheckpointDamaged:
        return place, {}
    files = info.manifest.get("files", {})
    return place, {n: entry["xxh3_128"] for n, entry in files.items() if n.endswith(TENSORS)}


def _load(place: Path) -> dict[str, dict[str, Tensor]]:
    return {path.name: tensorfile.load_tensors(path) for path in sorted(place.glob(f"*{TENSORS}"))}


def _send(place: Path | None, holder: int, world: World) -> dict[str, dict[str, Tensor]]:
    """Collective. Broadcast the tensors in the holder's folder; returns them on all ranks."""
    tensors = {} if place is None else _load(place)
    described = {name: tensorfile.describe_tensors(t) for name, t in tensors.items()}
    described = world.broadcast_json(described, holder)
    if place is None:
        tensors = {name: tensorfile.empty_tensors(d) for name, d in described.items()}
    for name in described:
        world.broadcast(list(tensors[name].values()), holder)
    return tensors


def _path(store: Store, step: int) -> Path:
    return next(info.path for info in store.checkpoints() if info.step == step)
