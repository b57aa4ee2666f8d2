"""Snapshots: exact copies in reused memory, made at once or during the computation."""

from __future__ import annotations

import torch

from trainer import rng
from trainer.checkpoint.snapshot import SMALL, Snapshot

LARGE = SMALL // 4 + 1


def test_only_large_constant_tensors_are_left_for_finish() -> None:
    live = {"small": torch.ones(5), "large": torch.ones(LARGE), "moving": torch.ones(LARGE)}
    snapshot = Snapshot()
    snapshot.take({"file": live})
    later = {live["small"].data_ptr(), live["large"].data_ptr()}

    for tensor in live.values():
        tensor.add_(1)
    taken = snapshot.take({"file": live}, later=later)["file"]
    before = {name: taken[name][0].item() for name in live}
    unchanged = snapshot.finish()

    assert before == {"small": 2, "large": 1, "moving": 2}
    assert unchanged
    assert all(torch.equal(taken[name], live[name]) for name in live)


def test_any_memory_layout_is_copied_right() -> None:
    square = torch.randn(2 * LARGE).reshape(2, -1)
    live = {
        "channels last": torch.randn(8, 64, 8, 8).contiguous(memory_format=torch.channels_last),
        "transposed": square.t(),
        "every other": torch.randn(2 * LARGE)[::2],
        "expanded": torch.randn(1).expand(LARGE),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 3)}
    snapshot = Snapshot()
    later = {tensor.data_ptr() for tensor in live.values()}

    taken = snapshot.take({"file": live}, later=later)["file"]
    snapshot.finish()

    assert all(torch.equal(taken[name], live[name]) for name in live)
    assert taken["channels last"].stride() == live["channels last"].stride()


def test_the_state_of_a_key_is_computed_without_touching_a_generator() -> None:
    rng.seed_all(1, 2, 3)
    there = rng.snapshot()

    state = rng.keyed(4, 5, 6)

    assert rng.snapshot() == there
    rng.seed_all(4, 5, 6)
    assert rng.digest(rng.snapshot()) == rng.digest(state)
