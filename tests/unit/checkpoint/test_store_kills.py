"""A writer without torch is killed at every system call of a save that may change the disk, under
strace."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import xxhash

import trainer
from trainer.checkpoint.store import Store

OLD = {"model.safetensors": b"old weights" * 9, "optimizer.safetensors": b"old",
       "state.json": b'{"age": "old"}'}
NEW = {"model.safetensors": b"new weights" * 9, "optimizer.safetensors": b"new",
       "state.json": b'{"age": "new"}'}
UNCHANGING = {
    "access", "brk", "close", "fadvise64", "fcntl", "fstat", "getdents64", "getpid", "getrandom",
    "ioctl", "lseek", "lstat", "madvise", "mmap", "mremap", "munmap", "newfstatat", "pread64",
    "read", "readlink", "stat", "statx"}
"""System calls that leave the disk as it is: a kill there is one at the next other call."""

WRITER = """
import os, sys
sys.path += sys.argv[1:3]
from pathlib import Path
from trainer.checkpoint.store import Store
assert not {"torch", "numpy"} & set(sys.modules)
store = Store(Path(sys.argv[3]), keep=1)
files = {"model.safetensors": [b"new ", b"weights" + b"new weights" * 8],
         "optimizer.safetensors": b"new",
         "state.json": b'{"age": "new"}'}
os.access("begin", 0)
if sys.argv[4] == "clean":
    store.clean()
else:
    with store.stage(int(sys.argv[4]), generation=1) as stage:
        for name, content in files.items():
            stage.write(name, content)
        stage.commit(kind="periodic")
    store.prune()
