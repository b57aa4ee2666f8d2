"""A checkpoint in the mirror is whole or absent, whatever happens to its writer."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("obstore", reason="the extra trainer[remote] is not installed")

from mirrors import RUN, Cut, FaultyStore, Machine, newest

from trainer.checkpoint import mirror_uploads
from trainer.checkpoint.mirror import Mirror, MirrorEntry, MirrorSource, Owner
from trainer.errors import CheckpointDamaged, MirrorTaken
from trainer.storage import layout
from trainer.storage.object_store import AccessDenied, ObjectStore, StoreError
from trainer.telemetry.tensorboard import TensorBoard


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore()


@pytest.fixture
def machine(tmp_path, store) -> Machine:
    made = Machine(tmp_path / "first", store)
    made.take(nonce="a")
    return made


def steps(store) -> list[int]:
    return [entry.step for entry in Mirror(store).entries()]


def data_of(store, step: int) -> str:
    return next(key for key in store.keys("data") if f"{step:08d}" in key and layout.MODEL in key)


# --- whole or absent

def test_an_empty_disk_gets_the_newest_checkpoint_and_its_records(tmp_path, store, machine):
    lines = b"".join(b'{"step": %d}\n' % n for n in range(400_000))
    (machine.path / layout.METRICS).write_bytes(lines)
    offset = (3 << 20) + 500_000
    machine.upload(1, offset=3 << 20)
    before = len(store.keys("records"))
    machine.upload(2, offset=offset)
    new = len(store.keys("records")) - before
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / layout.EVENTS).write_bytes(b'{"event": "of this disk"}\n')

    assert newest(store, tmp_path / "second") == 2
    Mirror(store).fetch_records(MirrorEntry(1, 2), tmp_path / "second")
    assert (tmp_path / "second" / layout.METRICS).read_bytes() == lines[:offset]
    events = (tmp_path / "second" / layout.EVENTS).read_text().splitlines()
    assert [json.loads(line)["event"] for line in events] == ["mirror", "of this disk"]
    assert new == 2, "full parts are uploaded once"


@pytest.mark.parametrize("damage", ["data", "missing", "manifest"])
def test_if_the_newest_is_damaged_the_one_before_is_taken(tmp_path, store, machine, damage):
    for step in (1, 2):
        machine.upload(step)
    if damage == "missing":
        ObjectStore.delete(store, [data_of(store, 2)])
    else:
        key = data_of(store, 2) if damage == "data" else MirrorEntry(1, 2).key
        content = bytearray(ObjectStore.read(store, key)[0])
        content[len(content) // 2] ^= 1
        ObjectStore.put(store, key, bytes(content))

    assert newest(store, tmp_path / "second") == 1


def test_a_local_checkpoint_that_is_damaged_is_not_uploaded(store, machine):
    machine.upload(1)
    machine.save(2)
    path = machine.local.find(2).path / layout.MODEL
    path.write_bytes(path.read_bytes()[::-1])
    machine.uploads.offer(2, always=True)

    with pytest.raises(CheckpointDamaged, match="doesn't match its checksum"):
        machine.work()
    assert steps(store) == [1]


# --- the fence

def test_a_stale_writer_is_refused_and_deletes_nothing(tmp_path, store, machine):
    machine.upload(1)
    machine.upload(2)
    other = Machine(tmp_path / "second", store.beside())
    other.take(nonce="b")
    other.upload(3)
    kept, made = store.keys(), len(store.requests)

    with pytest.raises(MirrorTaken, match=r"another start .*attempt 0 on second, generation 2"):
        machine.upload(4)
    with pytest.raises(MirrorTaken):
        machine.uploads.writer.prune()

    assert "delete" not in {operation for operation, _ in store.requests[made:]}
    assert set(kept) <= set(store.keys())
    assert steps(store)[-1] == 3


def test_a_commit_that_was_on_its_way_when_another_start_took_over_is_not_the_newest(
        tmp_path, store, machine):
    machine.upload(1)
    other = Machine(tmp_path / "second", store.beside())

    def take_over(operation, key):
        if operation == "put_new" and "step-00000009" in key:
            store.before = lambda operation, key: None
            other.take(nonce="b")
            other.upload(2)
    store.before = take_over
    with pytest.raises(MirrorTaken):
        machine.upload(9)

    assert steps(store) == [1, 9, 2]
    assert newest(store, tmp_path / "third") == 2


@pytest.mark.parametrize("first", [True, False])
def test_of_two_starts_at_once_one_is_refused(tmp_path, store, first):
    if not first:
        Machine(tmp_path / "before", store).take(nonce="a")
    slow, quick = (Machine(tmp_path / name, at) for name, at in (
        ("slow", store), ("quick", store.beside())))

    def overtake(operation, key):
        if operation in ("put_new", "replace"):
            store.before = lambda operation, key: None
            quick.take(nonce="c", generation=2)
    store.before = overtake

    with pytest.raises(MirrorTaken, match="on quick, generation 2"):
        slow.take(nonce="b", generation=2)
    assert Mirror(store).owner()[0].nonce == "c"


def test_an_answer_that_is_lost_after_a_conditional_write_is_not_taken_for_another_writer(
        tmp_path, store):
    class Forgetful(FaultyStore):
        def put_new(self, key, data):  # obstore repeats such a request
            if ObjectStore.read(self, key) is None:
                ObjectStore.put_new(self, key, data)
            super().put_new(key, data)

    machine = Machine(tmp_path / "first", Forgetful())
    machine.take(nonce="a")
    machine.upload(1)

    assert steps(machine.store) == [1]


def test_an_answer_that_is_lost_in_a_rollback_is_not_taken_for_another_start(store, machine):
    fence, replace = machine.uploads.fence, store.replace

    def forget(key, data, version):
        replace(key, data, version)
        raise Cut("timed out")

    store.replace = forget
    with pytest.raises(Cut):
        fence.raise_to(2)
    store.replace = replace
    fence.raise_to(2)

    assert fence.owner.generation == Mirror(store).owner()[0].generation == 2


def test_a_start_that_died_after_the_download_gets_the_records_next_time(tmp_path, store, machine):
    (machine.path / layout.METRICS).write_bytes(b'{"step": 1}\n')
    machine.upload(1, offset=12)
    source = MirrorSource(Mirror(store), owner=None, entries=Mirror(store).entries(), products=[],
                          log=machine.log, claim=lambda: None)
    (tmp_path / "second").mkdir()

    source.restore_records(source.entries[0], tmp_path / "second")

    assert (tmp_path / "second" / layout.METRICS).read_bytes() == b'{"step": 1}\n'


def test_a_rollback_raises_the_generation_of_the_fence(tmp_path, store, machine):
    machine.upload(20)
    machine.upload(10, generation=2)

    assert Mirror(store).owner()[0] == Owner(run=RUN, generation=2, nonce="a", host="first")
    assert newest(store, tmp_path / "second") == 10


# --- what is kept

def test_nothing_is_pruned_before_a_newer_checkpoint_is_verified(tmp_path, store, machine):
    for step in (1, 2):
        machine.upload(step)
    kept = store.keys("data")

    def damage(operation, key):
        if operation == "download":
            ObjectStore.put(store, key, b"?" * 80)
    store.before = damage
    with pytest.raises(StoreError, match="read back, step-00000003 in the mirror"):
        machine.upload(3)

    assert set(kept) <= set(store.keys("data"))
    assert steps(store) == [1, 2], "the damaged one is not left there"
    store.before = lambda operation, key: None
    machine.uploads.offer(3, always=True)
    machine.work()
    assert steps(store) == [2, 3]
    assert {key.split("/")[1][:13] for key in store.keys("data")} == {
        "step-00000002", "step-00000003"}


def test_the_best_weights_are_kept_and_uploaded_first(store, machine):
    machine.save(1)
    machine.save(2, best=1)
    machine.uploads.offer(1, always=True)
    machine.uploads.offer(2, always=False)  # in place of 1
    machine.work()
    assert steps(store) == [1, 2]
    for step in (3, 4, 5):
        machine.upload(step, best=1)

    assert steps(store) == [1, 4, 5]


def test_records_that_no_checkpoint_names_are_deleted(store, machine):
    for step in range(1, 6):
        (machine.path / layout.CONFIG).write_text(f"steps = {step}")
        machine.upload(step)

    assert sum(layout.CONFIG in key for key in store.keys("records")) == 2


def test_without_the_permission_to_delete_all_is_kept_and_said_once(store, machine):
    def refuse(operation, key):
        if operation == "delete":
            raise AccessDenied("403")
    store.before = refuse
    for step in range(1, 6):
        machine.upload(step)

    assert steps(store) == [1, 2, 3, 4, 5]
    assert machine.console.getvalue().count("don't permit to delete") == 1


def test_a_start_deletes_what_a_dead_writer_has_left(tmp_path, store, machine):
    machine.upload(1)
    kept = store.keys()
    ObjectStore.put(store, "data/step-00000002-0123abcd/model.safetensors", b"half")
    other = Machine(tmp_path / "second", store.beside())
    other.take(nonce="b")
    assert other.uploads.writer.manifests

    assert store.keys() == kept


def test_the_interval_of_uploads(store, tmp_path):
    machine = Machine(tmp_path / "run", store, keep=9, every=10)
    machine.take(nonce="a")
    for step, always in ((4, False), (8, False), (12, False), (16, True), (19, False), (24, False)):
        machine.save(step)
        machine.uploads.offer(step, always=always)
        if machine.uploads.in_use:
            machine.work()

    assert steps(store) == [12, 16, 24]


def test_tensorboard_shows_speed_and_delay_of_the_last_upload(tmp_path, machine):
    line = {"step": 1, "loss": 1.0, "lr": 0.1, "grad_norm": 1.0, "samples": 8}
    board = TensorBoard(tmp_path / "board", every=1, first=0)
    board.show_figures(machine.uploads.figures)
    board.step(line, {"step": 1.0, "data": 0.0, "compute": 1.0})
    machine.uploads._clock = iter(range(99)).__next__
    machine.upload(1)
    board.step({**line, "step": 2}, {"step": 1.0, "data": 0.0, "compute": 1.0})
    board.close()

    content = b"".join(path.read_bytes() for path in (tmp_path / "board").rglob("events*"))
    assert [content.count(tag) for tag in (b"mirror/mb_per_s", b"mirror/lag_s")] == [1, 1]


# --- the thread

def test_a_network_that_fails_is_told_once_and_the_newest_save_is_uploaded_then(
        store, machine, monkeypatch):
    monkeypatch.setattr(mirror_uploads, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(mirror_uploads, "LONGEST_PAUSE_S", 0.01)

    def cut(operation, key):
        raise Cut("no route to host")
    store.before = cut
    machine.uploads.start()
    for step in (1, 2):
        machine.save(step)
        machine.uploads.offer(step, always=True)
    while len(machine.events("mirror-failed")) < 4:
        pass
    machine.clock_s = 42.0
    assert machine.uploads.failure == "no route to host"
    assert machine.uploads.behind() == "mirror 42 s behind"
    store.before = lambda operation, key: None

    assert machine.uploads.drain(lambda: 1.0)
    assert steps(store) == [2]
    assert (machine.uploads.failure, machine.uploads.behind()) == (None, "")
    lines = machine.console.getvalue().splitlines()
    assert [line for line in lines if "could not be uploaded" in line] == lines[:1]
    machine.uploads.close()


def test_after_an_upload_the_thread_rests_and_the_newest_save_is_uploaded_then(
        store, machine, monkeypatch):
    monkeypatch.setattr(mirror_uploads, "SHARE", 1e-9)
    machine.uploads.start()
    for step in (1, 2, 3):
        machine.save(step)
        machine.uploads.offer(step, always=step == 2)
        while steps(store) != [1] or not machine.uploads.in_use <= {2, 3}:
            pass
    assert (machine.uploads.in_use, machine.uploads.behind()) == ({3}, "")

    assert machine.uploads.drain(lambda: 1.0)
    assert steps(store) == [1, 3]
    machine.uploads.close()


@pytest.mark.parametrize("left_s", [30.0, 3.0])
def test_at_a_stop_it_is_said_whether_the_save_fits_into_the_time(store, machine, left_s):
    machine.save(1, size=1000)
    machine.uploads.bytes_per_s = 1000.0
    machine.uploads.offer(1, always=True)
    ends = iter([left_s, left_s])

    assert not machine.uploads.drain(lambda: next(ends, 0.0))  # no thread

    said = machine.console.getvalue()
    assert f"about 8 s at 0.001 MB/s, {left_s:.0f} s are left" in said
    assert said.startswith("warning: " * (left_s < 8) + "uploading step 1")
    assert "step 1 is not in the mirror" in said


def test_a_stop_takes_the_place_of_an_older_upload_that_would_not_leave_it_the_time(
        store, machine, tmp_path):
    for step in (1, 2):
        machine.save(step, size=2 << 20)  # three parts
    machine.uploads.bytes_per_s = float(17 << 20)

    uploaded = []
    real = ObjectStore.upload

    def upload(self, key, path, on_chunk):
        def chunk(data):
            on_chunk(data)
            if "step-00000001" in key and not uploaded:
                uploaded.append(key)
                machine.uploads.offer(2, always=True)
                with machine.uploads._changed:
                    machine.uploads._forecast(machine.uploads._waiting, 1.5)
        real(self, key, path, chunk)
    store.upload = upload.__get__(store)
    machine.uploads.offer(1, always=True)

    with pytest.raises(mirror_uploads._Abandoned):
        machine.work()
    machine.uploads._done()
    machine.work()
    assert steps(store) == [2]
