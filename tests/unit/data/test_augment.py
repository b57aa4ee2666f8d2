"""Augmentation: the result for an image depends only on the image and its key."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from trainer.data import augment

KEYS = st.lists(st.integers(0, 2**64 - 1), max_size=12).map(lambda v: np.array(v, dtype=np.uint64))
quick = settings(max_examples=40, deadline=None)


def pictures(number: int, *, channels: int = 1, height: int = 6, width: int = 5) -> torch.Tensor:
    """Images with distinct, non-zero values."""
    count = number * channels * height * width
    return torch.arange(1, count + 1, dtype=torch.float32).view(number, channels, height, width)


@quick
@given(keys=KEYS, channels=st.integers(1, 3))
def test_flip_mirrors_exactly_the_images_whose_key_is_odd(keys, channels):
    images = pictures(len(keys), channels=channels)

    flipped = augment.flip(images, keys)

    for image, key, result in zip(images, keys.tolist(), flipped, strict=True):
        assert torch.equal(result, image.flip(-1) if key & 1 else image)


@quick
@given(keys=KEYS, padding=st.integers(0, 4), channels=st.integers(1, 3))
def test_crop_is_a_window_of_the_padded_image_at_a_place_that_the_key_gives(
        keys, padding, channels):
    images = pictures(len(keys), channels=channels)

    cropped = augment.crop(images, keys, padding)

    assert cropped.shape == images.shape
    for image, key, result in zip(images, keys.tolist(), cropped, strict=True):
        down = ((key >> 16 & 0xFFFF) * (2 * padding + 1)) >> 16
        right = ((key >> 32 & 0xFFFF) * (2 * padding + 1)) >> 16
        padded = functional.pad(image, (padding,) * 4)
        assert torch.equal(result, padded[:, down : down + 6, right : right + 5])


@pytest.mark.parametrize("kind", [torch.uint8, torch.float32, torch.int64])
def test_dtype_and_input_are_unchanged(kind):
    images = (pictures(4) % 200).to(kind)
    before = images.clone()
    keys = np.full(4, 2**64 - 1, dtype=np.uint64)

    results = augment.flip(images, keys), augment.crop(images, keys, 2)

    assert [r.dtype for r in results] == [kind, kind]
    assert torch.equal(images, before)
    assert not any(torch.equal(r, before) for r in results)
