"""The fence of a mirror: only the attempt that started last may write.

Each start raises the generation in the object `owner` by a conditional PUT, and saves its
checkpoints, local ones too, in that generation; a rollback raises it again. So a writer that
another start has superseded can commit in an older generation at most, which no reader prefers.
"""

from __future__ import annotations

import dataclasses

from trainer.checkpoint.mirror import OWNER, Mirror, Owner
from trainer.errors import ConfigError, MirrorTaken
from trainer.storage.object_store import Conflict, Version

_OTHER: Version = {"e_tag": '"00000000000000000000000000000000"', "version": "1"}
"""A version that no object has."""


class Fence:
    """The claim of one attempt on a mirror. All methods raise StoreError too."""

    def __init__(self, mirror: Mirror) -> None:
        self.mirror, self.owner = mirror, Owner(run="", generation=0, nonce="")
        self.is_held = self._is_late = False

    def take_later(self, owner: Owner) -> None:
        """Leave it to the first upload to take the mirror: at the start it couldn't be read. A
        later start may have it by then, so the owner may only be of the same launcher."""
        self.owner, self._is_late = owner, True

    def take(self, owner: Owner) -> None:
        """Become the owner of the mirror, and check that the store refuses writes whose condition
        doesn't hold. Raises MirrorTaken if another start has this generation or a later one, or is
        faster; ConfigError if the store ignores conditions."""
        self.owner = owner
        found = self.mirror.owner()
        if found is not None and found[0] != owner and (
                found[0].generation >= owner.generation
                or (self._is_late and found[0].launch != owner.launch)):
            raise mirror_taken(self.mirror, found[0])
        self._swap(owner, None if found is None else found[1])
        store, data = self.mirror.store, owner.encode()
        for write in (lambda: store.put_new(OWNER, data),
                      lambda: store.replace(OWNER, data, _OTHER)):
            try:
                write()
            except Conflict:
                continue
            raise ConfigError(
                f"--checkpoint.mirror {store.url}: this store ignores the conditions of a write "
                "(If-None-Match, If-Match), so two starts could overwrite each other's "
                "checkpoints. Use a store with conditional writes (S3, GCS, Azure, MinIO, Ceph).")
        self.is_held = True

    def check(self) -> Version:
        """Raise MirrorTaken unless this attempt is still the owner."""
        found = self.mirror.owner()
        if found is None or found[0].nonce != self.owner.nonce:
            raise mirror_taken(self.mirror, None if found is None else found[0])
        self.owner = found[0]  # the answer to an own swap may have been lost
        return found[1]

    def raise_to(self, generation: int) -> None:
        """Raise the generation to this one, after a rollback."""
        if generation > self.owner.generation:
            self._swap(dataclasses.replace(self.owner, generation=generation), self.check())

    def _swap(self, owner: Owner, seen: Version | None) -> None:
        store, data = self.mirror.store, owner.encode()
        try:
            if seen is None:
                store.put_new(OWNER, data)
            else:
                store.replace(OWNER, data, seen)
        except Conflict:
            now = self.mirror.owner()
            if now is None or now[0] != owner:  # else the answer to a first try was lost
                raise mirror_taken(self.mirror, None if now is None else now[0]) from None
        self.owner = owner


def mirror_taken(mirror: Mirror, by: Owner | None) -> MirrorTaken:
    """The error of an attempt whose mirror another start, or program, has taken."""
    who = "another program has removed its owner" if by is None else (
        f"another start of the run (attempt {by.attempt} on {by.host}, generation "
        f"{by.generation}) has taken it over")
    return MirrorTaken(
        f"--checkpoint.mirror {mirror.store.url}: {who}. This attempt ends: only one may "
        "continue the run. Stop the other one before you start it here again.")
