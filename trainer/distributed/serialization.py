"""Serialization of tensors to flat bytes for collectives, without pickle."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

BUCKET_BYTES = 64 << 20  # tensors are sent in buffers of about this size


def buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Split tensors, in order, into lists on one device of up to `BUCKET_BYTES`, or one tensor."""
    bucket, size = list[Tensor](), 0
    for tensor in tensors:
        if bucket and (size + tensor.nbytes > BUCKET_BYTES or tensor.device != bucket[0].device):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, flat, as uint8. A single element is contiguous with any stride, such
    as `table[:, 3][:1]`, but `view` needs a stride of 1."""
    whole = tensor.detach().contiguous()
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate the bytes of tensors on one device, as uint8.

    On CPU after a 16-byte hash of dtypes and shapes, since a collective fills a buffer even from a
    message of another length. On a GPU the check would cost a synchronisation.
    """
    return torch.cat([*_header(tensors), *map(as_bytes, tensors)])


def unpack(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy packed bytes into `tensors`, in place, for any strides."""
    for own in _header(tensors):
        header, flat = flat[: len(own)], flat[len(own) :]
        if not torch.equal(header, own):
            shapes = [tuple(tensor.shape) for tensor in tensors[:8]]
            raise ValueError("the sender's tensors differ from the receiver's, which have the "
                             f"shapes {shapes}…")
    for tensor, data in zip(tensors, flat.split([t.nbytes for t in tensors]), strict=True):
        # The clone begins at an aligned address, which wider dtypes need.
        tensor.detach().copy_(data.clone().view(tensor.dtype).view(tensor.shape))


def padded(data: bytes, width: int) -> Tensor:
    """Pad `data` with zeros to `width` bytes; a uint8 tensor on CPU."""
    return torch.frombuffer(bytearray(data.ljust(width, b"\0")), dtype=torch.uint8)


def _header(tensors: Sequence[Tensor]) -> list[Tensor]:
    if tensors[0].device.type != "cpu":
        return []
    layout = repr([(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]).encode()
    return [padded(hashlib.blake2b(layout, digest_size=16).digest(), 16)]
