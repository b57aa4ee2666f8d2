"""Durable checkpoint folders: written to a temporary folder, published by a rename, verified.

Content of the folder, with N the step in at least eight digits:

    step-N             a complete checkpoint: its files, and manifest.json with sizes and hashes
    step-N.tmp-PID-X   a checkpoint being written, or left behind by a dead writer
    step-N.old         the previous checkpoint of a step while a new one replaces it; used while
                       step-N is missing, and again if step-N turns out to be damaged
    step-N.gone-X      a pruned or abandoned checkpoint, about to be deleted
    .lock              byte N is locked by the writer of step N

Other names are never touched.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from trainer.checkpoint import manifest
from trainer.checkpoint.manifest import CheckpointInfo, StagedCheckpoint
from trainer.errors import CheckpointBusy, CheckpointDamaged
from trainer.storage.files import DISK_FULL, fsync_folder, make_subfolder, remove_folder
from trainer.storage.layout import MODEL, STEP_NAME, step_name
from trainer.storage.locks import ByteLocks
from trainer.telemetry.status import Phase

_NAME = re.compile(STEP_NAME + r"(?:\.(old|tmp-\d+-[0-9a-f]{8}|gone-[0-9a-f]{8}))?")


class Store:
    """The checkpoint folder of a run, `RUN/checkpoints`. Thread-safe; one instance per process.

    Args:
        folder: created with the first checkpoint.
        run: checkpoints of other runs are never loaded, pruned or set aside; None: all are its own.
        keep, keep_every: `prune` keeps this many newest checkpoints, and multiples of this step.
        guard: context of every visible change of the folder; raises if it is not allowed.
        mark: called with a step at `SAVE_BEGIN`, `SAVE_MID` (after the first buffer) and `SAVE_END`
            (the new checkpoint is visible, but not verified yet).
    """

    def __init__(
        self, folder: Path, *, run: str | None = None, keep: int = 3,
        keep_every: int | None = None,
        guard: Callable[[], AbstractContextManager[None]] = nullcontext,
        mark: Callable[[Phase, int], None] = lambda point, step: None,
    ) -> None:
        assert keep >= 1, "a restart continues from the newest checkpoint"
        self.folder = Path(folder)
        self._run, self._keep, self._keep_every = run, keep, keep_every
        self._guard, self._mark = guard, mark
        self._locks = ByteLocks(self.folder / ".lock")
        self._verified: set[str] = set()  # manifest checksums of verified checkpoints

    @contextmanager
    def stage(
        self, step: int, *, generation: int, expected_bytes: int = 0, wait_s: float = 1.0
    ) -> Iterator[StagedCheckpoint]:
        """Context in which the checkpoint of a step is written; without a `commit` it is deleted.
        Raises CheckpointBusy after `wait_s` seconds in which another writer has the step.

        The next writer of a step gets its turn when the first is done *or dead*, so it should call
        `verify` first: the checkpoint may be complete already. `expected_bytes` is its size, if
        known, for the message about a full disk.
        """
        stage = StagedCheckpoint(
            self._temp_path(step_name(step), f"tmp-{os.getpid()}"), step=step,
            generation=generation, midway=lambda: self._mark(Phase.SAVE_MID, step),
            publish=lambda: self._publish(step, stage.path),
        )  # fmt: skip
        try:
            with self._step_lock(step, wait_s):
                try:
                    self._finish_replacement(step)
                    stage.path.mkdir()
                    self._mark(Phase.SAVE_BEGIN, step)
                    yield stage
                finally:
                    remove_folder(stage.path)
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            needed = max(expected_bytes, stage.bytes_tried)
            free = shutil.disk_usage(self.folder.parent).free
            why = (f"{error.strerror}: the checkpoint of step {step} needs "
                   f"{'' if expected_bytes else 'at least '}{needed:,} bytes and "
                   f"{free:,} are free; older checkpoints are complete")
            raise OSError(error.errno, why, str(self.folder)) from error

    def checkpoints(self) -> list[CheckpointInfo]:
        """All checkpoints by (generation, step); those with a damaged manifest come last."""
        shown = {info.step: info for info in self._candidates()}  # step-N.old comes before step-N
        return sorted(shown.values(), key=_age)

    def find(self, step: int) -> CheckpointInfo:
        """The checkpoint of a step; raises CheckpointDamaged if it is missing, or if a file's size
        differs from the manifest."""
        info = next((info for info in self.checkpoints() if info.step == step), None)
        if info is None:
            raise CheckpointDamaged(
                f"{step_name(step)}: there is no such checkpoint in {self.folder}")
        return manifest.verify_sizes(info)

    def verify(self, step: int) -> CheckpointInfo:
        """As `find`; also compares all files with the manifest's hashes."""
        return self._verify(self.find(step).path, step)

    def checksum(self, step: int, *, verify: bool = False) -> str:
        """Checksum of the manifest of a step; "" if the checkpoint is missing or damaged, as `find`
        (or `verify`) sees it."""
        try:
            info = self.verify(step) if verify else self.find(step)
        except (CheckpointDamaged, OSError):
            return ""
        return str(info.manifest["checksum"])

    def holds(self, step: int, generation: int) -> bool:
        """Whether a valid checkpoint of this step and generation exists."""
        return any(info.step == step and info.generation == generation
                   and self._is_valid(info.path, step) for info in self.checkpoints())

    def room_to_go_on(self, *, is_over: bool) -> int:
        """Bytes of the newest checkpoint, which the next one takes too, or of its weights for a run
        that `is_over`; 0 without a checkpoint."""
        own = self._readable()
        files = own[-1].manifest["files"] if own else {}
        return sum(entry["bytes"] for name, entry in files.items() if name == MODEL or not is_over)

    def newest_valid(self) -> tuple[CheckpointInfo | None, list[str]]:
        """The newest valid checkpoint of this run, or None, and why each newer one was skipped."""
        skipped, candidates = [], self._candidates()
        for info in sorted(candidates, key=_age, reverse=True):
            if info.why is None and not self._is_mine(info):
                skipped.append(f"{info.path.name}: belongs to another run ({info.run})")
                continue
            try:
                return self._verify(info.path, info.step), skipped
            except CheckpointDamaged as error:
                if self._candidates() != candidates:  # a writer has replaced or pruned one
                    return self.newest_valid()
                skipped.append(str(error))
        return None, skipped

    def prune(self, protect: Collection[int] = ()) -> list[int]:
        """Delete old checkpoints and left-over folders, but not the steps in `protect` or those
        without a readable manifest. Returns the deleted steps. If the newest checkpoint is damaged,
        raises CheckpointDamaged and deletes nothing."""
        own = self._readable()
        if own and own[-1].manifest["checksum"] not in self._verified:
            self._verify(own[-1].path, own[-1].step)
        to_prune = [info for info in own[:-self._keep] if info.step not in protect
                    and not (self._keep_every and info.step % self._keep_every == 0)]
        self._hide(*[info.path for info in to_prune])
        self._sweep()
        return [info.step for info in to_prune]

    def set_aside(self, *, after_step: int, generation: int) -> list[int]:
        """For a rollback to a step, hide the later checkpoints of older generations until the next
        `prune` deletes them. Returns their steps."""
        abandoned = [info for info in self._candidates() if info.step > after_step and (
            info.generation is None or (self._is_mine(info) and info.generation < generation))]
        self._hide(*[info.path for info in abandoned])
        return sorted({info.step for info in abandoned})

    def hide_damaged(self, step: int) -> int | None:
        """Hide a checkpoint if it is damaged and there is an older one. Returns the newest step
        before it if it was hidden, else None."""
        path, _ = self._paths(step)
        older = [info.step for info in self._readable() if info.step < step]
        if not older or not path.is_dir() or self._is_valid(path, step):
            return None
        self._hide(path)
        return max(older)

    @property
    def generation(self) -> int:
        """Latest generation of this run's checkpoints; 0 without any."""
        return max((i.generation or 0 for i in self.checkpoints() if self._is_mine(i)), default=0)

    def clean(self) -> list[str]:
        """At the start: delete what dead attempts left behind, and complete an interrupted
        replacement. Returns the deleted names."""
        return self._sweep(at_start=True)

    def close(self) -> None:
        self._locks.close()

    def _publish(self, step: int, path: Path) -> CheckpointInfo:
        final, old = self._paths(step)
        with self._guard():
            replaces = os.path.lexists(final)
            if replaces:
                final.rename(old)
            try:
                path.rename(final)
            except OSError:
                if replaces:
                    old.rename(final)
                raise
            fsync_folder(self.folder)
        self._mark(Phase.SAVE_END, step)
        try:
            info = self._verify(final, step)
        except CheckpointDamaged:
            self._discard(final)
            self._finish_replacement(step)
            raise
        if replaces:
            self._discard(old)
        return info

    @contextmanager
    def _step_lock(self, step: int, wait_s: float) -> Iterator[None]:
        make_subfolder(self.folder)
        if not self._locks.lock(step, wait_s):
            writers = [n for n in os.listdir(self.folder)
                       if n.startswith(f"{step_name(step)}.tmp-")]
            raise CheckpointBusy(
                f"{self.folder}: another process has been writing step {step} for more than "
                f"{wait_s:g} s ({', '.join(writers) or 'nothing written yet'})")
        try:
            yield
        finally:
            self._locks.unlock(step)

    def _finish_replacement(self, step: int) -> None:
        """Complete or undo an interrupted replacement. The caller holds the step's lock."""
        final, old = self._paths(step)
        if not old.is_dir():
            return
        if final.is_dir():
            if self._is_valid(final, step) or not self._is_valid(old, step):
                self._discard(old)
                return
            self._discard(final)
        with self._guard():
            old.rename(final)
            fsync_folder(self.folder)

    def _sweep(self, *, at_start: bool = False) -> list[str]:
        removed = []
        for name, step, suffix in self._names():
            if suffix.startswith("gone-"):
                remove_folder(self.folder / name)
                removed.append(name)
            elif suffix and self._locks.try_lock(step):  # else a living writer holds it
                try:
                    if suffix == "old":
                        self._finish_replacement(step)
                    elif self._locks.supported or at_start:
                        remove_folder(self.folder / name)
                        removed.append(name)
                finally:
                    self._locks.unlock(step)
        return removed

    def _candidates(self) -> list[CheckpointInfo]:
        """All folders that may be checkpoints; step-N.old before step-N."""
        for _ in range(10):  # until no writer renamed anything meanwhile
            names = self._names()
            found = [manifest.read_manifest(self.folder / name, step)
                     for name, step, suffix in names if suffix in ("", "old")]
            if names == self._names():
                break
        return found

    def _names(self) -> list[tuple[str, int, str]]:
        """Folders as (name, step, suffix); longer names first."""
        listed = os.listdir(self.folder) if self.folder.is_dir() else ()
        matches = filter(None, map(_NAME.fullmatch, sorted(listed, reverse=True)))
        return [(match[0], int(match[1]), match[2] or "") for match in matches
                if match[0].startswith(step_name(int(match[1])))
                and (self.folder / match[0]).is_dir()]

    def _readable(self) -> list[CheckpointInfo]:
        """The checkpoints of this run with a readable manifest, oldest first."""
        return [info for info in self.checkpoints() if info.why is None and self._is_mine(info)]

    def _is_mine(self, info: CheckpointInfo) -> bool:
        return self._run is None or info.run == self._run

    def _verify(self, path: Path, step: int) -> CheckpointInfo:
        info = manifest.verify(path, step)
        self._verified.add(info.manifest["checksum"])
        return info

    def _is_valid(self, path: Path, step: int) -> bool:
        try:
            self._verify(path, step)
        except CheckpointDamaged:
            return False
        return True

    def _paths(self, step: int) -> tuple[Path, Path]:
        return self.folder / step_name(step), self.folder / f"{step_name(step)}.old"

    def _temp_path(self, name: str, what: str) -> Path:
        return self.folder / f"{name}.{what}-{secrets.token_hex(4)}"

    def _hide(self, *paths: Path) -> list[Path]:
        """Rename checkpoints so that they are no longer listed. Returns their new paths."""
        if not paths:
            return []
        with self._guard():
            hidden = [path.rename(self._temp_path(path.stem, "gone")) for path in paths]
            fsync_folder(self.folder)
        return hidden

    def _discard(self, path: Path) -> None:
        for hidden in self._hide(path):
            remove_folder(hidden)


def _age(info: CheckpointInfo) -> tuple[float, int, bool]:
    generation = math.inf if info.generation is None else info.generation
    return generation, info.step, info.path.suffix != ".old"
