"""Write tensors as a stream of safetensors bytes.

The safetensors library's own writer makes one more copy of all tensors. The format is an 8-byte
header length, a JSON header and the tensors' bytes
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trainer.errors import FileDamaged
from trainer.storage.files import display_path, open_regular

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of a size in bytes, as which the bits of a tensor are read."""


def serialize(tensors: Mapping[str, Tensor]) -> Iterator[memoryview | bytes]:
    """Yield the bytes of a safetensors file of CPU tensors, header first.

    numpy makes tensors contiguous: in the writer thread torch would start further OpenMP threads,
    and while these exist, OpenMP puts the training's threads to sleep between two operations.
    """
    header: dict[str, object] = {}
    offset = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise TypeError(f"{name}: safetensors has no dtype {tensor.dtype}")
        size = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape),
                        "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        if tensor.numel():
            bits = tensor.detach().view(INTEGERS[tensor.element_size()]).numpy()
            yield memoryview(np.ascontiguousarray(bits))  # type: ignore[arg-type]


def data_size(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of the tensors' data, without the header."""
    return sum(t.numel() * t.element_size() for t in tensors.values())


def read_shapes(path: Path) -> dict[str, list[int]]:
    """The shape of each tensor of a safetensors file. Raises FileDamaged, or OSError."""
    from safetensors import safe_open

    with _opened(path) as name, safe_open(name, "np") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118


def load_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file. Raises FileDamaged, or OSError."""
    from safetensors.torch import load_file

    with _opened(path) as name:
        return load_file(name)


def is_whole(path: Path) -> bool:
    """Whether there is a file whose size is that of the tensors in its header."""
    try:
        read_shapes(path)
    except OSError:
        return False
    return True


def parse_tensors(data: bytes, name: str) -> dict[str, Tensor]:
    """The tensors of a file's content, by name (`load` has no fixed order). Raises FileDamaged."""
    from safetensors.torch import load

    with _damage_reported(name):
        return dict(sorted(load(data).items()))


@contextmanager
def _opened(path: Path) -> Iterator[str]:
    """A name of a file for the safetensors library, which refuses a path that is not UTF-8."""
    with open(open_regular(path), "rb") as file, _damage_reported(display_path(path)):
        if not os.fstat(file.fileno()).st_size:  # such as files of /proc, which can't be mapped
            raise ValueError("it is empty")
        yield f"/proc/self/fd/{file.fileno()}"


@contextmanager
def _damage_reported(name: str) -> Iterator[None]:
    """Context in which errors of the safetensors library are FileDamaged."""
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, KeyError, MemoryError, RuntimeError, ValueError) as error:
        raise FileDamaged(f"{name}: it can't be read as safetensors: {error}") from error
