"""Tensor files have the format of the safetensors library."""

from __future__ import annotations

from pathlib import Path

import torch

from trainer.storage.files import replace_bytes
from trainer.storage.tensorfile import load_tensors, serialize


def test_the_safetensors_library_reads_what_is_written(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "weight": torch.randn(700, 600, generator=generator),  # more than one chunk
        "mask": torch.tensor([True, False, True]),  # what follows isn't aligned
        "count": torch.tensor(7), "empty": torch.empty(0, 3),
        "half": torch.randn(4, 5, generator=generator).bfloat16().t(),
    }  # fmt: skip
    path = tmp_path / "m\udcffdel.safetensors"

    replace_bytes(path, serialize(tensors))

    found = load_tensors(path)
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
