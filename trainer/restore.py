"""How a checkpoint comes back: from the disk of the rank that has it, to all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from trainer import rng, tensorfile
from trainer.log import Log
from trainer.source import Found, holder_of
from trainer.state import EMA, MODEL, TrainState
from trainer.store import Store
from trainer.world import World


def restore(found: Found, store: Store, state: TrainState, world: World, log: Log) -> None:
    """Collective. Bring a checkpoint's state to all ranks, into the storage in use.

    Raises:
        CheckpointDamaged: it doesn't fit this run's parts; names what doesn't. On all ranks.
    """
    tensors: dict[str, dict[str, Tensor]] = {}
    described: dict[str, Any] = {}
    if found.holder == world.rank:
        place = found.path or _path(store, found.step)
        files = {p.name: p for p in sorted(place.glob("*.safetensors"))}
        tensors = {name: tensorfile.load(path) for name, path in files.items()}
        described = {name: tensorfile.describe(t) for name, t in tensors.items()}
    described = world.broadcast_json(described, found.holder)
    if found.holder != world.rank:
        tensors = {name: tensorfile.blank(d) for name, d in described.items()}
    for name in described:
        world.broadcast(list(tensors[name].values()), found.holder)
    error = None
    try:
        state.load(tensors, found.facts)
    except Exception as problem:
        error = problem
    world.agree(error)
    store.in_use = None
    if found.path:  # its best weights are in another run's folder
        state.best.judge_by("", "max")
    state.key_rng(world.rank)
    saved = found.facts.get("rng", [""] * world.size)
    if len(saved) == world.size and saved[world.rank] != rng.digest(rng.snapshot()):
        log.warning(
            f"the random state of rank {world.rank} at step {found.step} isn't the saved one: "
            "another version of python, numpy or torch, or a damaged entry; the run goes on with "
            "the state that follows from its seed")


def abandon_newer(found: Found, store: Store, world: World, log: Log) -> int:
    """Collective. The generation to go on as: a new one where newer checkpoints, damaged ones,
    are left behind, so that no later start takes them up again."""
    following = found.generation + 1
    mine: list[int] = []
    if world.keeps_folder:
        mine = store.set_aside(after_step=found.step, generation=following)
    abandoned = sorted({step for steps in world.gather_json(mine) for step in steps})
    if abandoned:
        log.event("rollback", to_step=found.step, abandoned=abandoned, generation=following)
    return following if abandoned else found.generation


def restore_model(step: int, store: Store, state: TrainState, world: World) -> bool:
    """Collective. The weights of a checkpoint, into the model on all ranks; whether there is a
    whole one."""
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


def _path(store: Store, step: int) -> Path:
    return next(info.path for info in store.checkpoints() if info.step == step)
