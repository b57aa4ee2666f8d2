"""Checksums of tensors."""

from __future__ import annotations

import pytest
import torch

from trainer.distributed.replica_check import checksums

TENSORS = [
    torch.randn(3, 5), torch.randn(4, 6).t(), torch.randn(2, 3, 4, 4), torch.tensor(3.0),
    torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last), torch.randn(7)[1:],
    torch.randn(6, dtype=torch.float64), torch.randn(5, dtype=torch.bfloat16),
    torch.randn(8, dtype=torch.float16), torch.ones(3, dtype=torch.bool), torch.arange(5),
    torch.tensor([0.0, -0.0, torch.nan])]


@pytest.mark.parametrize("place", range(len(TENSORS)))
def test_each_flipped_bit_changes_the_checksum_of_its_tensor_alone(place):
    tensors = [t.clone() for t in TENSORS]
    before = checksums(tensors)
    memory = torch.empty(0, dtype=torch.uint8).set_(tensors[place].untyped_storage())

    for byte in range(tensors[place].nbytes):
        for bit in range(8):
            memory[byte] ^= 1 << bit
            changed = (checksums(tensors) != before).nonzero().flatten().tolist()
            memory[byte] ^= 1 << bit
            assert changed == [place], (byte, bit)
    assert torch.equal(checksums(tensors), before)
