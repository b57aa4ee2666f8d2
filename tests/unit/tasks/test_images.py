"""The built-in task: split, batches, models, loss."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from test_fashion_mnist import contents, write
from torch.nn import functional

from trainer.errors import ConfigError
from trainer.tasks.fashion_mnist import FILES
from trainer.tasks.images import Images, divide


class Indices(list):
    """The indices that the loader passes to `__getitems__`."""

    def __init__(self, indices, keys):
        super().__init__(indices)
        self.keys, self.epoch = np.array(keys, dtype=np.uint64), 0


def tiny(folder: Path, *, change: tuple[int, int] | None = None, **fields) -> Images:
    """A task with 50 + 10 images; `change` = (file, byte) changes one byte."""
    files = contents(50, 10)
    if change is not None:
        name, header = FILES[change[0]], 8 if change[0] % 2 else 16
        data = bytearray(files[name])
        data[header + change[1]] ^= 1
        files[name] = bytes(data)
    return Images(data="fashion-mnist", root=str(write(folder, files)), **fields)


def test_a_fifth_of_the_training_file_is_held_out_and_none_of_it_trained_on():
    task = Images()

    train, validation, test = (task.dataset(s) for s in ("train", "validation", "test"))

    assert (len(train), len(validation), len(test)) == (9_600, 2_400, 2_000)
    rows = torch.cat((train.images, validation.images)).flatten(1).numpy()
    whole = task._arrays().train_images.reshape(12_000, -1)
    assert sorted(map(bytes, rows)) == sorted(map(bytes, whole))


def test_the_split_depends_on_the_seed_alone_and_is_stable():
    first, again, other = (divide(12_000, seed, 0.2) for seed in (0, 0, 1))

    assert np.array_equal(first[1], again[1])
    assert not np.array_equal(first[1], other[1])
    assert first[1][:8].tolist() == [3, 4, 5, 7, 15, 20, 23, 30]


def test_the_pixels_are_normalised_by_the_training_part_alone(tmp_path):
    plain = tiny(tmp_path / "plain")
    held_out = int(divide(50, 0, plain.validation_fraction)[1][0])
    changed = tiny(tmp_path / "changed", change=(0, held_out * 784))

    batch, _ = plain.dataset("train").__getitems__(range(40))
    test, _ = plain.dataset("test").__getitems__(range(10))
    same, _ = changed.dataset("test").__getitems__(range(10))

    assert batch.mean().item() == pytest.approx(0, abs=1e-5)
    assert batch.std(correction=0).item() == pytest.approx(1, abs=1e-5)
    assert torch.equal(test, same)
    train = plain.dataset("train")
    pixels = train.images.double()
    by_hand = (plain.dataset("test").images.double() - pixels.mean()) / pixels.std(correction=0)
    assert torch.allclose(test.double(), by_hand, atol=1e-6)


@pytest.mark.parametrize("augment", ["flip", "flip+crop", "none"])
def test_one_by_one_and_batched_give_the_same_bits(augment):
    data = Images(augment=augment).dataset("train")
    places = [5, 0, 9_599, 5]

    images, labels = data.__getitems__(places)

    assert images.shape == (4, 1, 28, 28)
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    for place, image, label in zip(places, images, labels, strict=True):
        assert torch.equal(data[place][0], image)
        assert torch.equal(data[place][1], label)


def test_validation_and_test_images_are_never_augmented():
    for split in ("validation", "test"):
        data = Images(augment="flip+crop").dataset(split)

        keyed, _ = data.__getitems__(Indices([0, 1], [2**64 - 1, 1]))

        assert torch.equal(keyed, data.__getitems__([0, 1])[0])


def test_the_fingerprint_tells_data_and_splits_apart_but_not_folders(tmp_path):
    plain = tiny(tmp_path / "a").fingerprint()
    changed = {
        tiny(tmp_path / f"{file}-{byte}", change=(file, byte)).fingerprint()
        for file, byte in [(0, 0), (0, 50 * 784 - 1), (1, 3), (2, 5), (3, 9)]
    }
    split = {tiny(tmp_path / "a", seed=1).fingerprint(),
             tiny(tmp_path / "a", validation_fraction=0.1).fingerprint()}

    assert len({plain} | changed | split) == 8
    assert tiny(tmp_path / "b").fingerprint() == plain
    assert tiny(tmp_path / "a", seed=0, augment="none").fingerprint() == plain


def test_a_torchvision_model_takes_grey_images_and_keeps_its_names():
    from torchvision.models import resnet18

    task = Images(architecture="resnet18")
    model = task.model()
    batch = task.dataset("train").__getitems__([0, 1, 2])

    task.loss(model, batch).total.backward()
    task.loss(copy.deepcopy(model), (batch[0][:0], batch[1][:0])).total.backward()

    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert list(model.state_dict()) == list(resnet18(num_classes=10).state_dict())
    coloured = batch[0].repeat(1, 3, 1, 1)
    model.eval()
    assert torch.equal(model(batch[0]), model(coloured))


def test_a_torchvision_model_that_needs_larger_images_gets_them():
    model = Images(architecture="alexnet").model().eval()
    images = torch.randn(2, 1, 28, 28)

    grown = functional.interpolate(images, (63, 63), mode="bilinear").repeat(1, 3, 1, 1)

    assert model.training is False
    assert torch.equal(model(images), model(grown))
    assert model(images[:0]).shape == (0, 10)


def test_an_unknown_model_is_refused_with_the_nearest_names():
    with pytest.raises(ConfigError, match=r"--task\.model resnet81: .*did you mean.*resnet18"):
        Images(architecture="resnet81").model()


def test_labels_are_smoothed_in_training_only():
    task, model = Images(label_smoothing=0.1), torch.nn.Identity()
    batch = torch.randn(4, 10), torch.tensor([1, 2, 3, 4])

    for training, smoothing in ((True, 0.1), (False, 0.0)):
        expected = functional.cross_entropy(*batch, reduction="sum", label_smoothing=smoothing)
        torch.testing.assert_close(task.loss(model.train(training), batch).total, expected)


def test_a_model_of_ones_own_is_named_by_an_import_path():
    model = Images(architecture="small_task:Classifier").model()

    assert type(model).__name__ == "Classifier"
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
