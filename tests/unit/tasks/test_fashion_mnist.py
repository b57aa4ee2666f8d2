"""Finding and reading Fashion-MNIST: the bundled sample, IDX files, the download."""

from __future__ import annotations

import gzip
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from trainer.errors import ConfigError
from trainer.tasks import fashion_mnist
from trainer.tasks.fashion_mnist import FILES

PACKAGED = Path(fashion_mnist.__file__).parent


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def contents(train: int = 20, test: int = 10) -> dict[str, bytes]:
    """The four IDX files of a tiny data set."""
    draw = np.random.default_rng(train)
    parts = [a for n in (train, test) for a in (
        draw.integers(0, 256, (n, 28, 28), dtype=np.uint8), np.arange(n, dtype=np.uint8) % 10)]
    return {name: idx(part) for name, part in zip(FILES, parts, strict=True)}


def write(folder: Path, files: dict[str, bytes], *, packed: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / (name + ".gz" if packed else name)).write_bytes(
            gzip.compress(content, 1) if packed else content)
    return folder


def refuse(target: Path) -> None:
    raise OSError("no network")


def look(root: Path | None, tmp_path: Path, download=refuse, **environment: str) -> Path:
    return fashion_mnist.find_dataset(
        None if root is None else str(root), {"HOME": str(tmp_path / "home"), **environment},
        system=tmp_path / "system", download=download)


def test_the_sample_is_stratified_and_small_and_its_licence_lies_beside_it():
    sample = fashion_mnist.read_sample()

    assert sample.train_images.shape == (12_000, 28, 28)
    assert sample.test_images.shape == (2_000, 28, 28)
    assert np.bincount(sample.train_labels).tolist() == [1200] * 10
    assert np.bincount(sample.test_labels).tolist() == [200] * 10
    assert (PACKAGED / fashion_mnist.SAMPLE).stat().st_size <= 5_500_000
    assert "Zalando SE" in (PACKAGED / "fashion_mnist_sample_LICENSE.txt").read_text()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("layout", [".", "FashionMNIST/raw"])
def test_the_files_are_found_compressed_or_not_in_either_layout(layout, packed, tmp_path):
    files = contents()
    folder = write(tmp_path / "root" / layout, files, packed=packed)

    found = look(tmp_path / "root", tmp_path)
    arrays = fashion_mnist.read_folder(found)

    assert found == folder
    assert idx(arrays.train_images) == files[FILES[0]]
    assert idx(arrays.test_labels) == files[FILES[3]]
    assert arrays.source == str(folder)


def test_the_places_are_tried_in_order(tmp_path):
    places = [tmp_path / n for n in ("root", "variable", "system", "home/.cache/trainer")]
    for place in places:
        write(place, contents())

    found = []
    for place in places:
        found.append(look(tmp_path / "root", tmp_path, TRAINER_DATA=str(tmp_path / "variable")))
        (place / FILES[0]).unlink()

    assert found == places


def test_if_nothing_is_found_the_error_lists_each_place_and_the_remedy(tmp_path):
    write(tmp_path / "root", {FILES[0]: b"", FILES[1]: b"", FILES[2]: b""})

    with pytest.raises(ConfigError) as caught:
        look(tmp_path / "root", tmp_path, TRAINER_DATA=str(tmp_path / "variable"))

    lines = str(caught.value).splitlines()
    for place in ("root", "root/FashionMNIST/raw", "variable", "variable/FashionMNIST/raw",
                  "system", "home/.cache/trainer"):
        assert f"  {tmp_path / place}" in lines
    assert f"The download into {tmp_path / 'root'} failed: OSError: no network" in lines
    for remedy in ("--task.root", "TRAINER_DATA", "dataset-fashion-mnist", "--task.data sample"):
        assert remedy in lines[-1]


def damaged(folder: Path, kind: str) -> Path:
    """A folder with one damaged file."""
    files = contents()
    images = FILES[0]
    if kind.startswith("packed"):
        write(folder, files, packed=True)
        path = folder / f"{images}.gz"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 4
        path.write_bytes({"packed, flipped": content, "packed, cut": content[:5000],
                          "packed, not gzip": b"<html>"}[kind])
        return path
    write(folder, files)
    path, content = {
        "cut": (images, files[images][:-1]),
        "another format": (images, b"\x89PNG" + files[images][4:]),
    }[kind]
    (folder / path).write_bytes(content)
    return folder / path


@pytest.mark.parametrize("cut", [False, True])
def test_a_damaged_sample_is_an_error_that_names_it(cut, tmp_path, monkeypatch):
    content = bytearray(Path(fashion_mnist.__file__).with_name(fashion_mnist.SAMPLE).read_bytes())
    content[len(content) // 2] ^= 4
    (tmp_path / "sample.xz").write_bytes(content[:-9] if cut else content)
    monkeypatch.setattr(fashion_mnist, "SAMPLE", tmp_path / "sample.xz")

    with pytest.raises(ConfigError, match=r"sample\.xz: it is damaged .*; install the package"):
        fashion_mnist.read_sample.__wrapped__()


@pytest.mark.parametrize("kind", [
    "packed, flipped", "packed, cut", "packed, not gzip", "cut", "another format"])
def test_a_damaged_file_is_an_error_that_names_it(kind, tmp_path):
    path = damaged(tmp_path, kind)

    with pytest.raises(ConfigError) as caught:
        fashion_mnist.read_folder(tmp_path)

    assert str(path) in str(caught.value)
    assert "replace it" in str(caught.value)


@pytest.mark.parametrize(("name", "array", "why"), [
    (FILES[1], np.zeros(19, np.uint8), r"\(19,\)"),
    (FILES[2], np.zeros((10, 32, 32), np.uint8), r"\(10, 32, 32\)")])
def test_files_that_do_not_fit_together_are_an_error(name, array, why, tmp_path):
    write(tmp_path, {**contents(), name: idx(array)})

    with pytest.raises(ConfigError, match=why):
        fashion_mnist.read_folder(tmp_path)


def test_of_several_processes_one_downloads_into_the_root_and_the_others_find_its_files(
    tmp_path, monkeypatch,
):
    root, downloads, rename = tmp_path / "root", [], os.replace

    def replace(source: Path, target: Path) -> None:
        assert not root.exists()  # without its data: a process that comes now would lock it
        rename(source, target)

    monkeypatch.setattr(os, "replace", replace)

    def download(target: Path) -> None:
        downloads.append(target)
        write(target / "FashionMNIST" / "raw", {FILES[0]: b"half"})
        if len(downloads) == 1:
            raise RuntimeError("File not found or corrupted.")
        write(target / "FashionMNIST" / "raw", contents())

    with pytest.raises(ConfigError, match="File not found or corrupted"):
        look(root, tmp_path, download)
    assert not root.exists()
    with ThreadPoolExecutor(4) as pool:  # the lock is one of the opened folder, not of the process
        found = list(pool.map(lambda _: look(root, tmp_path, download), range(4)))

    assert set(found) == {root / "FashionMNIST" / "raw"}
    assert len(downloads) == 2
    assert sorted(p.name for p in found[0].iterdir()) == sorted(FILES)
    assert [p.name for p in root.iterdir()] == ["FashionMNIST"]
