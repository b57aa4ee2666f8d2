"""Restore a checkpoint on all ranks, from the disks of those that can read it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer import rng
from trainer.checkpoint.manifest import read_manifest, read_verified
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
    """The checkpoint to resume from."""

    step: int
    generation: int
    holder: int
    """A rank that can read it from its disk."""
    state: SavedState
    skipped: tuple[str, ...] = ()
    """Newer checkpoints that were skipped, and why."""
    path: Path | None = None
    """Its folder, if it belongs to another run (`--resume PATH`)."""
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict, repr=False, compare=False)
    """Only on the holder: the content of the tensor files, until it is restored."""


def find_checkpoint(
    store: Store, world: World, run_id: str, *, newest: int | None = None
) -> CheckpointRef | None:
    """Collective. The newest valid checkpoint that any rank can read; None without checkpoints.

    The holder reads and verifies it. If the checkpoint of the best weights is gone or has files of
    another size, the newest one from before it is selected, if any: resuming there computes them
    again.

    Args:
        newest: step of the newest checkpoint to consider; None: all.

    Raises:
        ConfigError: none of the checkpoints is valid.
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
                raise ConfigError(" · ".join([
                    f"no valid checkpoint is left; nothing was changed. {skipped[0]}", *skipped[1:],
                    "Restore one from a backup, or start again in another --run-dir."]))
            return None
        latest = max(every)
        holder = next(r for r, view in enumerate(seen) if list(latest) in view["good"])
        try:
            found = _read_by(holder, latest[1], store, world)
        except CheckpointDamaged as error:
            why = str(error)
        else:
            found = dataclasses.replace(found, generation=latest[0], skipped=tuple(skipped))
            if without_best is None:
                best = found.state.best.step
                if best in (0, found.step) or any(world.gather_json(_is_valid(store.find, best))):
                    return found
                without_best = found
            elif found.step < best:
                return found
            why = (f"{step_name(found.step)}: the best weights so far, of step {best}, "
                   "are damaged or missing")
        skipped.append(why)
        bad.add(latest)


def _read_by(holder: int, step: int, store: Store, world: World) -> CheckpointRef:
    """Collective. Read and verify a checkpoint on the rank that has it. Raises CheckpointDamaged on
    all ranks."""
    report: dict[str, Any] = {}
    tensors: dict[str, dict[str, Tensor]] = {}
    if holder == world.rank:
        try:
            contents = store.read(step, _read_file)
            report["state"] = json.loads(contents.pop(STATE))
            SavedState.from_json(report["state"])
            tensors = {name: c for name, c in contents.items() if isinstance(c, dict)}
        except (CheckpointDamaged, KeyError, ValueError, OSError) as error:
            report = {"why": str(error)}
    report = world.broadcast_json(report, holder)
    if "why" in report:
        raise CheckpointDamaged(report["why"])
    return CheckpointRef(step, 0, holder, SavedState.from_json(report["state"]), tensors=tensors)


def _read_file(path: Path, on_chunk: Callable[[Any], object]) -> Any:
    """Read a file of a checkpoint for `read_verified`."""
    if path.suffix == ".safetensors":
        return tensorfile.read_tensors(path, on_chunk)
    data = path.read_bytes()
    on_chunk(data)
    return data


def find_holder(step: int, store: Store, world: World) -> int | None:
    """Collective. A rank whose disk has a valid checkpoint of this step, if possible rank 0."""
    valid = world.broadcast_json(world.is_main and _is_valid(store.verify, step))
    if valid:
        return 0
    every = world.gather_json(not world.is_main and _is_valid(store.verify, step))
    return every.index(True) if any(every) else None


def _is_valid(check: Callable[[int], object], step: int) -> bool:
    try:
        check(step)
    except (CheckpointDamaged, OSError):
        return False
    return True


def find_checkpoint_at(path: Path, world: World) -> CheckpointRef:
    """Collective. The checkpoint at a path given by the user: the folder of a checkpoint, or of a
    run (its newest valid one). Raises ConfigError if there is none or it is damaged."""
    report = world.broadcast_json(_locate(path) if world.is_main else None)
    try:
        if "why" in report:
            raise CheckpointDamaged(report["why"])
        place = Path(report["path"])
        found = _read_by(0, report["step"], Store(place.parent), world)
    except CheckpointDamaged as error:
        raise ConfigError(f"--resume {path}: {error}; give the folder of a checkpoint, such as "
                          "RUN/checkpoints/step-00000100, or of a run.") from error
    return dataclasses.replace(found, skipped=tuple(report["skipped"]), path=place)


def _locate(path: Path) -> dict[str, Any]:
    """Path and step of the checkpoint at a user's path, or why there is none."""
    if not path.is_dir():
        return {"why": "there is no such folder"}
    if not os.access(path, os.R_OK | os.X_OK):
        return {"why": "the folder can't be read"}
    if match := re.fullmatch(layout.STEP_NAME, path.name):
        return {"step": int(match[1]), "path": str(path), "skipped": []}
    found, skipped = Store(path / layout.CHECKPOINTS).newest_valid()
    if found is None:
        return {"why": "; ".join(["it holds no valid checkpoint", *skipped])}
    return {"step": found.step, "path": str(found.path), "skipped": skipped}


def restore_state(
    found: CheckpointRef, store: Store, state: TrainState, world: World, log: Log
) -> None:
    """Collective. Load a checkpoint into the live tensors of all ranks; CheckpointDamaged on all
    ranks if it doesn't fit. Each rank reads it if all have the same valid one on their disks;
    otherwise the holder broadcasts it, which takes longer."""
    holds = found.holder == world.rank
    tensors = dict(found.tensors)
    found.tensors.clear()
    place, error = found.path, None
    try:
        info = store.find(found.step) if place is None else read_manifest(place, found.step)
        if not holds:
            info, tensors = read_verified(info.path, found.step, _read_file)
        checksums = {n: entry["xxh3_128"] for n, entry in info.manifest["files"].items()}
    except (CheckpointDamaged, KeyError):
        checksums = {}
    every = world.gather_json(checksums)
    if not all(seen and seen == every[found.holder] for seen in every):
        tensors = _send(tensors if holds else None, found.holder, world)
    try:
        state.load(tensors, found.state)
    except Exception as problem:
        error = problem
    world.raise_on_all_ranks(error)
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
    """Collective. Abandon newer checkpoints than the restored one, which are damaged. If there are
    any, the run continues in a generation later than all of them. Returns the generation."""
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
    """Collective. Load only the weights of a checkpoint. Returns False if there is no valid
    checkpoint of this step."""
    holder = find_holder(step, store, world)
    if holder is None:
        return False
    error: Exception | None = None
    try:
        if world.rank == holder:
            path = store.find(step).path
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


def _send(
    tensors: dict[str, dict[str, Tensor]] | None, holder: int, world: World
) -> dict[str, dict[str, Tensor]]:
    """Collective. Broadcast the holder's tensors."""
    described = {name: tensorfile.describe_tensors(t) for name, t in (tensors or {}).items()}
    described = world.broadcast_json(described, holder)
    if tensors is None:
        tensors = {name: tensorfile.empty_tensors(d) for name, d in described.items()}
    for name in described:
        world.broadcast(list(tensors[name].values()), holder)
    return tensors
