"""Tensor files are read, hashed and verified in one pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import load_file

from trainer.checkpoint.store import Store
from trainer.errors import CheckpointDamaged
from trainer.storage.tensorfile import read_tensors, serialize


def test_a_file_is_read_and_hashed_in_one_pass(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "weight": torch.randn(700, 600, generator=generator),  # more than one chunk
        "mask": torch.tensor([True, False, True]),  # what follows isn't aligned
        "count": torch.tensor(7), "empty": torch.empty(0, 3),
        "half": torch.randn(4, 5, generator=generator).bfloat16().t()}
    path, hasher = tmp_path / "model.safetensors", xxhash.xxh3_128()
    path.write_bytes(b"".join(bytes(memoryview(part).cast("B") if len(part) else b"")
                              for part in serialize(tensors)))

    found = read_tensors(path, hasher.update)

    assert hasher.hexdigest() == xxhash.xxh3_128_hexdigest(path.read_bytes())
    assert found.keys() == tensors.keys()
    for name, other in load_file(path).items():
        assert found[name].dtype == other.dtype == tensors[name].dtype
        assert torch.equal(found[name], other)
        assert torch.equal(other, tensors[name])


def test_damage_to_any_byte_is_found_while_the_tensors_are_read(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.stage(1, generation=0) as stage:
        stage.write("model.safetensors", serialize({"weight": torch.ones(3), "on": torch.ones(2)}))
        path = stage.commit(kind="periodic").path / "model.safetensors"
    content = path.read_bytes()

    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 3]) + content[at + 1 :])
        with pytest.raises(CheckpointDamaged, match="doesn't match its checksum"):
            store.read(1, read_tensors)
    path.write_bytes(content)
    assert store.read(1, read_tensors)["model.safetensors"]["weight"].tolist() == [1, 1, 1]
