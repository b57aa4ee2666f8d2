"""Restore a checkpoint on all ranks, from the disks of those that can read it."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from trainer import rng
from trainer.checkpoint.manifest import look, verify
from trainer.checkpoint.source import Found, holder_of
from trainer.checkpoint.store import Store
from trainer.checkpoint.train_state import EMA, MODEL, TrainState
from trainer.distributed.world import World
from trainer.errors import CheckpointDamaged
from trainer.storage import tensorfile
from trainer.telemetry.events import Log

TENSORS = ".safetensors"


def restore(found: Found, store: Store, state: TrainState, world: World, log: Log) -> None:
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
        state.load(tensors, found.facts)
    except Exception as problem:
        error = problem
    world.agree(error)
    store.in_use = None
    if found.path:  # the best weights are in another run's folder
        state.best.judge_by("", "max")
    state.key_rng(world.rank)
    saved = found.facts.get("rng", [""] * world.size)
    if len(saved) == world.size and saved[world.rank] != rng.digest(rng.snapshot()):
        log.warning(
            f"the random state of rank {world.rank} at step {found.step} differs from the saved "
            "one: another version of python, numpy or torch, or a damaged entry. The run continues "
            "with the state derived from its seed.")


def abandon_newer(found: Found, store: Store, world: World, log: Log) -> int:
    """Collective. Abandon checkpoints newer than the restored one. Returns the generation to use.

    Newer checkpoints are damaged ones. If there are any, the run continues in a new generation, so
    that no later start resumes from them. Their generation may be later than that of the restored
    checkpoint; the new one is later than both.
    """
    latest = max(world.gather_json(store.generation if world.keeps_folder else 0))
    following = 1 + max(latest, found.generation)
    mine: list[int] = []
    if world.keeps_folder:
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
    holder = holder_of(step, store, world)
    if holder is None:
        return False
    error = None
    try:
        if world.rank == holder:
            path = _path(store, step)
            state.load_model(tensorfile.load(path / MODEL))
            if state.ema is not None:
                held = (path / EMA).is_file()
                state.ema.load(tensorfile.load(path / EMA) if held else None, {"updates": 1})
    except Exception as problem:
        error = problem
    world.agree(error)
    tensors = state.tensors()
    for name in (MODEL, EMA):
        world.broadcast(list(tensors.get(name, {}).values()), holder)
    return True


def _look_at(found: Found, store: Store, *, read: bool) -> tuple[Path, dict[str, str]]:
    """The checkpoint's folder and the checksums of its tensor files, as this rank sees them.

    The checksums are empty if this rank can't read the checkpoint, or finds it damaged.

    Args:
        read: read the files and compare them with the checksums.
    """
    steps = {info.step: info.path for info in store.checkpoints()}
    place = found.path or steps.get(found.step, Path())
    try:
        info = verify(place, found.step) if read else look(place, found.step)
    except CheckpointDamaged:
        return place, {}
    files = info.manifest.get("files", {})
    return place, {n: entry["xxh3_128"] for n, entry in files.items() if n.endswith(TENSORS)}


def _load(place: Path) -> dict[str, dict[str, Tensor]]:
    return {path.name: tensorfile.load(path) for path in sorted(place.glob(f"*{TENSORS}"))}


def _send(place: Path | None, holder: int, world: World) -> dict[str, dict[str, Tensor]]:
    """Collective. Broadcast the tensors in the holder's folder; returns them on all ranks."""
    tensors = {} if place is None else _load(place)
    described = {name: tensorfile.describe(t) for name, t in tensors.items()}
    described = world.broadcast_json(described, holder)
    if place is None:
        tensors = {name: tensorfile.blank(d) for name, d in described.items()}
    for name in described:
        world.broadcast(list(tensors[name].values()), holder)
    return tensors


def _path(store: Store, step: int) -> Path:
    return next(info.path for info in store.checkpoints() if info.step == step)