os.access("end", 0)
"""


class Tracer:
    """Runs the writer under strace: the same program and bytes give the same system calls."""

    def __init__(self, strace: str, folder: Path) -> None:
        # A copy with its own byte code: changes in the checkout then change no count.
        self._path = folder
        shutil.copytree(
            Path(trainer.__file__).parent, folder / "trainer",
            ignore=lambda at, names: [
                n for n in names if n == "__pycache__" or not (
                    n.endswith(".py") or Path(at, n).is_dir())])
        self._strace = strace
        subprocess.run(self._writer(folder / "warm-up", "1"), check=True)

    def run(self, folder: Path, what: str, *options: str) -> int:
        """Exit status of saving step `what`, or of cleaning, in a folder."""
        command = [self._strace, "-f", *options, *self._writer(folder, what)]
        return subprocess.run(command).returncode

    def _writer(self, folder: Path, what: str) -> list[str]:
        # Isolated and without site: a quick start with few system calls before the save.
        site_packages = str(Path(xxhash.__file__).parents[1])
        return [sys.executable, "-I", "-S", "-c", WRITER, str(self._path), site_packages,
                str(folder), what]


@pytest.fixture(scope="module")
def tracer(tmp_path_factory: pytest.TempPathFactory) -> Tracer:
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed: it is what kills the writer at each system call")
    if subprocess.run([strace, "-o", os.devnull, "true"], capture_output=True).returncode:
        pytest.skip("strace may not trace here (ptrace is not permitted)")
    return Tracer(strace, tmp_path_factory.mktemp("program"))


def save(store: Store, step: int, files: dict[str, bytes], generation: int = 0) -> None:
    with store.stage(step, generation=generation) as stage:
        for name, content in files.items():
            stage.write(name, content)
        stage.commit(kind="periodic")


def newest(folder: Path) -> dict[str, bytes]:
    info, skipped = Store(folder).newest_valid()
    assert not skipped
    assert info is not None
    return {name: (info.path / name).read_bytes() for name in info.manifest["files"]}


def calls_of(log: Path) -> list[tuple[str, int]]:
    """(name, ordinal among the calls of that name) of each call between begin and end that may
    change the disk."""
    counts: dict[str, int] = {}
    calls, inside = [], False
    for line in log.read_text().splitlines():
        match = re.match(r"(?:\d+ +)?(\w+)\(", line)
        if match is None:
            continue
        counts[match[1]] = counts.get(match[1], 0) + 1
        if 'access("end"' in line:
            break
        if inside and match[1] not in UNCHANGING:
            calls.append((match[1], counts[match[1]]))
        inside = inside or 'access("begin"' in line
    return calls


def kill_everywhere(tracer: Tracer, before: Path, what: str) -> Iterator[tuple[str, Path]]:
    """Kill the writer at each call, each time on a copy of `before`: yields (call, folder)."""
    log, folder = before.with_name("log"), before.with_name("straight")
    shutil.copytree(before, folder)
    assert tracer.run(folder, what, "-o", str(log)) == 0
    calls = calls_of(log)
    assert len(calls) > 4

    def killed(number: int) -> tuple[str, Path]:
        name, count = calls[number]
        folder = before.with_name(f"killed-{number:03d}")
        shutil.copytree(before, folder)
        inject = f"inject={name}:signal=SIGKILL:when={count}"
        status = tracer.run(folder, what, "-qq", "-o", os.devnull, "-e", inject)
        assert status == -signal.SIGKILL, (name, count)
        return f"{number}: {name} {count}", folder

    with ThreadPoolExecutor(max_workers=2) as pool:
        yield from pool.map(killed, range(len(calls)))


def assert_old_then_new(killed: Iterator[tuple[str, Path]], step: int) -> None:
    seen = []
    for call, folder in killed:
        found = newest(folder)
        assert found in (OLD, NEW), call
        seen.append(found == NEW)
        # The next attempt finds the same, leaves no other files, and can save the step again.
        store = Store(folder, keep=1)
        store.clean()
        assert newest(folder) == found, call
        assert all("." not in path.stem for path in folder.glob("step-*")), call
        save(store, step, NEW, generation=2)
        store.prune()
        assert [path.name for path in folder.glob("step-*")] == [f"step-{step:08d}"], call
        assert newest(folder) == NEW, call
    assert seen == sorted(seen), "an older checkpoint came back after the new one was there"
    assert True in seen
    assert False in seen


@pytest.mark.parametrize("older", [1, 2])
def test_a_save_killed_at_any_system_call_leaves_the_old_or_the_new_checkpoint(
        tmp_path: Path, tracer: Tracer, older: int) -> None:
    before = tmp_path / "before"
    save(Store(before), older, OLD)

    killed = kill_everywhere(tracer, before, "2")

    assert_old_then_new(killed, step=2)


@pytest.mark.parametrize("new_is", ["missing", "damaged"])
def test_cleaning_up_after_a_killed_save_can_be_killed_as_well(
        tmp_path: Path, tracer: Tracer, new_is: str) -> None:
    before = tmp_path / "before"
    store = Store(before)
    save(store, 2, OLD)
    (before / "step-00000002").rename(before / "step-00000002.old")
    if new_is != "missing":
        save(Store(tmp_path / "other"), 2, NEW, generation=1)
        (tmp_path / "other" / "step-00000002").rename(before / "step-00000002")
    if new_is == "damaged":
        (before / "step-00000002" / "state.json").write_bytes(b"")

    for call, folder in kill_everywhere(tracer, before, "clean"):
        info, _ = Store(folder).newest_valid()
        assert info is not None, call
        found = (info.path / "state.json").read_bytes()
        assert found == OLD["state.json"], call


def test_everything_is_durable_before_the_rename_that_publishes_it(
        tmp_path: Path, tracer: Tracer) -> None:
    log, folder = tmp_path / "log", tmp_path / "run" / "checkpoints"
    folder.parent.mkdir()

    assert tracer.run(folder, "2", "-y", "-o", str(log)) == 0

    lines = [line.partition(" ")[2].strip() for line in log.read_text().splitlines()]
    lines = lines[next(i for i, line in enumerate(lines) if 'access("begin"' in line) :]
    rename = next(i for i, line in enumerate(lines) if line.startswith("rename("))
    staged = re.search(r'rename\("([^"]*)"', lines[rename])
    assert staged is not None

    def where(call: str, path: str) -> list[int]:
        pattern = re.compile(rf"{call}\(\d+<{re.escape(path)}>")
        return [i for i, line in enumerate(lines) if pattern.match(line)]

    manifest = f"{staged[1]}/manifest.json"
    for name in (*NEW, "manifest.json"):
        written, synced = (where(call, f"{staged[1]}/{name}") for call in ("write", "fsync"))
        assert written
        assert written[-1] < synced[-1] < rename
        assert name == "manifest.json" or synced[-1] < where("write", manifest)[0]
    assert where("fsync", manifest)[-1] < where("fsync", staged[1])[-1] < rename
    assert rename < where("fsync", str(folder))[0]
    # The folder of checkpoints was new: its name is made durable too.
    assert where("fsync", str(folder.parent))
