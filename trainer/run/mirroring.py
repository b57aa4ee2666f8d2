"""The mirror at the start of a run: which run it holds, what is restored, and who may write it."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from trainer.checkpoint.mirror import (
    CHECKPOINTS,
    FINISHED,
    LINES,
    Mirror,
    MirrorSource,
    MirrorView,
    Owner,
)
from trainer.checkpoint.mirror_uploads import MirrorUploads
from trainer.checkpoint.mirror_writer import MirrorPolicy
from trainer.checkpoint.restore import CheckpointRef
from trainer.checkpoint.store import Store
from trainer.config.schema import Config
from trainer.distributed.world import World
from trainer.errors import ConfigError, MirrorTaken
from trainer.resilience.progress_marks import ProgressMarks
from trainer.run import run_dir
from trainer.run.run_dir import RunIdentity
from trainer.storage import layout
from trainer.storage.files import read_json, replace_json
from trainer.storage.object_store import StoreError
from trainer.telemetry.events import Log, read_events
from trainer.telemetry.status import Phase


def look(
    config: Config[Any], path: Path, world: World, marks: ProgressMarks, log: Log
) -> MirrorView | None:
    """On rank 0, read the list of a mirror; None without one. Raises ConfigError if it can't be
    read, unless a launcher restarts a run that has its checkpoints on this disk; and MirrorTaken if
    another launcher has continued the run meanwhile."""
    url = config.checkpoint.mirror
    if url is None or not world.is_main:
        return None
    mirror = Mirror.open(url, progress=lambda: marks.mark(Phase.BUILD))
    launch = run_dir.launch_id(world)
    before = read_json(path / layout.MIRROR) or {}
    restarted = launch is not None and before.get("launch") == launch
    try:
        found = mirror.owner()
        view = MirrorView(mirror=mirror, owner=None if found is None else found[0],
                          entries=mirror.entries(CHECKPOINTS), products=mirror.entries(FINISHED))
    except StoreError as error:
        if not restarted:
            raise ConfigError(
                f"--checkpoint.mirror {url}: {error}. Check the URL and the provider's environment "
                "variables (docs/remote.md), or omit the flag to train without a mirror.") from None
        log.warning(f"the mirror can't be reached, so the checkpoints of this disk are used: "
                    f"{error}")
        return MirrorView(mirror=mirror)
    if view.owner is None and view.entries:
        raise ConfigError(f"--checkpoint.mirror {url}: it has checkpoints and no object owner, so "
                          "another program has changed it; choose another URL.")
    if restarted and view.owner is not None and view.owner.launch != launch:
        raise MirrorTaken(
            f"--checkpoint.mirror {url}: another start of the run (attempt {view.owner.attempt} on "
            f"{view.owner.host}) has taken it over. This one ends: only one may continue the run.")
    return view


def has_product(view: MirrorView | None, step: int, world: World) -> bool:
    """Collective. Whether the mirror has the product of the run that ended at a step, or there is
    no mirror that could be read."""
    return bool(world.broadcast_json(view is None or view.owner is None or any(
        product.step == step for product in view.products)))


def restore_records(
    view: MirrorView | None, checkpoints: MirrorSource, found: CheckpointRef, path: Path
) -> None:
    """On rank 0, write metric lines, events and product of a fetched checkpoint's run into the run
    folder."""
    if view is None or found.step not in checkpoints.fetched:
        return
    entry = next(e for e in reversed(view.entries) if e.step == found.step)
    view.mirror.fetch_records(entry, path, LINES)
    for product in view.products:
        if product.step == found.step:
            view.mirror.fetch_product(product, path)


def make_uploads(
    view: MirrorView | None, store: Store, path: Path, policy: MirrorPolicy, log: Log
) -> MirrorUploads | None:
    """The uploads, on rank 0 of a run with a mirror; the fence is not taken yet."""
    if view is None:
        return None
    speeds = [event["mb_per_s"] * 1e6 for event in read_events(path / layout.EVENTS)
              if event.get("event") == "mirror" and event.get("mb_per_s")]
    return MirrorUploads(view.mirror, store, path, policy, log=log,
                         bytes_per_s=speeds[-1] if speeds else None)


def next_generation(view: MirrorView | None, store: Store, world: World) -> int:
    """Collective. The generation of this start, later than all in the mirror and on the disks; 0
    without a mirror."""
    mine = store.generation
    if view is not None:
        mine = max([mine, 0 if view.owner is None else view.owner.generation,
                    *(entry.generation for entry in view.entries)])
    latest = max(world.gather_json(mine))
    return 1 + latest if world.broadcast_json(view is not None) else 0


def take(uploads: MirrorUploads | None, identity: RunIdentity, generation: int, path: Path,
         world: World, log: Log) -> None:
    """On rank 0, become the owner of the mirror. Raises MirrorTaken if another start was faster,
    and ConfigError if the mirror can't be written."""
    if uploads is None:
        return
    launch, url = run_dir.launch_id(world), uploads.fence.mirror.store.url
    owner = Owner(run=identity.run_id, generation=generation, nonce=world.nonce,
                  attempt=identity.attempt, launch=launch, host=socket.gethostname())
    before = read_json(path / layout.MIRROR) or {}
    try:
        uploads.fence.take(owner)
    except StoreError as error:
        if launch is None or before.get("launch") != launch:
            raise ConfigError(f"--checkpoint.mirror {url}: it can't be written: {error}. Check the "
                              "permissions (docs/remote.md).") from None
        log.warning(f"the mirror can't be written now: {error}. The training goes on, and the "
                    "upload is repeated")
    replace_json(path / layout.MIRROR, {"url": url, "launch": launch, "generation": generation})


def start_uploads(uploads: MirrorUploads | None, found: CheckpointRef | None) -> None:
    """Start the uploads, with the checkpoint that is continued if the mirror doesn't have it."""
    if uploads is not None:
        uploads.start()
        if found is not None and found.path is None:
            uploads.offer(found.step, always=True)
