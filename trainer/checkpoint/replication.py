"""Copy missing checkpoints and metric lines to nodes that have their own disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from trainer.checkpoint.restore import CheckpointRef
from trainer.checkpoint.store import Store
from trainer.distributed.world import World
from trainer.errors import CheckpointDamaged
from trainer.telemetry.events import Log
from trainer.telemetry.metrics import encode_line, read_metrics, resumed_lines

CHUNK_BYTES = 1 << 26
Lines = tuple[list[dict[str, Any]], list[dict[str, Any]]]
"""All metric lines so far, and the lines that earlier attempts may not have sent to the sinks."""


def copy_missing_checkpoints(
    found: CheckpointRef | None, store: Store, metrics: Path, run_id: str, world: World, log: Log
) -> Lines:
    """Collective. Copy the resumed checkpoint and the best one to the run folders without them.

    Returns:
        The lines for metrics.jsonl; equal on all ranks that write a run folder.
    """
    lines = merged_lines(found, metrics, world)
    if found is None or not world.has_nodes or found.path is not None:
        return lines
    for step in sorted({found.step, found.state.best.step} - {0}):
        _copy(step, found.holder, store, run_id, world, log)
    return lines


def merged_lines(found: CheckpointRef | None, metrics: Path, world: World) -> Lines:
    """Collective. The lines of metrics.jsonl up to a checkpoint.

    They are equal on all ranks that write a run folder.
    """
    saved = [] if found is None else found.state.lines
    at: dict[str, int] = {"step": 0, "validated": 0}
    if found is not None:
        at = {"step": found.step, "validated": found.state.progress.validated}
    on_disk = read_metrics(metrics) if world.writes_run_dir or world.has_nodes else []
    kept, missing = resumed_lines(on_disk, saved, **at)
    if not world.has_nodes or found is None:
        return kept, missing
    # The lines come from the node whose checkpoint is resumed.
    mine = xxhash.xxh3_128_hexdigest("\n".join(map(encode_line, kept)).encode())
    theirs = world.gather_json(mine)
    if any(digest != theirs[found.holder] for digest in theirs):
        held = world.broadcast_json(json.dumps(kept), found.holder)
        if mine != theirs[found.holder]:
            return resumed_lines(on_disk, json.loads(held), **at)
    return kept, missing


def _copy(step: int, first: int, store: Store, run_id: str, world: World, log: Log) -> None:
    """Collective. Copy a checkpoint, file by file, to the folders that don't have the same one.

    A folder may have another checkpoint of this step: a node that was absent during a rollback
    still has what the rollback abandoned.

    Args:
        first: the rank whose checkpoint is preferred as the source.
    """
    verifies = world.writes_run_dir or world.rank == first
    every = world.gather_json(_checksum(step, store) if verifies else "")
    holder = max(range(world.size), key=lambda r: (every[r] != "", r == first, -r))
    needs_copy = world.writes_run_dir and every[world.rank] != every[holder]
    if not any(world.gather_json(needs_copy)):
        return
    files: dict[str, Path] = {}
    described: dict[str, Any] = {}
    if world.rank == holder:
        info = next(i for i in store.checkpoints() if i.step == step)
        files = {name: info.path / name for name in info.manifest["files"]}
        described = {"generation": info.generation, "kind": info.kind,
                     "files": {name: path.stat().st_size for name, path in files.items()}}
    described = world.broadcast_json(described, holder)
    received = {name: _send(files.get(name), size, world, holder)
                for name, size in described["files"].items()}
    error: Exception | None = None
    if needs_copy:
        try:
            with store.stage(step, generation=described["generation"]) as stage:
                for name, chunks in received.items():
                    stage.write(name, chunks)
                stage.commit(kind=described["kind"], run=run_id)
            log.event("copied", at_step=step, holder=holder)
        except Exception as problem:
            error = problem
            _exhaust(received)
    else:
        _exhaust(received)
    world.raise_on_all_ranks(error)


def _send(path: Path | None, size: int, world: World, holder: int) -> Iterator[memoryview]:
    """Collective. Broadcast the holder's file in chunks; a generator of its bytes on all ranks."""
    file = path.open("rb") if path is not None else None
    for start in range(0, size, CHUNK_BYTES):
        chunk: Tensor = torch.empty(min(CHUNK_BYTES, size - start), dtype=torch.uint8)
        if file is not None:
            file.readinto(chunk.numpy().data)
        world.broadcast([chunk], holder)
        yield chunk.numpy().data
    if file is not None:
        file.close()


def _exhaust(received: dict[str, Iterator[memoryview]]) -> None:
    for chunks in received.values():
        for _ in chunks:
            pass


def _checksum(step: int, store: Store) -> str:
    """Checksum of the manifest of a valid checkpoint of this step; "" if there is none."""
    try:
        return str(store.verify(step).manifest["checksum"])
    except CheckpointDamaged:
        return ""
