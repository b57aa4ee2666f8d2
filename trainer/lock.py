"""Who may write: locks that die with their process, and the attempt that owns a run folder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import struct
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trainer.diagnosis import near
from trainer.errors import ConfigError, StaleAttempt

_NOT_SUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
_POLL_S = 0.01


class ByteLocks:
    """Single bytes of one file as locks between processes and threads.

    POSIX record locks (`fcntl.lockf`): the kernel frees them when their process dies, whatever it
    dies of; forked children (loader workers) don't inherit them; they work between hosts where the
    file system does. The price: a process loses all its locks on a file when it closes *any*
    descriptor of it, so an instance keeps one, and there must be one instance per file in a
    process. Within the process the instance itself excludes: it never gives a held byte twice.

    Attributes:
        supported: False once the file system turned out to have no such locks; every
            `try_lock` then succeeds between processes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.supported = True
        self._fd: int | None = None
        self._held: set[int] = set()
        self._mutex = threading.Lock()

    def fd(self) -> int:
        """The open descriptor of the file, which is made if need be."""
        if self._fd is None:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        return self._fd

    def try_lock(self, byte: int) -> bool:
        """Take the lock if nobody has it; never waits."""
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
        """Take the lock, waiting up to `wait_s` seconds for another holder; False if that is over.

        Polls, since a blocking lock can't be given a time limit without a signal.
        """
        deadline = time.monotonic() + wait_s
        while not self.try_lock(byte):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def unlock(self, byte: int) -> None:
        """Give the lock back."""
        with self._mutex:
            self._held.remove(byte)
            if self.supported and self._fd is not None:
                fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, byte)

    def close(self) -> None:
        """Give every lock back."""
        with self._mutex:
            self._held.clear()
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None


def let_go(path: Path) -> None:
    """Give back all that this process holds of a lock file, by whatever instance: closing any
    descriptor does. What it could never open it doesn't hold."""
    with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))


class RunLock:
    """The lock file of a run folder: it belongs to one attempt, named by its nonce.

    Rank 0 of an attempt *takes* it; every process of the attempt *checks* that the nonce in the
    file is still its own before it changes the folder. So an orphan of an older attempt, which
    may live on for a while after its launcher was killed, can't write any more once a newer
    attempt has begun.

    Byte 0 of the file is held for moments, by whoever writes the nonce or changes the folder, so
    that no change falls between check and act. Another byte, derived from the nonce, is held for
    life by the process that took the lock: that is how others see that it lives.

    Args:
        path: the lock file; made if need be.
        nonce: names the attempt; never used twice.
        revoked: whether the attempt is known to be stale, whatever this folder says.
        moment_s: who holds byte 0 for longer is stopped, or hangs in its file system; to wait
            on would hang the attempt that is there to replace it.
    """

    def __init__(
        self, path: Path, nonce: str, *, revoked: Callable[[], bool] = lambda: False,
        moment_s: float = 5.0,
    ) -> None:  # fmt: skip
        self.path = path
        self.nonce = nonce
        self.holds = False
        self._revoked = revoked
        self._moment_s = moment_s
        self._locks = ByteLocks(path)

    def take(
        self, *, launcher_pid: int | None = None, launch_id: str | None = None, wait_s: float = 5.0
    ) -> str | None:
        """Make this attempt the owner. The process that does it `holds` the lock for life; where
        another one of the attempt has done so already, in a folder that they share, that is it.

        The owner so far gives way if its process is dead; if both were started by the same
        launcher (the attempt before this one); or if its launcher is dead, which makes it an
        orphan. Otherwise it is another run, and is left alone.

        Args:
            launcher_pid: the process whose death makes this one an orphan; None without a
                launcher, where nothing but this process' own death ends the ownership.
            launch_id: equal in all attempts of one launch, on all hosts; None if there is none.
            wait_s: how long an owner that doesn't give way may still take to leave.

        Returns:
            A sentence that says from which living process it was taken over, or None.

        Raises:
            ConfigError: the folder is in use by another run that lives.
        """
        me = {"nonce": self.nonce, "pid": os.getpid(), "place": _place(), "launch_id": launch_id,
              "launcher_pid": launcher_pid,
              "launcher_start": None if launcher_pid is None else _start_time(launcher_pid)}
        deadline = time.monotonic() + wait_s
        while True:
            with self._moment():
                owner = self._read()
                if owner is not None and owner["nonce"] == self.nonce:
                    return None
                lives = owner is not None and self._lives(owner["nonce"])
                why = _gives_way(owner, me) if owner is not None and lives else None
                if not lives or why:
                    self._locks.try_lock(_byte(self.nonce))
                    self.holds = True
                    # One write, padded, so that it needs no truncation and is never seen torn.
                    os.pwrite(self._locks.fd(), json.dumps(me).encode().ljust(1024), 0)
                    return why
            if time.monotonic() >= deadline:
                assert owner is not None
                raise ConfigError(
                    f"--run {near(self.path.parent)}: another run is at work in this folder "
                    f"(process {owner.get('pid')} on {str(owner.get('place')).split()[0]}). Stop "
                    "it or choose another --run; if its host is gone for good, delete "
                    f"{near(self.path)}.")
            time.sleep(_POLL_S)

    def check(self) -> None:
        """Make sure that this attempt still owns the folder.

        Raises:
            StaleAttempt: a newer attempt does, or somebody removed the lock file.
        """
        with self.committing():
            pass

    @contextmanager
    def committing(self) -> Iterator[None]:
        """Around a change of the folder: checks, and keeps a newer attempt waiting for its end.

        Raises:
            StaleAttempt: see `check`.
        """
        with self._moment():
            self.look()
            yield

    def look(self) -> None:
        """As `check`, without waiting for anybody: 10 µs.

        Raises:
            StaleAttempt: see `check`.
        """
        if self._revoked():
            raise StaleAttempt(f"a newer attempt than this one ({self.nonce}) has begun on other "
                               "nodes; it leaves without writing.")
        owner = self._read()
        if owner is None and not self.path.exists():
            raise StaleAttempt(
                f"{near(self.path)} is gone: somebody has removed or renamed the run folder, or "
                "this file in it. This attempt leaves without writing; where the folder isn't put "
                "back, the next one begins anew.")
        if owner is None or owner["nonce"] != self.nonce:
            raise StaleAttempt(
                f"{near(self.path)}: this attempt ({self.nonce}) doesn't own the run folder any "
                f"more, {'nobody' if owner is None else owner['nonce']} does; it leaves "
                "without writing.")

    def close(self) -> None:
        """Give the lock up; the nonce stays in the file."""
        self._locks.close()

    @contextmanager
    def _moment(self) -> Iterator[None]:
        guarded = self._locks.lock(0, self._moment_s)
        try:
            yield
        finally:
            if guarded:
                self._locks.unlock(0)

    def _read(self) -> dict[str, Any] | None:
        try:
            if not os.path.samestat(os.fstat(self._locks.fd()), os.stat(self.path)):
                return None
            record = json.loads(os.pread(self._locks.fd(), 4096, 0))
        except (FileNotFoundError, ValueError):
            return None
        return record if isinstance(record, dict) and "nonce" in record else None

    def _lives(self, nonce: str) -> bool:
        if nonce == self.nonce:
            return False
        if not self._locks.try_lock(_byte(nonce)):
            return True
        self._locks.unlock(_byte(nonce))
        return False


