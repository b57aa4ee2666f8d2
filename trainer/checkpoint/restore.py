"""Restore a checkpoint on all ranks, from the disks of those that can read it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer import rng
from trainer.checkpoint.mirror import MirrorEntry, MirrorSource
from trainer.checkpoint.saved_state import SavedState
from trainer.checkpoint.store import Store
from trainer.checkpoint.train_state import TrainState
from trainer.distributed.world import World
from trainer.errors import CheckpointDamaged, ConfigError, from_rank, listed
from trainer.optim.optimizers import has_modes
from trainer.storage import layout, tensorfile
from trainer.storage.files import display_path, open_regular
from trainer.storage.layout import EMA, MODEL, OPTIMIZER, STATE, step_name
from trainer.storage.records import read_record
from trainer.telemetry.events import Log

CHUNK_BYTES = 1 << 26


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


def find_checkpoint(
    store: Store, world: World, run_id: str, *, newest: int | None = None,
    mirror: MirrorSource | None = None,
) -> CheckpointRef | None:  # fmt: skip
    """Collective. The newest valid checkpoint (up to step `newest`) that any rank can read, or that
    is in the mirror (given on rank 0), from which it is fetched; its holder verifies it. None
    without checkpoints; ConfigError if all are damaged.

    If the checkpoint of the best weights is gone or has files of another size, the newest one from
    before it is selected, if any: resuming there computes them again.
    """
    mirror = mirror or MirrorSource()
    last = math.inf if newest is None else newest
    skipped, bad = list[str](), set[tuple[int, int]]()
    without_best, best = None, 0
    remote = {(e.generation, e.step) for e in mirror.entries if e.step <= last}
    while True:
        here = store.checkpoints()
        mine = [(i.generation, i.step) for i in here if i.why is None and i.run == run_id
                and (i.generation, i.step) not in bad and i.step <= last]
        broken = [f"{i.path.name}: {i.why}" for i in here if i.why is not None]
        seen = world.gather_json({"good": mine, "broken": broken, "remote": [*remote]})
        skipped += [w for view in seen for w in view["broken"] if w not in skipped]
        every = [tuple(pair) for view in seen for pair in (*view["good"], *view["remote"])]
        if not every:
            if without_best is not None:
                return without_best
            if skipped and newest is None:
                raise ConfigError(" · ".join([
                    f"no valid checkpoint is left; nothing was changed. {skipped[0]}", *skipped[1:],
                    "Restore one from a backup, or start again in another --run-dir."]))
            return None
        latest = max(every)
        holder = next((r for r, view in enumerate(seen) if list(latest) in view["good"]), None)
        try:
            if holder is None:
                _fetch(mirror, latest, store, world)
            found = _read_by(holder or 0, latest[1], store, world)
        except CheckpointDamaged as error:
            why = str(error)
            if holder is None:
                remote.discard(latest)
        else:
            remote.discard(latest)  # it is on a disk now
            found = dataclasses.replace(found, generation=latest[0], skipped=tuple(skipped))
            if without_best is None:
                best = found.state.best.step
                if best in (0, found.step) or _has_best(best, mirror, store, world):
                    return found
                without_best = found
            elif found.step < best:
                return found
            why = (f"{step_name(found.step)}: the best weights so far, of step {best}, "
                   "are damaged or missing")
        skipped.append(why)
        bad.add(latest)


def _fetch(mirror: MirrorSource, latest: tuple[int, int], store: Store, world: World) -> None:
    """Collective. Fetch a checkpoint from the mirror to the disk of rank 0. Raises
    CheckpointDamaged on all ranks."""
    entry = MirrorEntry(*latest)
    world.fail_together(lambda: mirror.fetch(entry, store) if world.is_main else None)


def _has_best(best: int, mirror: MirrorSource, store: Store, world: World) -> bool:
    """Collective. Whether a rank has the checkpoint of the best weights, or can fetch it."""
    if any(world.gather_json(store.checksum(best))):
        return True
    held = world.broadcast_json(
        max((e.generation for e in mirror.entries if e.step == best), default=None))
    if held is None:
        return False
    try:
        _fetch(mirror, (held, best), store, world)
    except CheckpointDamaged:
        return False
    return True


def _read_by(holder: int, step: int, store: Store, world: World) -> CheckpointRef:
    """Collective. Verify a checkpoint on the rank that has it, and read its state.json. Raises
    CheckpointDamaged on all ranks."""
    report: dict[str, Any] = {}
    if holder == world.rank:
        try:
            report["state"] = read_record(store.verify(step).path / STATE) or {}
            SavedState.from_json(report["state"])
        except (CheckpointDamaged, OSError) as error:
            report = {"why": str(error)}
    report = world.broadcast_json(report, holder)
    if "why" in report:
        raise CheckpointDamaged(report["why"])
    return CheckpointRef(step, 0, holder, SavedState.from_json(report["state"]))


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
    path = path.resolve()  # the user's own path may be a link
    if match := re.fullmatch(layout.STEP_NAME, path.name):
        return {"step": int(match[1]), "path": str(path), "skipped": []}
    found, skipped = Store(path / layout.CHECKPOINTS).newest_valid()
    if found is None:
        return {"why": "; ".join(["it holds no valid checkpoint", *skipped])}
    return {"step": found.step, "path": str(found.path), "skipped": skipped}


def check_fit(found: CheckpointRef, store: Store, model: nn.Module, world: World) -> None:
    """Collective. Raise ConfigError unless the weights of a checkpoint fit the parameters."""
    folder = found.path or store.folder / step_name(found.step)

    def read() -> dict[str, list[int]]:
        return tensorfile.read_shapes(folder / MODEL) if found.holder == world.rank else {}

    saved = world.broadcast_json(world.fail_together(read), found.holder)
    live = {name: list(p.shape) for name, p in model.state_dict(keep_vars=True).items()
            if isinstance(p, nn.Parameter)}
    misfits = [f"{name} has shape {saved.get(name)} in the checkpoint and {shape} now"
               for name, shape in live.items() if saved.get(name) != shape]
    misfits += [f"{name} is not in the model" for name in saved.keys() - model.state_dict().keys()]
    if misfits:
        raise from_rank(0, ConfigError(
            f"--task: the model doesn't fit the run's checkpoint of step {found.step}: "
            f"{listed(misfits)}. Restore the model and its flags, or begin a new run in another "
            f"--run-dir, to which --init {display_path(folder / MODEL)} --init-strict off gives "
            "the weights that fit."))


def restore_state(
    found: CheckpointRef, store: Store, state: TrainState, world: World, log: Log
) -> None:
    """Collective. Load a checkpoint into the live tensors of all ranks; ConfigError on all ranks
    if it doesn't fit. Unless all have the same valid one on their disks, the holder
    broadcasts it, which takes longer."""
    if found.path is not None:
        store = Store(found.path.parent)
    every = world.gather_json(store.checksum(found.step, verify=found.holder != world.rank))
    if set(every) == {every[found.holder]} != {""}:
        tensors = world.fail_together(partial(_load, store, found.step))
    else:
        tensors = _receive(store, found, world)
    try:
        world.fail_together(partial(state.load, tensors, found.state))
    except CheckpointDamaged as error:  # its bytes are whole
        weights = display_path(store.folder / step_name(found.step) / MODEL)
        raise from_rank(0, ConfigError(
            f"--task: the checkpoint of step {found.step} doesn't fit: {error}. Undo the change of "
            "the task or of a library, or begin another run with another --run-dir; there "
            f"--init {weights} --init-strict off takes over the weights that fit.")) from error
    if found.path:  # the best weights are in another run's folder
        state.best.set_rule("", "max")
    state.key_rng(world.rank)
    saved = found.state.rng or [""] * world.size
    seeded = found.state.settings.get("seed", state.seed) == state.seed
    if seeded and len(saved) == world.size and saved[world.rank] != rng.digest(rng.snapshot()):
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
    every = world.gather_json(store.checksum(step, verify=True) if world.writes_run_dir else "")
    if not any(every):
        return False
    holder = next(rank for rank, checksum in enumerate(every) if checksum)
    own = world.fail_together(lambda: read_record(store.find(step).path / STATE)
                              if world.rank == holder else None)
    saved = SavedState.from_json(world.broadcast_json(own, holder))
    needed = (MODEL, EMA, *[OPTIMIZER] * has_modes(state.optimizer))  # eval() depends on its state
    tensors = _receive(store, CheckpointRef(step, 0, holder, saved), world, needed)
    world.fail_together(partial(state.load_weights, tensors, saved))
    if OPTIMIZER in needed:
        world.fail_together(partial(state.load_optimizer, tensors[OPTIMIZER], saved.optimizer))
    return True


def _load(store: Store, step: int) -> dict[str, dict[str, Tensor]]:
    """The tensors of a checkpoint, by file."""
    info = store.find(step)
    return {name: tensorfile.load_tensors(info.path / name)
            for name in (MODEL, OPTIMIZER, EMA) if name in info.manifest["files"]}


def _receive(
    store: Store, found: CheckpointRef, world: World,
    names: Container[str] = (MODEL, OPTIMIZER, EMA),
) -> dict[str, dict[str, Tensor]]:
    """Collective. Broadcast tensor files of a checkpoint from its holder, and load them."""

    def find() -> dict[str, Path]:
        info = store.find(found.step)
        return {name: info.path / name for name in sorted(info.manifest["files"])
                if name in names}

    files = world.fail_together(find if found.holder == world.rank else dict)
    return {name: tensorfile.parse_tensors(b"".join(chunks), f"{step_name(found.step)}/{name}")
            for name, chunks in broadcast_files(files, found.holder, world).items()}


def broadcast_files(
    files: Mapping[str, Path], holder: int, world: World
) -> dict[str, Iterator[memoryview]]:
    """Collective. Broadcast files of the holder by name; every rank must read all bytes of all
    files, in order."""
    sizes = world.broadcast_json({n: path.stat().st_size for n, path in files.items()}, holder)
    return {name: _broadcast_file(files.get(name), size, holder, world)
            for name, size in sizes.items()}


def _broadcast_file(
    path: Path | None, size: int, holder: int, world: World
) -> Iterator[memoryview]:
    with contextlib.nullcontext() if path is None else open(open_regular(path), "rb") as file:
        for start in range(0, size, CHUNK_BYTES):
            chunk: Tensor = torch.empty(min(CHUNK_BYTES, size - start), dtype=torch.uint8)
            if file is not None:
                file.readinto(chunk.numpy().data)
            world.broadcast([chunk], holder)
            yield chunk.numpy().data
