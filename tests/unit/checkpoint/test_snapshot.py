"""Snapshots: exact copies in reused memory."""

from __future__ import annotations

import torch

from trainer import rng
from trainer.checkpoint.snapshot import Snapshot


def test_a_copy_stays_what_it_was_when_the_tensors_change() -> None:
    live = {"a": torch.arange(5.0), "b": torch.arange(9, dtype=torch.float64)}
    expected = {name: tensor.clone() for name, tensor in live.items()}

    taken = Snapshot().take({"file": live})
    for tensor in live.values():
        tensor.add_(1)

    assert all(torch.equal(taken["file"][name], expected[name]) for name in live)


def test_any_memory_layout_is_copied_right() -> None:
    live = {
        "channels last": torch.randn(8, 64, 8, 8).contiguous(memory_format=torch.channels_last),
        "transposed": torch.randn(2, 9).t(),
        "every other": torch.randn(20)[::2],
        "expanded": torch.randn(1).expand(9),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 3),
    }

    taken = Snapshot().take({"file": live})["file"]

    assert all(torch.equal(taken[name], live[name]) for name in live)
    assert taken["channels last"].stride() == live["channels last"].stride()


def test_memory_is_reused_while_the_shape_is_the_same() -> None:
    snapshot = Snapshot()
    first = snapshot.take({"file": {"a": torch.zeros(7)}})["file"]["a"]

    second = snapshot.take({"file": {"a": torch.ones(7)}})["file"]["a"]
    other = snapshot.take({"file": {"a": torch.ones(8)}})["file"]["a"]

    assert second.data_ptr() == first.data_ptr()
    assert other.shape == (8,)


def test_the_state_of_a_key_is_computed_without_touching_a_generator() -> None:
    rng.seed_all(1, 2, 3)
    there = rng.snapshot()

    state = rng.keyed(4, 5, 6)

    assert rng.snapshot() == there
    rng.seed_all(4, 5, 6)
    assert rng.digest(rng.snapshot()) == rng.digest(state)