def is_at_work(path: Path) -> bool:
    """Whether the owner of a lock file lives, as one sees who takes no lock (Linux; else False).

    Not for a process that has a `RunLock` of the same file: it would lose its locks.
    """
    if sys.platform != "linux":
        return False
    try:
        with path.open("rb") as file:
            nonce = json.loads(file.read(4096))["nonce"]
            asked = struct.pack("hhlli0l", fcntl.F_WRLCK, os.SEEK_SET, _byte(nonce), 1, 0)
            told = fcntl.fcntl(file, fcntl.F_GETLK, asked)
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(struct.unpack("hhlli0l", told)[0] != fcntl.F_UNLCK)


def _byte(nonce: str) -> int:
    return 1 + zlib.crc32(nonce.encode())


def _gives_way(owner: dict[str, Any], me: dict[str, Any]) -> str | None:
    """Why a living owner loses the folder to `me`, or None if it doesn't."""
    who = f"process {owner.get('pid')} of attempt {owner['nonce']}, which still lives"
    if owner.get("launch_id") is not None and owner["launch_id"] == me["launch_id"]:
        return f"the run folder was taken over from {who}: an earlier attempt of this launch"
    if owner.get("place") != me["place"] or owner.get("launcher_pid") is None:
        return None
    launcher = (owner["launcher_pid"], owner.get("launcher_start"))
    if launcher == (me["launcher_pid"], me["launcher_start"]):
        return f"the run folder was taken over from {who}: an earlier attempt of this launcher"
    start = _start_time(owner["launcher_pid"])
    if start is None or start != owner.get("launcher_start"):
        return f"the run folder was taken over from {who}: an orphan, its launcher is gone"
    return None


def _place() -> str:
    """Host name, boot and pid namespace: where two processes can see each other's pids."""
    parts = [os.uname().nodename]
    with suppress(OSError):  # Linux only; elsewhere the name has to do
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _start_time(pid: int) -> str | None:
    """What tells a process from a later one with its pid; None if it is dead or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        if os.path.exists("/proc/self/stat"):
            return None
    else:
        return None if fields[0] in "ZX" else fields[19]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return "unknown"
