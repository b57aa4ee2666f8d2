"""Durable checkpoint folders: staged aside, committed by one rename, verified, listed, pruned.

What the folder holds, N being the step in eight digits or more:

    step-N             a whole checkpoint: its files, and manifest.json with their sizes and hashes
    step-N.tmp-PID-X   one that is being written, or that its dead writer left behind
    step-N.old         the checkpoint that a new one of the same step is just replacing; it counts
                       while step-N isn't there, and again if step-N turns out damaged
    step-N.gone-X      pruned or abandoned: on its way out
    .lock              byte N is held by who writes step N

Any other name is somebody else's and is left alone.
"""

from __future__ import annotations

import errno
import math
import os
import re
import secrets
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from trainer.durable import free_bytes, fsync_folder, make_folder, remove_folder
from trainer.errors import CheckpointBusy, CheckpointDamaged
from trainer.lock import ByteLocks
from trainer.manifest import CheckpointInfo, Stage, look, verify
from trainer.status import Phase

_NAME = re.compile(r"step-(\d{8,})(?:\.(old|tmp-\d+-[0-9a-f]{8}|gone-[0-9a-f]{8}))?")
FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a full disk."""


class Store:
    """The checkpoint folder of a run: `RUN/checkpoints`.

    One instance per folder and process (its locks are the process'); its threads may share it.

    Args:
        folder: made when the first checkpoint is.
        run: id of the run: other runs' checkpoints are never loaded, pruned or set aside.
            None: all are one's own.
        keep: how many of the newest checkpoints `prune` keeps.
        keep_every: checkpoints whose step is a multiple of it are kept too.
        guard: entered around every change of what can be seen; refuses by an exception
            (`RunLock.committing`).
        mark: called with the progress marks "save-begin", "save-mid" (after the first buffer) and
            "save-end" (the new checkpoint is visible, but not verified yet).

    Attributes:
        in_use: step of the checkpoint that was opened and mustn't be pruned; whoever opened it
            sets it to None when it has been read.
    """

    def __init__(
        self, folder: Path, *, run: str | None = None, keep: int = 3,
        keep_every: int | None = None,
        guard: Callable[[], AbstractContextManager[None]] = nullcontext,
        mark: Callable[[Phase], None] = lambda point: None,
    ) -> None:
        assert keep >= 1, "the newest checkpoint is what a restart continues from"
        self.folder = Path(folder)
        self.in_use: int | None = None
        self._run, self._keep, self._keep_every = run, keep, keep_every
        self._guard, self._mark = guard, mark
        self._locks = ByteLocks(self.folder / ".lock")
        self._verified: set[str] = set()  # checksums of manifests whose checkpoints were whole

    @contextmanager
    def stage(
        self, step: int, *, generation: int, expected_bytes: int = 0, wait_s: float = 1.0
    ) -> Iterator[Stage]:
        """Write the checkpoint of a step; leaving the block without a commit leaves no trace.

        One writer at a time has a step. A second one that waits long enough gets its turn when
        the first is done *or dead*: it should look with `verify` first whether work is left.

        Args:
            step: optimizer steps taken.
            generation: of the run's history, raised by every rollback.
            expected_bytes: size of the whole checkpoint, if known; used to say what was missing.
            wait_s: how long to wait for another writer of this step.

        Raises:
            CheckpointBusy: another process or thread is still writing this step.
            OSError: the disk is full: names the folder, the bytes needed and those free.
        """
        stage = Stage(
            self._aside(_name(step), f"tmp-{os.getpid()}"), step=step, generation=generation,
            midway=lambda: self._mark(Phase.SAVE_MID),
            publish=lambda: self._publish(step, stage.path),
        )  # fmt: skip
        try:
            with self._claimed(step, wait_s):
                try:
                    self._settle(step)
                    stage.path.mkdir()
                    self._mark(Phase.SAVE_BEGIN)
                    yield stage
                finally:
                    remove_folder(stage.path)
        except OSError as error:
            if error.errno not in FULL:
                raise
            needed = max(expected_bytes, stage.bytes_tried)
            raise OSError(
                error.errno,
                f"{error.strerror}: the checkpoint of step {step} needs "
                f"{'' if expected_bytes else 'at least '}{needed:,} bytes and "
                f"{free_bytes(self.folder):,} are free; older checkpoints are whole",
                str(self.folder),
            ) from error

    def checkpoints(self) -> list[CheckpointInfo]:
        """All checkpoints by (generation, step), oldest first, without reading their data.

        One whose manifest is damaged comes last, since it may be the newest: `why` says so.
        """
        shown = {info.step: info for info in self._candidates()}  # step-N.old comes before step-N
        return sorted(shown.values(), key=_age)

    def verify(self, step: int) -> CheckpointInfo:
        """Read the checkpoint of a step and compare every byte with its manifest.

        Raises:
            CheckpointDamaged: what differs, or that there is no such checkpoint.
        """
        for info in self.checkpoints():
            if info.step == step:
                return self._verify(info.path, step)
        raise CheckpointDamaged(f"{_name(step)}: there is no such checkpoint in {self.folder}")

    def holds(self, step: int, generation: int) -> bool:
        """Whether the checkpoint of a step is there, whole, and of that generation."""
        try:
            return self.verify(step).generation == generation
        except CheckpointDamaged:
            return False

    def newest_valid(self) -> tuple[CheckpointInfo | None, list[str]]:
        """The newest whole checkpoint of this run, and why each newer one was skipped.

        With none, (None, reasons): no reasons means that there is no checkpoint at all.
        """
        skipped, candidates = [], self._candidates()
        for info in sorted(candidates, key=_age, reverse=True):
            if info.why is None and not self._own(info):
                skipped.append(f"{info.path.name}: belongs to another run ({info.run})")
                continue
            try:
                return self._verify(info.path, info.step), skipped
            except CheckpointDamaged as error:
                if self._candidates() != candidates:  # a writer is replacing or pruning them
                    return self.newest_valid()
                skipped.append(str(error))
        return None, skipped

    def open(self, step: int) -> dict[str, Path]:
        """File name → path of a checkpoint, verified, and kept from pruning: see `in_use`.

        Raises:
            CheckpointDamaged: see `verify`.
        """
        info = self.verify(step)
        self.in_use = step
        return {name: info.path / name for name in info.manifest["files"]}

    def prune(self, protect: Collection[int] = ()) -> list[int]:
        """Remove what isn't kept, and left-overs; returns the removed steps.

        The `keep` newest stay, those of the steps in `protect` (the best), each `keep_every`-th,
        the one in use, and those without a readable manifest.

        Raises:
            CheckpointDamaged: the newest isn't whole; nothing was removed.
            StaleAttempt: from the guard.
        """
        own = [info for info in self.checkpoints() if info.why is None and self._own(info)]
        if own and own[-1].manifest["checksum"] not in self._verified:
            self._verify(own[-1].path, own[-1].step)
        doomed = [
            info for info in own[:-self._keep]
            if info.step not in protect and info.step != self.in_use
            and not (self._keep_every and info.step % self._keep_every == 0)
        ]  # fmt: skip
        self._hide(*[info.path for info in doomed])
        self._sweep()
        return [info.step for info in doomed]

    def set_aside(self, *, after_step: int, generation: int) -> list[int]:
        """Abandon what is newer than a step but of an older generation; returns those steps.

        Called by a rollback to `after_step` before it goes on as `generation`. What is set aside
        isn't listed any more; the next prune removes it.
        """
        abandoned = [
            info for info in self._candidates()
            if info.step > after_step
            and (info.generation is None or (self._own(info) and info.generation < generation))
        ]  # fmt: skip
        self._hide(*[info.path for info in abandoned])
        return sorted({info.step for info in abandoned})

    @property
    def generation(self) -> int:
        """The latest of this run's checkpoints, damaged ones too; 0 if there are none."""
        return max((i.generation or 0 for i in self.checkpoints() if self._own(i)), default=0)

    def clean(self) -> list[str]:
        """At the start of an attempt: remove what dead ones left; returns the removed names.

        A save that was interrupted while it replaced a checkpoint is brought to its end.
        """
        return self._sweep(at_start=True)

    def close(self) -> None:
        """Close the lock file. Checkpoints can still be read."""
        self._locks.close()

    def _publish(self, step: int, path: Path) -> CheckpointInfo:
        final, old = self._paths(step)
        with self._guard():
            replaces = final.is_dir()
            if replaces:
                final.rename(old)
            try:
                path.rename(final)
            except OSError:
                if replaces:
                    old.rename(final)
                raise
            fsync_folder(self.folder)
        self._mark(Phase.SAVE_END)
        try:
            info = self._verify(final, step)
        except CheckpointDamaged:
            self._discard(final)
            self._settle(step)
            raise
        if replaces:
            self._discard(old)
        return info

    @contextmanager
    def _claimed(self, step: int, wait_s: float) -> Iterator[None]:
        make_folder(self.folder)
        if not self._locks.lock(step, wait_s):
            writers = [n for n in os.listdir(self.folder) if n.startswith(f"{_name(step)}.tmp-")]
            raise CheckpointBusy(
                f"{self.folder}: step {step} has been under way elsewhere for more than "
                f"{wait_s:g} s ({', '.join(writers) or 'nothing written yet'})")
        try:
            yield
        finally:
            self._locks.unlock(step)

    def _settle(self, step: int) -> None:
        """End a replacement that was interrupted. The caller has claimed the step."""
        final, old = self._paths(step)
        if not old.is_dir():
            return
        if final.is_dir():
            if self._is_whole(final, step) or not self._is_whole(old, step):
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
            elif suffix and self._locks.try_lock(step):  # else a living writer is at it
                try:
                    if suffix == "old":
                        self._settle(step)
                    elif self._locks.supported or at_start:
                        remove_folder(self.folder / name)
                        removed.append(name)
                finally:
                    self._locks.unlock(step)
        return removed

    def _candidates(self) -> list[CheckpointInfo]:
        """Everything that may count as a checkpoint; step-N.old before step-N."""
        for _ in range(10):  # until no writer renamed anything under our eyes
            names = self._names()
            found = [look(self.folder / n, step) for n, step, how in names if how in ("", "old")]
            if names == self._names():
                break
        return found

    def _names(self) -> list[tuple[str, int, str]]:
        """Our folders as (name, step, suffix); longer names first."""
        found = []
        for name in sorted(os.listdir(self.folder), reverse=True) if self.folder.is_dir() else ():
            match = _NAME.fullmatch(name)
            if match and name.startswith(_name(int(match[1]))) and (self.folder / name).is_dir():
                found.append((name, int(match[1]), match[2] or ""))
        return found

    def _own(self, info: CheckpointInfo) -> bool:
        return self._run is None or info.run == self._run

    def _verify(self, path: Path, step: int) -> CheckpointInfo:
        info = verify(path, step)
        self._verified.add(info.manifest["checksum"])
        return info

    def _is_whole(self, path: Path, step: int) -> bool:
        try:
            self._verify(path, step)
        except CheckpointDamaged:
            return False
        return True

    def _paths(self, step: int) -> tuple[Path, Path]:
        return self.folder / _name(step), self.folder / f"{_name(step)}.old"

    def _aside(self, name: str, what: str) -> Path:
        return self.folder / f"{name}.{what}-{secrets.token_hex(4)}"

    def _hide(self, *paths: Path) -> list[Path]:
        """Take checkpoints out of sight, for good; returns where they are now."""
        if not paths:
            return []
        with self._guard():
            hidden = [path.rename(self._aside(path.stem, "gone")) for path in paths]
            fsync_folder(self.folder)
        return hidden

    def _discard(self, *paths: Path) -> None:
        for path in self._hide(*paths):
            remove_folder(path)


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _age(info: CheckpointInfo) -> tuple[float, int, bool]:
    generation = math.inf if info.generation is None else info.generation
    return generation, info.step, info.path.suffix != ".old"
