"""Photographs: folders, CIFAR-10's files, keyed augmentation, published weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Subset

from trainer.data.map_dataset import KeyedSamples
from trainer.data.sampler import MicroBatchSpec
from trainer.errors import ConfigError
from trainer.tasks import photos
from trainer.tasks.losses import balanced
from trainer.tasks.photos import Photos
from trainer.testing import check_task

COLOURS = {"blue": (30, 40, 200), "green": (30, 160, 40), "red": (200, 40, 30)}


def make_folder(root: Path, counts: dict[str, int], split: str = "train") -> Path:
    """Noisy images of one colour in one folder per colour, with different sizes."""
    generator = np.random.default_rng(len(split))
    for name, count in counts.items():
        folder = root / split / name
        folder.mkdir(parents=True)
        for number in range(count):
            shape = (40 + number % 3, 50, 3)
            pixels = generator.normal(COLOURS[name], 60, shape).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")
    return root


def make_cifar(root: Path, per_file: int = 6) -> Path:
    generator = np.random.default_rng(1)
    root.mkdir(parents=True, exist_ok=True)
    for split in photos.CIFAR_FILES.values():
        for name in split:
            records = generator.integers(0, 256, (per_file, 3073), dtype=np.uint8)
            records[:, 0] %= 10
            (root / name).write_bytes(records.tobytes())
    return root


@pytest.fixture
def root(tmp_path) -> Path:
    return make_folder(tmp_path / "data", {"blue": 4, "green": 6, "red": 10})


def small(root: Path, **fields: Any) -> Photos:
    # The smallest torchvision classifier without BatchNorm.
    return Photos(**{"root": str(root), "architecture": "squeezenet1_1", "crop": 32, **fields})


def read(task: Photos, split: str, indices: tuple[int, ...], epoch: int = 0) -> Any:
    samples = KeyedSamples(task.dataset(split), seed=3)
    return samples[MicroBatchSpec(1, epoch, 0, True, indices)].batch


def test_a_task_on_photographs_passes_check_task(root):
    check_task(small(root, class_weights="balanced", label_smoothing=0.1))


def test_training_images_are_cropped_and_flipped_by_epoch_and_sample_alone(root):
    task = small(root)

    first, second = (read(task, "train", (4, 9), epoch)[0] for epoch in (0, 1))

    assert first.shape == (2, 3, 32, 32)
    assert not torch.equal(first, second)
    assert torch.equal(read(task, "train", (9,))[0][0], first[1]), "moved by its neighbour"


def test_validation_images_are_resized_and_cropped_in_the_middle(root):
    from torchvision.transforms import v2

    task = small(root, resize=36)
    images, labels = read(task, "validation", (0, 1))

    held_out = task.dataset("validation")
    assert isinstance(held_out, Subset)
    for place, index in enumerate(held_out.indices[:2]):
        path, label = held_out.dataset.samples[index]
        plain = v2.Compose([v2.Resize(36), v2.CenterCrop(32), v2.PILToTensor(),
                            v2.ToDtype(torch.float32, scale=True), v2.Normalize(*photos.IMAGENET)])
        with Image.open(path) as image:
            assert torch.equal(images[place], plain(image.convert("RGB")))
        assert labels[place] == label
    assert torch.equal(images, read(task, "validation", (0, 1), epoch=1)[0])


def test_separate_folders_are_used_for_validation_and_test(root):
    task = small(root)
    assert [len(task.dataset(s)) for s in ("train", "validation")] == [18, 2]
    assert task.dataset("test") is None

    make_folder(root, {"blue": 1, "green": 2, "red": 1}, "val")
    make_folder(root, {"blue": 1, "green": 1, "red": 1}, "test")

    assert [len(task.dataset(s)) for s in ("train", "validation", "test")] == [20, 4, 3]
    assert task.class_names == ("blue", "green", "red")


def test_other_classes_in_validation_are_refused(root):
    make_folder(root, {"blue": 1, "green": 2}, "val")

    with pytest.raises(ConfigError, match="blue, green differ from the training classes"):
        small(root).dataset("validation")


def test_balanced_weights_come_from_the_training_images(root):
    task = small(root, validation_fraction=0.0)
    assert photos.count_images(task) == (4, 6, 10)

    class Same(torch.nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return torch.zeros(len(images), 3, requires_grad=True)

    batch = read(task, "train", (0, 5, 15))
    plain, even = (float(small(root, validation_fraction=0.0, class_weights=which)
                         .loss(Same(), batch).count) for which in ("none", "balanced"))
    assert plain == 3
    assert even == pytest.approx(sum(balanced((4, 6, 10))))


def test_an_image_that_cannot_be_read_is_named(root):
    broken = root / "train" / "blue" / "0.png"
    broken.write_bytes(broken.read_bytes()[:900])
    images = small(root, validation_fraction=0.0).dataset("train")

    with pytest.raises(OSError, match=r"blue/0\.png: image file is truncated"):
        images[0]


def test_another_file_or_label_is_another_fingerprint(root):
    before = small(root).fingerprint()
    (root / "train/red/0.png").rename(root / "train/blue/00.png")

    assert small(root).fingerprint() != before


# --- CIFAR-10

def test_cifar_is_read_from_its_binary_files(tmp_path):
    root = make_cifar(tmp_path / "cifar")
    task = small(root, data="cifar-10", crop=None)

    assert [len(task.dataset(s)) for s in ("train", "validation", "test")] == [27, 3, 6]
    raw = np.fromfile(root / "test_batch.bin", dtype=np.uint8).reshape(-1, 3073)
    images, labels = task.dataset("test")[2]
    mean, std = photos._mean_and_std(root)
    pixels = torch.from_numpy(raw[2, 1:].reshape(3, 32, 32).copy()) / 255
    plain = (pixels - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    torch.testing.assert_close(images, plain, rtol=1e-5, atol=1e-5)
    assert int(labels) == raw[2, 0]
    check_task(task)


def test_a_cut_or_missing_cifar_file_is_named(tmp_path):
    root = make_cifar(tmp_path / "cifar")
    cut = root / "data_batch_3.bin"
    cut.write_bytes(cut.read_bytes()[:-1])

    with pytest.raises(ConfigError, match=r"data_batch_3.bin: 18437 bytes"):
        small(root, data="cifar-10", crop=None).dataset("train")
    cut.unlink()
    with pytest.raises(ConfigError, match=r"no data_batch_3.bin; .*binary version"):
        small(root, data="cifar-10", crop=None).dataset("train")


# --- published weights

@pytest.fixture
def cached(tmp_path, monkeypatch) -> dict[str, Tensor]:
    """Weights in torch's cache, under the name of the published ones."""
    from torchvision import models

    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    torch.manual_seed(5)
    values = models.squeezenet1_1().state_dict()
    url = models.SqueezeNet1_1_Weights.DEFAULT.url
    path = tmp_path / "home/hub/checkpoints" / url.rpartition("/")[2]
    path.parent.mkdir(parents=True)
    torch.save(values, path)
    return values


