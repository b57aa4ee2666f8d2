"""The run that a command reads: a run folder, or the URL of its mirror.

Of a mirror, only what the command needs is downloaded, to a temporary folder, and verified.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from trainer.checkpoint.mirror import FINISHED, Mirror, MirrorEntry, total_bytes
from trainer.checkpoint.saved_state import SavedState
from trainer.checkpoint.store import Store
from trainer.errors import CheckpointDamaged, ConfigError
from trainer.storage import layout
from trainer.storage.object_store import StoreError, check_url
from trainer.telemetry.events import Log

TRIES = 5  # to read a checkpoint: the run may prune it in the meantime


@contextmanager
def run_folder(
    run: Path | str, *, checkpoint: str | None = None, product: bool = False
) -> Iterator[Path]:
    """The folder of a run. That of a URL exists in the context only, and holds the newest records;
    if needed, a `checkpoint` (best, last, which includes the best one, or a step) and the `product`
    of a finished run. ConfigError if the URL is wrong, can't be read, or lacks the checkpoint."""
    if isinstance(run, Path):
        yield run
        return
    with TemporaryDirectory(prefix="trainer-") as root:
        folder = Path(root, run.rstrip("/").rpartition("/")[2])
        try:
            with reading_mirror(run) as mirror:
                _download(mirror, folder, checkpoint, product=product)
            yield folder
        except ConfigError as error:  # name the run as the user has
            raise ConfigError(str(error).replace(str(folder), run)) from error


@contextmanager
def reading_mirror(url: str) -> Iterator[Mirror]:
    """Context in which a mirror is read. Raises ConfigError if the URL is wrong, or if the store
    can't be read."""
    try:
        check_url(url)
    except ValueError as error:
        raise ConfigError(f"{url}: {error}.") from None
    mirror = Mirror.open(url, flag="the URL", create=False)
    try:
        yield mirror
    except StoreError as error:
        raise ConfigError(f"{url}: {error}. Check the URL and the provider's environment variables "
                          "(docs/remote.md).") from None


def _download(mirror: Mirror, folder: Path, checkpoint: str | None, *, product: bool) -> None:
    url, tries = mirror.store.url, TRIES
    while True:
        entries, products = mirror.entries(), mirror.entries(FINISHED)
        if not entries:
            raise ConfigError(f"{url}: there is no checkpoint of a run; give the URL of its "
                              "--checkpoint.mirror.")
        try:
            if checkpoint is not None:
                _fetch(mirror, entries, folder, checkpoint)
            if product and products:
                mirror.fetch_product(products[-1], folder)
            mirror.fetch_records(max([*entries, *products]), folder)
            return
        except CheckpointDamaged as error:
            tries -= 1
            if not tries or entries == mirror.entries():
                steps = ", ".join(sorted({str(e.step) for e in entries}, key=int))
                raise ConfigError(f"{url}: {error}; it has these steps: {steps}.") from None


def _fetch(mirror: Mirror, entries: list[MirrorEntry], folder: Path, checkpoint: str) -> None:
    """Download a checkpoint, of a step that of its latest generation. The last is the newest one
    that is whole, and names the best one."""
    local, damaged = Store(folder / layout.CHECKPOINTS), []
    is_step = checkpoint not in ("best", "last")
    for entry in reversed(entries):
        if is_step and str(entry.step) != checkpoint:
            continue
        try:
            if (size := total_bytes(mirror.manifest(entry))) >= 10**8:
                Log(stream=sys.stderr).info(f"downloading step {entry.step}: {size / 1e6:.3g} MB")
            mirror.fetch(entry, local)
        except CheckpointDamaged as error:
            if is_step:
                raise
            damaged.append(str(error))
            continue
        best = SavedState.read(local.folder / layout.step_name(entry.step)).best.step
        if checkpoint == "best" and best not in (0, entry.step):
            _fetch(mirror, entries, folder, str(best))
        return
    raise CheckpointDamaged("; ".join(damaged) or f"there is no checkpoint of step {checkpoint}")
