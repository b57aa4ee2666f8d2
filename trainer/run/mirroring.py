"""The mirror at the start of a run: which run it holds, what is restored, and who may write it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

from trainer.checkpoint.mirror import (
    CHECKPOINTS,
    FINISHED,
    Mirror,
    MirrorSource,
    NotAMirror,
    Owner,
)
from trainer.checkpoint.mirror_fence import mirror_taken
from trainer.checkpoint.mirror_uploads import MirrorUploads
from trainer.checkpoint.mirror_writer import MirrorPolicy
from trainer.checkpoint.store import Store
from trainer.distributed.world import World
from trainer.errors import ConfigError, MirrorFailed
from trainer.run import run_dir
from trainer.run.context import Context, RunFolder
from trainer.storage import layout
from trainer.storage.files import replace_json
from trainer.storage.object_store import AccessDenied, Missing, StoreError
from trainer.storage.records import Kind, is_count, is_number, is_text, optional, read_json
from trainer.telemetry.events import Log, read_events
from trainer.telemetry.status import Phase

MIRROR = Kind({"url": is_text, "launch": optional(is_text), "generation": is_count})
"""Content of mirror.json."""


def look(context: Context, claim: Callable[[], object]) -> MirrorSource:
    """On rank 0, list the mirror; `claim` takes the run folder's lock before a download. Raises
    ConfigError if the mirror can't be read, unless a launcher restarts a run that has its
    checkpoints on this disk; and MirrorTaken if another launcher has continued the run meanwhile.
    """
    url, log, marks = context.config.checkpoint.mirror, context.log, context.marks
    if url is None or not context.world.is_main:
        return MirrorSource()
    mirror = Mirror.open(url, progress=lambda: marks.mark(Phase.BUILD))
    launch = run_dir.launch_id(context.world)
    restarted = _is_restarted(context.path, launch)
    try:
        found = mirror.owner()
        source = MirrorSource(
            mirror, owner=None if found is None else found[0], entries=mirror.entries(CHECKPOINTS),
            products=mirror.entries(FINISHED), log=log, claim=claim)
    except StoreError as error:
        if not restarted:
            text = (f"--checkpoint.mirror {url}: {error}. Check the URL and the provider's "
                    "environment variables (docs/remote.md), or omit the flag to train without a "
                    "mirror")
            if isinstance(error, AccessDenied | Missing | NotAMirror):
                raise ConfigError(f"{text}.") from None
            raise MirrorFailed(f"{text}; a restart tries again") from None
        log.warning("the mirror can't be reached, so the checkpoints of this disk are used: "
                    f"{error}")
        return MirrorSource(mirror, is_reached=False)
    if source.owner is None and source.entries:
        raise ConfigError(f"--checkpoint.mirror {url}: it has checkpoints and no object owner, so "
                          "another program has changed it; choose another URL.")
    if restarted and source.owner is not None and source.owner.launch != launch:
        raise mirror_taken(mirror, source.owner)
    return source


def _is_restarted(path: Path, launch: str | None) -> bool:
    """Whether an earlier attempt of the same launcher has owned the mirror."""
    owned = read_json(path / layout.MIRROR, MIRROR)
    return launch is not None and owned is not None and owned["launch"] == launch


def make_uploads(source: MirrorSource, store: Store, path: Path, policy: MirrorPolicy,
                 log: Log) -> MirrorUploads | None:
    """The uploads, on rank 0 of a run with a mirror; the fence is not taken yet."""
    if source.mirror is None:
        return None
    speeds = [event["mb_per_s"] * 1e6 for event in read_events(path / layout.EVENTS)
              if event.get("event") == "mirror" and is_number(event.get("mb_per_s"))]
    mirror = Mirror(source.mirror.store)  # its thread moves no progress mark
    return MirrorUploads(mirror, store, path, policy, log=log,
                         bytes_per_s=speeds[-1] or None if speeds else None)


def next_generation(source: MirrorSource, store: Store, world: World) -> int:
    """Collective. The generation of this start, later than all in the mirror and on the disks; 0
    without a mirror."""
    latest = max(world.gather_json(max(source.generation, store.generation)))
    return 1 + latest if world.broadcast_json(source.mirror is not None) else 0


def take(folder: RunFolder, path: Path, world: World, log: Log) -> None:
    """On rank 0, become the owner of the mirror. Raises MirrorTaken if another start was faster,
    and ConfigError if the mirror can't be written."""
    uploads, identity, generation = folder.mirror, folder.identity, folder.generation
    if uploads is None:
        return
    launch, url = run_dir.launch_id(world), uploads.fence.mirror.store.url
    owner = Owner(run=identity.run_id, generation=generation, nonce=world.nonce,
                  attempt=identity.attempt, launch=launch, host=socket.gethostname())
    try:
        (uploads.fence.take if folder.source.is_reached else uploads.fence.take_later)(owner)
    except StoreError as error:
        if isinstance(error, AccessDenied) and not _is_restarted(path, launch):
            raise ConfigError(f"--checkpoint.mirror {url}: it can't be written: {error}. Check the "
                              "permissions (docs/remote.md).") from None
        log.warning(f"the mirror can't be written now: {error}. The training goes on, and the "
                    "upload is repeated")
    replace_json(path / layout.MIRROR, {"url": url, "launch": launch, "generation": generation})
