"""Read Fashion-MNIST as arrays: the bundled sample, or the full data set from disk or network.

The files are in IDX format (http://yann.lecun.com/exdb/mnist/), as published at
https://github.com/zalandoresearch/fashion-mnist. The bundled sample is the concatenation of the
four files with fewer images, compressed by lzma (see `scripts/make_sample.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import gzip
import importlib.resources
import lzma
import math
import os
import socket
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from trainer.errors import ConfigError

CLASS_NAMES = ("T-shirt/top", "trouser", "pullover", "dress", "coat",
               "sandal", "shirt", "sneaker", "bag", "ankle boot")
"""Names of the labels 0 to 9."""

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte",
         "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
"""The four files, uncompressed or with `.gz`, in the order in which the sample contains them."""

SAMPLE = "fashion_mnist_sample.xz"
SYSTEM_FOLDER = Path("/usr/share/datasets/fashion-mnist")
"""Where the package dataset-fashion-mnist of Debian and Ubuntu installs the files."""

_DOWNLOAD_TIMEOUT_S = 20.0
_REPLACE = "replace it, or remove it so that other folders are searched."


@dataclasses.dataclass(frozen=True, eq=False)
class Arrays:
    """Images Nx28x28 uint8 (black is 0) and labels N uint8, read-only. Compared by identity."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    source: str  # the folder, or a description of it


@functools.cache  # 0.35 s; ranks forked from a launcher that has read it share the result
def read_sample() -> Arrays:
    """The bundled sample: per class the first 1,200 training and 200 test images, in file order."""
    path = importlib.resources.files("trainer.tasks").joinpath(SAMPLE)
    try:
        content = lzma.decompress(path.read_bytes())
    except (lzma.LZMAError, EOFError) as error:
        raise ConfigError(f"{path}: it is damaged ({error}); install the package again, or choose "
                          "other data with --task.data.") from error
    parts, position = [], 0
    for name in FILES:
        array, position = parse_idx(content, f"{path}, part {name}", position)
        parts.append(array)
    return _arrays(parts, "the bundled sample")


@functools.cache
def read_folder(folder: Path) -> Arrays:
    """Read the four IDX files in `folder`, uncompressed or with `.gz`."""
    parts = []
    for name in FILES:
        path = _file(folder, name)
        if path is None:
            raise ConfigError(f"{folder} has neither {name} nor {name}.gz.")
        try:
            content = path.read_bytes()
            if path.suffix == ".gz":
                content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise ConfigError(f"{path} is damaged or truncated ({error}); {_REPLACE}") from error
        parts.append(parse_idx(content, str(path))[0])
    return _arrays(parts, str(folder))


def parse_idx(content: bytes, name: str, start: int = 0) -> tuple[np.ndarray, int]:
    """The uint8 array at byte `start` of an IDX file, and the offset of its end."""
    try:
        magic, dimensions = struct.unpack_from(">3sB", content, start)
        if magic != b"\0\0\x08":
            raise ValueError(f"it begins with {magic.hex()}, which is not an IDX file of bytes")
        shape = struct.unpack_from(f">{dimensions}I", content, start + 4)
        body, count = start + 4 + 4 * dimensions, math.prod(shape)
        return np.frombuffer(content, np.uint8, count, body).reshape(shape), body + count
    except (struct.error, ValueError, OverflowError) as error:
        raise ConfigError(f"{name} is damaged or truncated ({error}); {_REPLACE}") from error


def find_dataset(
    root: str | None, environment: Mapping[str, str], *, system: Path = SYSTEM_FOLDER,
    download: Callable[[Path], None] | None = None,
) -> Path:
    """Find the folder of the full data set in `root`, $TRAINER_DATA, `system` and the user's cache
    folder, each with the files themselves or with torchvision's `FashionMNIST/raw`. If none has it,
    `download` (default: torchvision's) creates the latter in the first of root, $TRAINER_DATA and
    the cache that is set; only one of several processes on a host downloads."""
    given = [Path(place).expanduser() for place in (root, environment.get("TRAINER_DATA")) if place]
    cache = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME", "~"), ".cache")
    own = Path(cache, "trainer").expanduser()
    places = [folder for place in (*given, system, own)
              for folder in (place, place / "FashionMNIST" / "raw")]
    for folder in places:
        if all(_file(folder, name) for name in FILES):
            return folder
    target = given[0] if given else own
    try:
        return _download(target, download or _by_torchvision)
    except (OSError, RuntimeError, ImportError) as error:
        raise ConfigError(
            f"--task.data fashion-mnist: the files {', '.join(FILES)} (or with .gz) are not in any "
            "of:\n  " + "\n  ".join(map(str, places)) + "\nThe download into "
            f"{target} failed: {type(error).__name__}: {error}\nSet the folder by --task.root or "
            "TRAINER_DATA (with the IDX files, or in torchvision's layout), install the Debian "
            "package dataset-fashion-mnist, or run once with network access. The bundled sample "
            "needs no download: --task.data sample.") from None


def _file(folder: Path, name: str) -> Path | None:
    return next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None)


def _download(target: Path, download: Callable[[Path], None]) -> Path:
    """Download beside the target and rename, with the folders that lack above it, so that the data
    are complete or nothing is left."""
    folder = target.absolute() / "FashionMNIST"
    with _locked_parent(folder) as there:
        if not folder.exists():  # else another process has downloaded it
            with tempfile.TemporaryDirectory(dir=there) as temporary:
                aside = Path(temporary, folder.relative_to(there))
                aside.parent.mkdir(parents=True, exist_ok=True)
                download(aside.parent)
                first = folder.relative_to(there).parts[0]
                os.replace(Path(temporary, first), there / first)
    return folder / "raw"


@contextlib.contextmanager
def _locked_parent(folder: Path) -> Iterator[Path]:
    """Lock the nearest existing folder above `folder`; a lock ends if its process dies."""
    while True:
        there = _existing_parent(folder)
        descriptor = os.open(there, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _existing_parent(folder) == there:  # else another process has created a nearer one
                yield there
                return
        finally:
            os.close(descriptor)


def _existing_parent(folder: Path) -> Path:
    return next(parent for parent in folder.parents if parent.is_dir())


def _by_torchvision(target: Path) -> None:
    from torchvision.datasets import FashionMNIST  # takes seconds, so imported only when needed

    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_DOWNLOAD_TIMEOUT_S)  # else an unresponsive network blocks forever
    try:
        FashionMNIST(str(target), download=True)
    finally:
        socket.setdefaulttimeout(before)


def _arrays(parts: list[np.ndarray], source: str) -> Arrays:
    train_images, train_labels, test_images, test_labels = parts
    for images, labels in ((train_images, train_labels), (test_images, test_labels)):
        if images.shape[1:] != (28, 28) or labels.shape != images.shape[:1] or not labels.size:
            raise ConfigError(f"{source}: images of shape {images.shape} with labels of shape "
                              f"{labels.shape}; they must be Nx28x28 and N, N at least 1.")
    return Arrays(train_images, train_labels, test_images, test_labels, source)
