"""Checkpoint store: atomic saves, detection of damage, pruning."""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import xxhash
from runs import fill

from trainer.checkpoint.store import Store
from trainer.errors import CheckpointBusy, CheckpointDamaged, StaleAttempt

FILES = {
    "model.safetensors": random.Random(1).randbytes(300),
    "state.json": b'{"step": 3, "rng": ["0123", "4567"], "lr": 0.001}\n'}
LARGE = random.Random(2).randbytes(3 << 20)


def save(store: Store, step: int, *, generation: int = 0, run: str = "r", **files: bytes) -> None:
    files = files or FILES
    size = sum(len(content) for content in files.values())
    with store.stage(step, generation=generation, expected_bytes=size) as stage:
        for name, content in files.items():
            stage.write(name, content)
        fill(stage)
        stage.commit(kind="periodic", run=run)


def steps(store: Store) -> list[int]:
    return [info.step for info in store.checkpoints()]


def names(store: Store) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir() if path.name != ".lock")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "run" / "checkpoints")


def test_what_is_written_is_read_back(store: Store) -> None:
    with store.stage(7, generation=2) as stage:
        stage.write("model.safetensors", b"abc")
        stage.write("optimizer.safetensors", (bytearray(b"de"), memoryview(b"fgh")[1:], b""))
        stage.write("state.json", b"")
        stage.write("array", memoryview(LARGE).cast("d", (3, 1 << 17)))
        committed = stage.commit(kind="best", run="r")

    found, skipped = store.newest_valid()

    assert found == committed
    assert not skipped
    assert (found.step, found.generation, found.kind, found.run) == (7, 2, "best", "r")
    assert {name: (found.path / name).read_bytes() for name in found.manifest["files"]} == {
        "model.safetensors": b"abc", "optimizer.safetensors": b"degh", "state.json": b"",
        "array": LARGE}


def test_without_a_commit_nothing_remains(store: Store) -> None:
    save(store, 1)

    with store.stage(2, generation=0) as stage:
        stage.write("state.json", b"{}")
    with pytest.raises(ZeroDivisionError), store.stage(3, generation=0) as stage:
        stage.write("state.json", (b"x" for x in [1 / 0]))

    assert names(store) == ["step-00000001"]


def test_modes_follow_the_umask(store: Store) -> None:
    before = os.umask(0o027)
    try:
        save(store, 1)
    finally:
        os.umask(before)

    folder = store.folder / "step-00000001"
    assert folder.stat().st_mode & 0o777 == 0o750
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o640}


def test_foreign_names_are_not_touched(store: Store) -> None:
    foreign = ["step-1", "step-00000009.tmp", "step-00000009-mine", "notes.txt", "best"]
    for name in foreign:
        (store.folder / name).mkdir(parents=True)
    (store.folder / "step-00000008").write_text("a file, not a folder")

    for step in range(1, 5):
        save(store, step)
        store.prune()
    store.clean()

    assert steps(store) == [2, 3, 4]
    assert set(foreign) | {"step-00000008"} < set(names(store))


