"""Copy missing checkpoints and metric lines to nodes that have their own disk."""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from pathlib import Path
from typing import Any

import xxhash

from trainer.checkpoint.manifest import CheckpointInfo
from trainer.checkpoint.restore import CheckpointRef, broadcast_files
from trainer.checkpoint.store import Store
from trainer.distributed.world import World
from trainer.storage.jsonl import FileMark
from trainer.telemetry.events import Log
from trainer.telemetry.metrics import ResumedRecord, read_metrics, resumed_lines


def copy_missing_checkpoints(
    found: CheckpointRef | None, store: Store, run_id: str, world: World, log: Log
) -> None:
    """Collective. Copy the resumed checkpoint and the best one to the nodes without them."""
    if found is not None and world.has_nodes and found.path is None:
        for step in sorted({found.step, found.state.best.step} - {0}):
            _copy(step, found.holder, store, run_id, world, log)


def resume_record(
    found: CheckpointRef | None, path: Path, world: World
) -> tuple[ResumedRecord, FileMark]:
    """Collective. How metrics.jsonl continues from a checkpoint (equal on all ranks that write a
    run folder), and where it ends then.

    The checkpoint knows where in the file its lines belong. If it is from an older version or a
    file does not fit it, all lines of the file are merged with it.
    """
    holder, step, validated = 0, 0, 0
    saved: list[dict[str, Any]] = []
    begin: FileMark | None = FileMark()
    if found is not None:
        holder, step, validated = found.holder, found.step, found.state.progress.validated
        saved, begin = found.state.lines, None if found.path else found.state.record
    reads = world.writes_run_dir or world.rank == holder
    fits = begin is not None and (not reads or begin.fits(path))
    if begin is None or not all(world.gather_json(fits)):
        begin = FileMark()
    on_disk = read_metrics(path, begin.offset) if reads else []
    record = resumed_lines(begin, on_disk, saved, step=step, validated=validated)
    if world.has_nodes:  # the lines come from the node whose checkpoint is resumed
        mine = xxhash.xxh3_128_hexdigest(record.data) if reads else None
        theirs = world.gather_json(mine)
        if any(digest not in (None, theirs[holder]) for digest in theirs):
            saved = json.loads(world.broadcast_json(json.dumps(record.kept), holder))
            record = resumed_lines(begin, on_disk, saved, step=step, validated=validated)
    end = world.broadcast_json(dataclasses.asdict(begin.after(record.data)), holder)
    return record, FileMark(**end)


def _copy(step: int, first: int, store: Store, run_id: str, world: World, log: Log) -> None:
    """Collective. Copy a checkpoint, preferably from rank `first`, to the folders without the same
    one. A node that was absent during a rollback has an abandoned one of this step."""
    looks = world.writes_run_dir or world.rank == first
    if len({*world.gather_json(store.checksum(step) if looks else None)} - {None}) == 1:
        return
    every = world.gather_json(store.checksum(step, verify=True) if looks else "")
    holder = max(range(world.size), key=lambda r: (every[r] != "", r == first, -r))
    needs_copy = world.writes_run_dir and every[world.rank] != every[holder]
    if not any(world.gather_json(needs_copy)):
        return
    files: dict[str, Path] = {}
    info: CheckpointInfo | None = None
    if world.rank == holder:
        info = store.find(step)
        files = {name: info.path / name for name in info.manifest["files"]}
    generation, kind = world.broadcast_json(
        None if info is None else (info.generation, info.kind), holder)
    received = broadcast_files(files, holder, world)

    def write() -> None:
        try:
            if needs_copy:
                with store.stage(step, generation=generation) as stage:
                    for name, chunks in received.items():
                        stage.write(name, chunks)
                    stage.commit(kind=kind, run=run_id)
                log.event("copied", at_step=step, holder=holder)
        finally:  # take part in all broadcasts
            for chunks in received.values():
                deque(chunks, maxlen=0)

    world.fail_together(write)
