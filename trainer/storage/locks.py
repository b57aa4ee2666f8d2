"""File locks that are released when their process dies, and the lock of a run folder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError, FileDamaged, StaleAttempt
from trainer.storage import processes
from trainer.storage.files import display_path, open_regular
from trainer.storage.records import Kind, is_count, is_text, optional, parse_json

_NOT_SUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
_POLL_S = 0.01
_OWNER = Kind(needed={"nonce": is_text}, known={
    "place": is_text, "launch_id": optional(is_text), "launcher_pid": optional(is_count),
    "launcher_start": optional(is_text)})


class ByteLocks:
    """POSIX record locks (`fcntl.lockf`) between processes and threads, one per byte of a file.

    The kernel releases them when their process dies; forks don't inherit them. A process loses all
    its locks on a file when it closes *any* descriptor of it: it must have one instance per file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.supported = True
        """False once the file system has refused a lock; then every `try_lock` succeeds."""
        self._fd: int | None = None
        self._held: set[int] = set()
        self._mutex = threading.Lock()

    def fd(self) -> int:
        """Descriptor of the file; created if it is missing."""
        if self._fd is None:
            self._fd = open_regular(self.path, os.O_RDWR | os.O_CREAT)
        return self._fd

    def try_lock(self, byte: int) -> bool:
        """Take a lock if it is free. Returns whether it was taken."""
        with self._mutex:
            if byte in self._held:
                return False
            try:
                fcntl.lockf(self.fd(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
            except OSError as error:
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    return False
                if error.errno not in _NOT_SUPPORTED:
                    raise
                self.supported = False
            self._held.add(byte)
            return True

    def lock(self, byte: int, wait_s: float) -> bool:
        """Take a lock, waiting up to `wait_s` seconds. Returns whether it was taken."""
        deadline = time.monotonic() + wait_s
        while not self.try_lock(byte):  # a blocking lock has no time limit without a signal
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def unlock(self, byte: int) -> None:
        with self._mutex:
            self._held.remove(byte)
            if self.supported and self._fd is not None:
                fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, byte)

    def close(self) -> None:
        """Release all locks."""
        with self._mutex:
            self._held.clear()
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None


def release_locks(path: Path) -> None:
    """Release all locks of this process on a file: closing any descriptor of it does that."""
    with suppress(FileNotFoundError, NotADirectoryError, PermissionError, FileDamaged):
        os.close(open_regular(path, os.O_RDWR))


class RunLock:
    """The lock file of a run folder, owned by one attempt at a time.

    Rank 0 of an attempt *takes* the lock by writing the attempt's nonce to the file. Every process
    of the attempt *checks* that the file still has it before it changes the folder, so an orphan
    of an older attempt can't write. Byte 0 is locked during check and change. The owner locks a
    byte derived from the nonce until it dies, which shows that it is alive.

    Args:
        revoked: whether the attempt is known to be superseded, whatever the file says.
        brief_lock_s: how long to wait for byte 0. A process that holds it for longer hangs.
    """

    def __init__(
        self, path: Path, nonce: str, *, revoked: Callable[[], bool] = lambda: False,
        brief_lock_s: float = 5.0,
    ) -> None:  # fmt: skip
        self.path, self.nonce, self.holds = path, nonce, False
        self._revoked, self._brief_lock_s = revoked, brief_lock_s
        self._locks = ByteLocks(path)

    def take(
        self, *, launcher_pid: int | None = None, launch_id: str | None = None, wait_s: float = 5.0
    ) -> str | None:
        """Make this attempt the owner of the run folder. Its first process to do this `holds` the
        lock; the others, in a folder that several nodes share, return at once. It is taken over
        from an owner that is dead, that the same launcher started, or whose launcher is dead:
        returns a message if such an owner lives, else None.

        Args:
            launcher_pid: the process whose death makes this one an orphan; None without a launcher.
            launch_id: equal in all attempts of one launch, on all hosts; None without one.
            wait_s: seconds to wait for a living owner to exit, before a ConfigError.
        """
        me = {"nonce": self.nonce, "pid": os.getpid(), "launch_id": launch_id,
              "place": f"{os.uname().nodename} {processes.host()}", "launcher_pid": launcher_pid,
              "launcher_start": None if launcher_pid is None else _started(launcher_pid)}
        deadline = time.monotonic() + wait_s
        while True:
            with self._brief_lock():
                owner = self._read()
                if owner is not None and owner["nonce"] == self.nonce:
                    return None
                alive = owner is not None and self._is_alive(owner["nonce"])
                why = _takeover_reason(owner, me) if owner is not None and alive else None
                if not alive or why:
                    self._locks.try_lock(_byte(self.nonce))
                    self.holds = True
                    # One padded write: readers never see half of it, nor anything after it.
                    written = os.pwrite(
                        self._locks.fd(), json.dumps(me).encode().ljust(1024), 0)
                    os.ftruncate(self._locks.fd(), written)
                    return why
            if time.monotonic() >= deadline:
                assert owner is not None
                raise ConfigError(
                    f"--run-dir {display_path(self.path.parent)}: another run is active in this "
                    f"folder (process {owner.get('pid')} on "
                    f"{str(owner.get('place')).partition(' ')[0]}). Stop it or choose another "
                    f"--run-dir. If its host is gone for good, delete {display_path(self.path)}.")
            time.sleep(_POLL_S)

    @contextmanager
    def committing(self) -> Iterator[None]:
        """Context of a change of the folder: no other attempt can take the lock until exit. Raises
        StaleAttempt if one owns the folder, or if the lock file was removed."""
        with self._brief_lock():
            self.check_without_waiting()
            yield

    def check_without_waiting(self) -> None:
        """As `committing`, but without a lock, which costs 10 µs."""
        if self._revoked():
            raise StaleAttempt(f"a newer attempt than this one ({self.nonce}) has started on other "
                               "nodes. This attempt exits without writing.")
        owner = self._read()
        if owner is None and not self.path.exists():
            raise StaleAttempt(
                f"{display_path(self.path)} is gone: the run folder or this file in it was "
                "removed or renamed. This attempt exits without writing. Unless the folder is "
                "restored, the next attempt starts from the beginning.")
        if owner is None or owner["nonce"] != self.nonce:
            raise StaleAttempt(
                f"{display_path(self.path)}: this attempt ({self.nonce}) no longer owns the run "
                f"folder, {'no attempt' if owner is None else 'attempt ' + str(owner['nonce'])} "
                "does. This attempt exits without writing.")

    def close(self) -> None:
        """Release the lock; the nonce stays in the file."""
        self._locks.close()

    @contextmanager
    def _brief_lock(self) -> Iterator[None]:
        locked = self._locks.lock(0, self._brief_lock_s)
        try:
            yield
        finally:
            if locked:
                self._locks.unlock(0)

    def _read(self) -> dict[str, Any] | None:
        try:
            if not os.path.samestat(os.fstat(self._locks.fd()), os.stat(self.path)):
                return None
            record = parse_json(os.pread(self._locks.fd(), 4096, 0))
        except (FileNotFoundError, ValueError):
            return None
        return record if _OWNER(record) else None

    def _is_alive(self, nonce: str) -> bool:
        if nonce == self.nonce:
            return False
        if not self._locks.try_lock(_byte(nonce)):
            return True
        self._locks.unlock(_byte(nonce))
        return False


def living_owner(path: Path) -> str | None:
    """The nonce in a lock file if its owner lives. A process that has this `RunLock` loses it."""
    try:
        with open(open_regular(path), "rb") as file:
            if not _OWNER(record := parse_json(file.read(4096) or b"")):
                return None
            nonce: str = record["nonce"]
            query = struct.pack("hhlli0l", fcntl.F_WRLCK, os.SEEK_SET, _byte(nonce), 1, 0)
            answer = fcntl.fcntl(file, fcntl.F_GETLK, query)
    except (OSError, ValueError):
        return None
    return nonce if struct.unpack("hhlli0l", answer)[0] != fcntl.F_UNLCK else None


def _byte(nonce: str) -> int:
    return 1 + zlib.crc32(nonce.encode(errors="surrogatepass"))  # it may be any text of JSON


def _takeover_reason(owner: dict[str, Any], me: dict[str, Any]) -> str | None:
    """Why `me` may take the lock over from a living owner, or None if it may not."""
    pid, start = owner.get("launcher_pid"), owner.get("launcher_start")
    if owner.get("launch_id") is not None and owner["launch_id"] == me["launch_id"]:
        why = "an earlier attempt of this launch"
    elif owner.get("place") != me["place"] or pid is None:
        return None
    elif (pid, start) == (me["launcher_pid"], me["launcher_start"]):
        why = "an earlier attempt of this launcher"
    elif _started(pid) != start or start is None:
        why = "an orphan whose launcher is gone"
    else:
        return None
    return (f"the run folder was taken over from process {owner.get('pid')} of attempt "
            f"{owner['nonce']}, which is still alive: {why}")


def _started(pid: int) -> str | None:
    """Start time of a process, to recognize a reused pid; None if it is dead."""
    started = processes.start_time(pid)
    return None if started is None else str(started)
