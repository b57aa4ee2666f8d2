"""Stack dumps: what each thread of a rank and each of its loader workers was doing."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import tempfile
import threading
import time
from pathlib import Path

from trainer.storage import processes
from trainer.storage.files import make_subfolder, open_regular
from trainer.storage.layout import STACKS

WORKER = "loader "  # prefix of a loader worker's process name
DUMPS = "trainer-stacks"  # memory file to which a worker writes its stacks on SIGUSR2
MAX_FILES, MAX_BYTES = 256, 1 << 20
"""Limits of the folder, without the current attempt, and of a file: a run that hangs in each of
many attempts must not fill the disk."""
WORKER_S = 1.0  # seconds that a worker may take to write them


def prepare_worker(number: int) -> None:
    """In a loader worker: set the process name, and write all stacks on SIGUSR2."""
    faulthandler.register(signal.SIGUSR2, file=os.memfd_create(DUMPS), all_threads=True)
    processes.set_name(f"{WORKER}{number}")


def own_threads() -> str:
    """Stacks of this process's threads, with their names."""
    with tempfile.TemporaryFile() as file:  # faulthandler needs a descriptor
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read().decode(errors="replace")
    for thread in threading.enumerate():
        text = re.sub(rf"hread 0x0*{thread.ident:x} ", f"hread {thread.name} ", text)
    return text


def worker_stacks() -> tuple[str, list[str]]:
    """(stacks of this process's loader workers, reasons why they block it)."""
    from trainer.distributed.torch_private import loader_fetch_file  # imports torch

    dumps, reasons = [], []
    for pid in processes.children(os.getpid()):
        if not (name := processes.name(pid)).startswith(WORKER):
            continue
        if not processes.is_alive(pid):  # with code 0, which torch notices after 5 s
            reasons.append(f"its {name} (pid {pid}) has ended (os._exit, or a library's)")
            continue
        text = "" if processes.is_stopped(pid) else _ask(pid)
        if processes.is_stopped(pid):
            reasons.append(f"its {name} (pid {pid}) is stopped")
        elif loader_fetch_file() in text:  # inside the data set, not waiting for work
            reasons.append(f"its {name} (pid {pid}) is still reading")
        dumps.append(f"{name} (pid {pid}):\n{text or processes.describe_process(pid)}")
    return "\n".join(dumps), reasons


def write(folder: Path, *, attempt: int, rank: int, text: str) -> None:
    """Append to the file of the rank, up to `MAX_BYTES`; remove the oldest of earlier attempts."""
    path = folder / STACKS / f"attempt-{attempt}-rank-{rank}.txt"
    make_subfolder(path.parent)
    descriptor = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with open(descriptor, "ab") as file:
        room = max(0, MAX_BYTES - os.fstat(descriptor).st_size)
        file.write(text.encode(errors="backslashreplace")[:room])
    with contextlib.suppress(FileNotFoundError):  # other ranks remove them, too
        earlier = [other for other in path.parent.glob("attempt-*.txt")
                   if not other.name.startswith(f"attempt-{attempt}-")]
        earlier.sort(key=lambda other: other.lstat().st_mtime)
        for other in earlier[:-MAX_FILES]:
            other.unlink(missing_ok=True)


def _ask(pid: int) -> str:
    """Stacks of a worker; empty if it does not answer."""
    if (before := processes.read_memory(pid, DUMPS)) is None:
        return ""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR2)
    deadline_s, text = time.monotonic() + WORKER_S, before
    while time.monotonic() < deadline_s:
        time.sleep(0.02)
        now = processes.read_memory(pid, DUMPS) or b""
        if len(now) > len(before) and now == text:
            break
        text = now
    return text[len(before):].decode(errors="replace")