def damages(path: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """All kinds of damage to a file in these tests: (what, act)."""
    content = path.read_bytes()
    generator = random.Random(path.name)

    def put(altered: bytes) -> Callable[[], object]:
        return lambda: path.write_bytes(altered)

    for at in range(len(content)):
        flipped = content[at] ^ generator.randrange(1, 256)
        yield f"byte {at}", put(content[:at] + bytes([flipped]) + content[at + 1 :])
    for size in (len(content) - 1, len(content) // 2, 1, 0):
        yield f"cut to {size}", put(content[:size])
    yield "extended", put(content + b"\n")
    yield "zeros", put(bytes(len(content)))
    yield "removed", path.unlink
    yield "a folder", lambda: (os.unlink(path), os.mkdir(path))  # type: ignore[func-returns-value]


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
def test_damage_to_any_byte_is_found_and_the_previous_checkpoint_is_used(
        store: Store, name: str) -> None:
    save(store, 1)
    save(store, 2)
    path = store.folder / "step-00000002" / name
    content = path.read_bytes()

    for what, damage in damages(path):
        damage()
        found, skipped = store.newest_valid()
        assert found is not None
        assert found.step == 1, what
        assert len(skipped) == 1
        assert f"step-00000002: {name}" in skipped[0], what
        with pytest.raises(CheckpointDamaged, match=f"step-00000002: {name}"):
            store.verify(2)
        path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
        path.write_bytes(content)

    assert store.newest_valid()[0] == store.verify(2)


def test_no_valid_checkpoint_differs_from_none_at_all_and_nothing_is_changed(store: Store) -> None:
    assert store.newest_valid() == (None, [])

    for step in (1, 2):
        save(store, step)
        (store.folder / f"step-{step:08d}" / "state.json").write_bytes(b"")
    before = sorted(store.folder.rglob("*"))
    found, skipped = store.newest_valid()

    assert found is None
    assert [line.split(":")[0] for line in skipped] == ["step-00000002", "step-00000001"]
    assert sorted(store.folder.rglob("*")) == before


def test_a_copy_under_the_name_of_another_step_is_refused(store: Store) -> None:
    save(store, 1)
    shutil.copytree(store.folder / "step-00000001", store.folder / "step-00000009")

    found, skipped = store.newest_valid()

    assert found is not None
    assert found.step == 1
    assert "is that of step 1" in skipped[0]


@pytest.mark.parametrize("replaces", [False, True])
def test_a_save_that_does_not_read_back_as_written_is_withdrawn(
    tmp_path: Path, replaces: bool
) -> None:
    def flip(point: str, step: int) -> None:
        path = tmp_path / "step-00000002" / "state"
        if point == "save-end" and path.exists() and path.read_bytes() == b"new":
            path.write_bytes(b"neW")

    store = Store(tmp_path, mark=flip)
    save(store, 1, state=b"older")
    if replaces:
        save(store, 2, state=b"old")

    with pytest.raises(CheckpointDamaged, match="state doesn't match its checksum"):
        save(store, 2, generation=1, state=b"new")

    assert names(store) == ["step-00000001", "step-00000002"][: 1 + replaces]
    found, _ = store.newest_valid()
    assert found is not None
    assert (found.path / "state").read_bytes() == (b"old" if replaces else b"older")


def test_a_replaced_checkpoint_counts_until_the_new_one_is_verified(store: Store) -> None:
    save(store, 2, state=b"old")
    (store.folder / "step-00000002").rename(store.folder / "step-00000002.old")

    assert (store.verify(2).path / "state").read_bytes() == b"old"

    save(Store(store.folder.with_name("other")), 2, generation=1, state=b"new")
    (store.folder.with_name("other") / "step-00000002").rename(store.folder / "step-00000002")
    assert store.newest_valid()[0] == store.verify(2)
    assert (store.verify(2).path / "state").read_bytes() == b"new"

    (store.folder / "step-00000002" / "state").write_bytes(b"ne")
    found, skipped = store.newest_valid()
    assert found is not None
    assert (found.path / "state").read_bytes() == b"old"
    assert skipped == ["step-00000002: state has 2 bytes instead of 3"]


def test_the_newest_has_the_highest_generation_and_step_of_this_run(tmp_path: Path) -> None:
    store = Store(tmp_path, run="r")
    save(store, 30, generation=0)
    save(store, 10, generation=1)
    save(store, 20, generation=1)
    save(store, 40, generation=5, run="another")

    found, skipped = store.newest_valid()

    assert [(c.generation, c.step) for c in store.checkpoints()] == [
        (0, 30), (1, 10), (1, 20), (5, 40)]
    assert found is not None
    assert found.step == 20
    assert skipped == ["step-00000040: belongs to another run (another)"]


def test_a_rollback_sets_aside_newer_steps_of_older_generations(tmp_path: Path) -> None:
    store = Store(tmp_path, run="r", keep=9)
    for step, generation in ((10, 0), (20, 0), (30, 0), (25, 1)):
        save(store, step, generation=generation)
    save(store, 50, run="another")
    save(store, 40)
    (tmp_path / "step-00000040" / "manifest.json").write_bytes(b"")

    abandoned = store.set_aside(after_step=10, generation=1)

    assert abandoned == [20, 30, 40]
    assert sorted(steps(store)) == [10, 25, 50]
    store.prune()
    assert names(store) == ["step-00000010", "step-00000025", "step-00000050"]


@pytest.mark.parametrize(("keep", "keep_every"), [(1, None), (2, None), (2, 8)])
def test_pruning_keeps_the_newest_the_best_and_every_nth_also_over_a_resume(
        tmp_path: Path, keep: int, keep_every: int | None) -> None:
    saved: list[int] = []
    for step in range(2, 61, 2):
        if step in (2, 40):
            store = Store(tmp_path, keep=keep, keep_every=keep_every)
        save(store, step)
        saved.append(step)
        store.prune(protect={10})
        for_good = {10, *(range(keep_every, 61, keep_every) if keep_every else ())}
        assert set(steps(store)) == for_good & set(saved) | set(saved[-keep:])


def test_nothing_is_pruned_while_the_newest_is_damaged(store: Store) -> None:
    for step in range(1, 6):
        save(store, step)
    (store.folder / "step-00000005" / "state.json").write_bytes(b"")

    with pytest.raises(CheckpointDamaged, match=r"step-00000005: state\.json"):
        Store(store.folder, keep=1).prune()

    assert steps(store) == [1, 2, 3, 4, 5]


def test_a_reader_always_finds_a_valid_checkpoint_during_writes(store: Store) -> None:
    save(store, 1)
    reader, done, found = Store(store.folder), threading.Event(), []

    def read() -> None:
        while not done.is_set():
            found.append(reader.newest_valid())

    thread = threading.Thread(target=read)
    thread.start()
    try:
        for number in itertools.count(2):
            save(store, number // 2, generation=number)
            store.prune()
            if number >= 40 and len(found) > 5:
                break
    finally:
        done.set()
        thread.join()

    assert all(info is not None and not skipped for info, skipped in found)
    generations = [info.manifest["generation"] for info, _ in found if info]
    assert generations == sorted(generations)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_is_one_clear_error_and_older_checkpoints_stay_valid(small_disk: Path) -> None:
    store = Store(small_disk / "checkpoints", keep=2)
    weights = random.Random(4).randbytes(1_500_000)
    for step in (1, 2):
        save(store, step, weights=weights, state=b"{}")

    for _ in range(3):
        with pytest.raises(OSError, match="No space left") as caught:
            save(store, 3, weights=weights, state=b"{}")

    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(store.folder)
    assert "step 3 needs 1,500,002 bytes" in str(caught.value)
    free = os.statvfs(small_disk)
    assert f"{free.f_bavail * free.f_frsize:,} are free" in str(caught.value)
    assert names(store) == ["step-00000001", "step-00000002"]
    assert [store.verify(step).step for step in (1, 2)] == [1, 2]

    shutil.rmtree(store.folder / "step-00000001")
    save(store, 3, weights=weights, state=b"{}")
    assert store.newest_valid()[0] == store.verify(3)


RIVAL = """
import sys
sys.path[:0] = sys.argv[1:3]
from pathlib import Path
from trainer.checkpoint.store import Store
store = Store(Path(sys.argv[3]))
with store.stage(int(sys.argv[4]), generation=0) as stage:
    stage.write("state", b"rival")
    for name in ("model.safetensors", "optimizer.safetensors", "state.json"):
        stage.write(name, b"")
    print("writing", flush=True)
    if sys.stdin.readline() == "commit\\n":
        stage.commit(kind="survivor")
"""


@contextmanager
def rival(folder: Path, step: int) -> Iterator[subprocess.Popen[str]]:
    """Another process in the middle of a save; it continues on the input "commit"."""
    paths = [str(Path(__file__).parents[3]), str(Path(xxhash.__file__).parents[1])]
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", RIVAL, *paths, str(folder), str(step)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def soon(action: Callable[[], object]) -> Iterator[None]:
    """Call something in another thread while this one is probably waiting already."""
    timer = threading.Timer(0.05, action)
    timer.start()
    try:
        yield
    finally:
        timer.join()


def save_now(store: Store, step: int) -> None:
    with store.stage(step, generation=0, wait_s=0) as stage:
        stage.write("state", b"ours")
        fill(stage)
        stage.commit(kind="periodic")


def test_of_two_writers_of_a_step_the_second_is_refused_or_waits(store: Store) -> None:
    with rival(store.folder, 5) as process:
        with pytest.raises(CheckpointBusy, match=f"step-00000005.tmp-{process.pid}-"):
            save_now(store, 5)
        save(store, 6)  # another step is free

        assert process.stdin is not None
        process.stdin.write("commit\n")
        with soon(process.stdin.flush), store.stage(5, generation=0, wait_s=60):
            whole = store.verify(5)

    assert whole.kind == "survivor"
    assert (whole.path / "state").read_bytes() == b"rival"


def test_a_waiting_writer_gets_its_turn_if_the_first_one_dies(store: Store) -> None:
    with (
        rival(store.folder, 5) as process,
        soon(process.kill),
        store.stage(5, generation=0, wait_s=60) as stage):
        stage.write("state", b"ours")
        fill(stage)
        stage.commit(kind="survivor")

    assert (store.verify(5).path / "state").read_bytes() == b"ours"
    assert [name.split("-")[1] for name in names(store)] == ["00000005", "00000005.tmp"]
    store.clean()
    assert names(store) == ["step-00000005"]


def test_cleaning_up_does_not_touch_a_living_writer(store: Store) -> None:
    save(store, 1)
    with rival(store.folder, 5) as process, store.stage(6, generation=0):
        assert store.clean() == []
        store.prune()
        process.communicate("commit\n")

    assert names(store) == ["step-00000001", "step-00000005"]
    with rival(store.folder, 7) as process:
        process.kill()
        process.wait()
        assert [name.split(".tmp")[0] for name in store.clean()] == ["step-00000007"]
    assert names(store) == ["step-00000001", "step-00000005"]


def test_a_step_being_saved_is_not_saved_again_by_another_thread(store: Store) -> None:
    with ThreadPoolExecutor() as pool, store.stage(5, generation=0) as stage:
        with pytest.raises(CheckpointBusy):
            pool.submit(save_now, store, 5).result()
        stage.write("state", b"first")
        fill(stage)
        stage.commit(kind="periodic")

    assert (store.verify(5).path / "state").read_bytes() == b"first"


def test_saving_works_on_a_file_system_without_locks(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.lockf", refuse)
    with rival(store.folder, 5) as process:
        save(store, 5)
        store.prune()
        assert [name.split("-")[2] for name in names(store)[1:]] == [str(process.pid)]
        process.kill()
        process.wait()
        store.clean()

    assert names(store) == ["step-00000005"]


def test_a_guard_that_raises_leaves_everything_unchanged(tmp_path: Path) -> None:
    save(Store(tmp_path), 1)
    save(Store(tmp_path), 2)

    @contextmanager
    def refuse() -> Iterator[None]:
        raise StaleAttempt("a newer attempt owns the folder")
        yield

    store = Store(tmp_path, keep=1, guard=refuse)

    with pytest.raises(StaleAttempt):
        save(store, 3)
    with pytest.raises(StaleAttempt):
        store.prune()
    with pytest.raises(StaleAttempt):
        store.set_aside(after_step=1, generation=9)

    assert names(store) == ["step-00000001", "step-00000002"]
