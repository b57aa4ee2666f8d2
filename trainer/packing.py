"""Tensors and JSON values as flat bytes: what travels in a collective, without pickle."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

BUCKET_BYTES = 64 << 20
"""Tensors travel in buffers of about this size."""


def buckets(tensors: Sequence[Tensor], limit: int = BUCKET_BYTES) -> Iterator[list[Tensor]]:
    """The same tensors in order, in runs on one device of at most `limit` bytes (or one tensor)."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (size + tensor.nbytes > limit or tensor.device != bucket[0].device):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """All bytes of tensors on one device, one after the other, as uint8.

    On CPU, 16 bytes that stand for dtypes and shapes go before them: a collective fills the buffer
    it is given, also from a message of another length. On a GPU, looking at them would cost a
    synchronisation each time.
    """
    return torch.cat([*_header(tensors), *map(_bytes, tensors)])


def unpack(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write what `pack` gave into `tensors`, in place, whatever their strides.

    Raises:
        ValueError: on CPU: it was packed from tensors of other dtypes or shapes.
    """
    header = _header(tensors)
    parts = list(flat.split([part.numel() for part in header] + [t.nbytes for t in tensors]))
    for own in header:
        if not torch.equal(parts.pop(0), own):
            shapes = [tuple(tensor.shape) for tensor in tensors[:8]]
            raise ValueError(f"the sender's tensors differ from those here, which are {shapes}…")
    for tensor, data in zip(tensors, parts, strict=True):
        # A clone begins at an aligned address, as wider dtypes need it.
        tensor.detach().copy_(data.clone().view(tensor.dtype).view(tensor.shape))


def encode(value: Any) -> bytes:
    """A JSON value as bytes; floats in shortest exact form."""
    return json.dumps(value).encode()


def decode(data: bytes) -> Any:
    """The value that `encode` was given, as JSON has it: tuples are lists, keys are strings."""
    return json.loads(data)


def padded(data: bytes, width: int) -> Tensor:
    """`data` and zeros up to `width` bytes, as a uint8 tensor on CPU."""
    return torch.frombuffer(bytearray(data.ljust(width, b"\0")), dtype=torch.uint8)


def _header(tensors: Sequence[Tensor]) -> list[Tensor]:
    if tensors[0].device.type != "cpu":
        return []
    layout = repr([(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]).encode()
    return [padded(hashlib.blake2b(layout, digest_size=16).digest(), 16)]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
