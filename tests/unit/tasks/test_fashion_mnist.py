"""Finding and reading Fashion-MNIST: the bundled sample, IDX files, the download."""

from __future__ import annotations

import fcntl
import gzip
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from trainer.errors import ConfigError
from trainer.tasks import fashion_mnist
from trainer.tasks.fashion_mnist import FILES

PACKAGED = Path(fashion_mnist.__file__).parent


def load_make_sample():
    path = Path(__file__).parents[3] / "scripts" / "make_sample.py"
    spec = importlib.util.spec_from_file_location("make_sample", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make_sample = load_make_sample()


def contents(train: int = 20, test: int = 10) -> dict[str, bytes]:
    """The four IDX files of a tiny data set."""
    draw = np.random.default_rng(train)
    parts = [a for n in (train, test) for a in (
        draw.integers(0, 256, (n, 28, 28), dtype=np.uint8), np.arange(n, dtype=np.uint8) % 10)]
    return {name: make_sample.to_idx(part) for name, part in zip(FILES, parts, strict=True)}


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


# --- the bundled sample ---


def test_the_sample_is_stratified_and_small_and_its_licence_lies_beside_it():
    sample = fashion_mnist.read_sample()

    assert sample.train_images.shape == (12_000, 28, 28)
    assert sample.test_images.shape == (2_000, 28, 28)
    assert np.bincount(sample.train_labels).tolist() == [1200] * 10
    assert np.bincount(sample.test_labels).tolist() == [200] * 10
    assert (PACKAGED / fashion_mnist.SAMPLE).stat().st_size <= 5_500_000
    assert "Zalando SE" in (PACKAGED / "fashion_mnist_sample_LICENSE.txt").read_text()


def test_the_sample_is_read_once_and_nobody_can_change_it():
    sample = fashion_mnist.read_sample()

    assert fashion_mnist.read_sample() is sample
    with pytest.raises(ValueError, match="read-only"):
        sample.train_images[0, 0, 0] = 1


@pytest.mark.skipif(not fashion_mnist.SYSTEM_FOLDER.is_dir(), reason="needs the full data set")
def test_the_sample_is_what_its_script_takes_from_the_full_set():
    full = fashion_mnist.read_folder(fashion_mnist.SYSTEM_FOLDER)

    made = make_sample.make(full)

    sample = fashion_mnist.read_sample()
    assert made == b"".join(map(make_sample.to_idx, (
        sample.train_images, sample.train_labels, sample.test_images, sample.test_labels)))


# --- finding ---


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("layout", [".", "FashionMNIST/raw"])
def test_the_files_are_found_compressed_or_not_in_either_layout(layout, packed, tmp_path):
    files = contents()
    folder = write(tmp_path / "root" / layout, files, packed=packed)

    found = look(tmp_path / "root", tmp_path)
    arrays = fashion_mnist.read_folder(found)

    assert found == folder
    assert make_sample.to_idx(arrays.train_images) == files[FILES[0]]
    assert make_sample.to_idx(arrays.test_labels) == files[FILES[3]]
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


# --- reading ---


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
        "cut in the header": (images, files[images][:9]),
        "another format": (images, b"\x89PNG" + files[images][4:]),
        "of floats": (images, b"\0\0\x0d\x03" + files[images][4:]),
    }[kind]
    (folder / path).write_bytes(content)
    return folder / path


@pytest.mark.parametrize("kind", [
    "packed, flipped", "packed, cut", "packed, not gzip", "cut", "cut in the header",
    "another format", "of floats"])
def test_a_damaged_file_is_an_error_that_names_it(kind, tmp_path):
    path = damaged(tmp_path, kind)

    with pytest.raises(ConfigError) as caught:
        fashion_mnist.read_folder(tmp_path)

    assert str(path) in str(caught.value)
    assert "replace it" in str(caught.value)


@pytest.mark.parametrize(("name", "array", "why"), [
    (FILES[1], np.zeros(19, np.uint8), r"\(19,\)"),
    (FILES[2], np.zeros((10, 32, 32), np.uint8), r"\(10, 32, 32\)"),
])
def test_files_that_do_not_fit_together_are_an_error(name, array, why, tmp_path):
    write(tmp_path, {**contents(), name: make_sample.to_idx(array)})

    with pytest.raises(ConfigError, match=why):
        fashion_mnist.read_folder(tmp_path)


# --- the download ---


def provide(target: Path) -> None:
    write(target / "FashionMNIST" / "raw", contents())


def test_a_download_lands_in_the_root_and_is_found_from_then_on(tmp_path):
    first = look(tmp_path / "root", tmp_path, provide)
    second = look(tmp_path / "root", tmp_path, refuse)

    assert first == second == tmp_path / "root" / "FashionMNIST" / "raw"
    assert sorted(p.name for p in first.iterdir()) == sorted(FILES)
    assert [p.name for p in (tmp_path / "root").iterdir()] == ["FashionMNIST"]


def test_an_interrupted_download_leaves_nothing(tmp_path):
    def break_off(target: Path) -> None:
        write(target / "FashionMNIST" / "raw", {FILES[0]: b"half"})
        raise RuntimeError("File not found or corrupted.")

    with pytest.raises(ConfigError, match="File not found or corrupted"):
        look(tmp_path / "root", tmp_path, break_off)

    assert not (tmp_path / "root").exists()


def test_a_process_waits_for_the_one_that_downloads_and_takes_its_files(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    lock = os.open(root, os.O_RDONLY)
    program = f"""
from pathlib import Path
from trainer.tasks import fashion_mnist
def refuse(target): raise OSError("both download")
print(fashion_mnist.find_dataset({str(root)!r}, {{"HOME": {str(tmp_path)!r}}},
                         system=Path({str(tmp_path / "system")!r}), download=refuse))
"""
    fcntl.flock(lock, fcntl.LOCK_EX)
    other = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    wait_until(lambda: has_open(other.pid, root))
    provide(root)
    os.close(lock)
    output, _ = other.communicate(timeout=200)

    assert output.strip() == str(root / "FashionMNIST" / "raw")


def has_open(pid: int, path: Path) -> bool:
    """Whether a process has a file open."""
    names = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            names.append(os.readlink(entry))
        except FileNotFoundError:
            continue  # closed since the folder was listed
    return str(path) in names


def wait_until(happened, deadline_s: float = 200) -> None:
    end = time.monotonic() + deadline_s
    while not happened():
        assert time.monotonic() < end, "it didn't happen in time"
        time.sleep(0.01)