def test_published_weights_are_loaded_except_for_the_last_layer(root, cached):
    model = small(root, weights="IMAGENET1K_V1").model()

    found = model.state_dict()
    assert found["classifier.1.weight"].shape[0] == 3
    assert all(torch.equal(found[n], v) for n, v in cached.items() if "classifier.1" not in n)


def test_sizes_and_normalisation_are_those_of_the_weights(root, cached):
    from torchvision import models

    weights = models.SqueezeNet1_1_Weights.IMAGENET1K_V1
    task = small(root, weights="IMAGENET1K_V1", crop=None)
    images, _ = read(task, "validation", (0,))

    held_out = task.dataset("validation")
    with Image.open(held_out.dataset.samples[held_out.indices[0]][0]) as image:
        theirs = weights.transforms()(image.convert("RGB"))
    torch.testing.assert_close(images[0], theirs, rtol=1e-5, atol=1e-5)


def test_grey_of_16_bits_keeps_its_shades(tmp_path):
    shades = np.array([[0, 256, 32768, 65535]], dtype=np.uint16)
    Image.fromarray(shades).save(tmp_path / "grey.png")

    found = np.asarray(photos._read(str(tmp_path / "grey.png")))

    assert found[0, :, 1].tolist() == [0, 1, 128, 255]
