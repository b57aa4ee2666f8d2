"""Tensor files: what one pass reads and hashes, and safetensors agrees with."""

from __future__ import annotations

from pathlib import Path

import torch
import xxhash
from safetensors.torch import load_file

from trainer.storage.tensorfile import read_tensors, serialize


def test_a_file_is_read_and_hashed_in_one_pass(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "weight": torch.randn(700, 600, generator=generator),  # more than one chunk
        "mask": torch.tensor([True, False, True]),  # what follows isn't aligned
        "count": torch.tensor(7), "empty": torch.empty(0, 3),
        "half": torch.randn(4, 5, generator=generator).bfloat16().t(),
    }  # fmt: skip
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
