"""Packed tensors are restored bit for bit."""

from __future__ import annotations

import pytest
import torch

from trainer.distributed import serialization

DTYPES = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32,
          torch.float64, torch.complex64]


def test_every_dtype_and_shape_keeps_its_bits() -> None:
    sources = [_random(dtype, shape) for dtype in DTYPES for shape in ((), (3,), (2, 0), (5, 1, 3))]
    targets = [torch.zeros_like(source) for source in sources]
    serialization.unpack(serialization.pack(sources), targets)
    for source, target in zip(sources, targets, strict=True):
        assert _bits(source) == _bits(target)


def test_a_parameter_of_other_strides_is_written_in_place_without_a_graph() -> None:
    source = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    wide = torch.zeros(2, 3, 4, 10)
    parameter = torch.nn.Parameter(wide[..., ::2])
    serialization.unpack(serialization.pack([source]), [parameter])
    assert torch.equal(wide[..., ::2], source)
    assert not wide[..., 1::2].any()
    assert parameter.grad_fn is None


@pytest.mark.parametrize("other", [
    [torch.zeros(3, 2)], [torch.zeros(2, 3, dtype=torch.int32)], [torch.zeros(3), torch.zeros(3)]])
def test_tensors_of_another_layout_are_refused(other: list[torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="the sender's tensors differ"):
        serialization.unpack(serialization.pack([torch.ones(2, 3)]), other)


def _random(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.rand(shape) > 0.5
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=torch.float64).to(dtype)
    return torch.randint(0, 200, shape).to(dtype)


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
