"""A checkpoint in the mirror is whole or absent, whatever happens to its writer."""

from __future__ import annotations

import pytest

pytest.importorskip("obstore", reason="the extra trainer[remote] is not installed")

from mirrors import FaultyStore, Machine, newest


def test_an_empty_disk_gets_the_newest_checkpoint(tmp_path):
    store = FaultyStore()
    machine = Machine(tmp_path / "first", store)
    machine.take(nonce="a")
    for step in (1, 2, 3):
        machine.upload(step)

    assert newest(store, tmp_path / "second") == 3
    assert [key[-12:] for key in store.keys("checkpoints")] == ["0000002.json", "0000003.json"]
