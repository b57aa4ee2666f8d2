"""Samples in tar files, in the form of WebDataset, read in order and resumed at an offset."""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from trainer.data.order import KeyedPermutation
from trainer.data.shards import KeyedStream, Transform, check_lanes, list_files

_NAME = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)")
"""Name of a file in a shard: the key of its sample, up to the first dot after the last slash, and
the field."""


def read_rgb(file: Any) -> Any:
    """Read an image of PIL as RGB, from a path or a binary file."""
    from PIL import Image

    with Image.open(file) as image:
        if image.mode.startswith("I"):  # 16-bit grey, which PIL would clip at 255
            grey = np.asarray(image).astype(np.int64) >> 8
            return Image.fromarray(grey.clip(0, 255).astype(np.uint8)).convert("RGB")
        return image.convert("RGB")


def decode_image(data: bytes) -> torch.Tensor:
    """Decode an image file, such as a JPEG or PNG, to uint8 RGB, 3xHxW."""
    return torch.from_numpy(np.array(read_rgb(io.BytesIO(data)))).permute(2, 0, 1)


DECODERS: dict[str, Callable[[bytes], Any]] = {
    "cls": int, "json": json.loads, "npy": lambda data: np.load(io.BytesIO(data)),
    "txt": lambda data: data.decode(),
    **dict.fromkeys(("jpg", "jpeg", "png"), decode_image)}
"""File extension → decoder of its content; other files stay bytes."""


def decode_fields(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Decode the fields of a sample by their extensions: `DECODERS`."""
    found = {}
    for field, value in sample.items():
        decoder = DECODERS.get(field.rpartition(".")[2].lower())
        try:
            found[field] = value if decoder is None else decoder(value)
        except Exception as error:
            raise ValueError(f"{sample['__url__']}: {field} of sample {sample['__key__']}: {error}"
                             ) from error
    return found


class TarStream(KeyedStream):
    """Samples in tar files (WebDataset's form): consecutive files whose names are equal up to the
    first dot, such as `a/007.jpg` and `a/007.cls`, are a sample, {"jpg": …, "cls": …}.

    `__key__` is the common name (`a/007`) and `__url__` the tar file. Other members (folders,
    links, names that begin with a dot or have none) are left out.

    In each epoch the files are shuffled, and dealt to the lanes; within a file the order stays (see
    `ShuffledBlocks`). An epoch ends with the lane that ends first (with --data.drop-last off, with
    the last one): use files of equal numbers of samples, and a multiple of the lanes.

    Args:
        files: paths or patterns of local, uncompressed files.
        shuffle: whether to shuffle the files.
        transform: makes a sample of the dict of bytes; None leaves it as it is.
    """

    def __init__(self, files: str | Path | Sequence[str | Path], *, shuffle: bool = True,
                 transform: Transform | None = decode_fields) -> None:
        self.files, self.shuffle = list_files(files, "TarStream: files"), shuffle
        self.transform = transform

    def lane(self, number: int, lanes: int) -> TarLane:
        check_lanes("TarStream", len(self.files), lanes)
        order = np.arange(len(self.files))
        if self.shuffle:
            order = KeyedPermutation(len(order), self.key)(0, order)
        return TarLane([self.files[i] for i in order[number::lanes]], self.transform)


class TarLane(Iterator[Any]):
    """Iterator over the samples of some tar files; its state is the place of the file and the
    offset in it of the next sample."""

    def __init__(self, files: Sequence[Path], transform: Transform | None) -> None:
        self._files, self._transform = files, transform
        self._file, self._offset = 0, 0
        self._open: _TarFile | None = None

    def __next__(self) -> Any:
        while self._file < len(self._files):
            path = self._files[self._file]
            if self._open is None or self._open.path != path:
                self._open = _TarFile(path)
            sample, self._offset = self._open.sample(self._offset)
            if sample is not None:
                return sample if self._transform is None else self._transform(sample)
            self._file, self._offset = self._file + 1, 0
        self._open = None
        raise StopIteration

    def state_dict(self) -> dict[str, int]:
        return {"file": self._file, "offset": self._offset}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._file, self._offset = state["file"], state["offset"]


class _TarFile:
    """A tar file that is read from any header's offset. `tarfile` by itself takes a damaged header
    for the end of the archive."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stream = path.open("rb")
        try:
            self._tar = tarfile.TarFile(fileobj=self._stream)
        except tarfile.TarError as error:
            self._raise(0, error)
        self._ahead: tuple[int, tarfile.TarInfo | None, int] = (-1, None, 0)
        """The last header: its offset, the member, and the offset of the next header. The first
        header of a sample is read at the end of the one before."""

    def sample(self, offset: int) -> tuple[dict[str, Any] | None, int]:
        """The first sample at or after a header's offset, and the offset of the next header; None
        at the end of the archive."""
        found: dict[str, Any] = {}
        while True:
            member, after = self._member(offset)
            name = _NAME.fullmatch(member.name) if member and member.isreg() else None
            if found and (member is None or (name and name[1] != found["__key__"])):
                return found, offset
            if member is None:
                return None, offset
            if name:
                if name[2] in found:
                    self._raise(offset, f"there is a second {member.name!r} in a sample")
                found |= {"__key__": name[1], "__url__": str(self.path),
                          name[2]: self._content(member)}
            offset = after

    def __del__(self) -> None:
        self._stream.close()

    def _member(self, offset: int) -> tuple[tarfile.TarInfo | None, int]:
        """The member whose header is at this offset (None: the archive ends here), and the offset
        of the next one."""
        if offset == self._ahead[0]:
            return self._ahead[1:]
        self._stream.seek(offset)
        try:
            member = tarfile.TarInfo.fromtarfile(self._tar)
        except tarfile.HeaderError as error:
            self._stream.seek(offset)
            if self._stream.read(tarfile.BLOCKSIZE) != tarfile.NUL * tarfile.BLOCKSIZE:
                self._raise(offset, error)
            return None, offset
        self._ahead = offset, member, self._tar.offset
        return self._ahead[1:]

    def _content(self, member: tarfile.TarInfo) -> bytes:
        if member.issparse():
            self._raise(member.offset, "sparse files are not supported; write it without --sparse")
        self._stream.seek(member.offset_data)
        content = self._stream.read(member.size)
        if len(content) < member.size:
            self._raise(member.offset, f"the file ends within {member.name}")
        return content

    def _raise(self, offset: int, why: str | Exception) -> NoReturn:
        raise tarfile.ReadError(f"{self.path} at offset {offset}: {why}; the file is damaged, "
                                "truncated, or not an uncompressed tar file")
