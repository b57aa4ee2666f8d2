"""Samples that are not the same in each reading are named."""

from __future__ import annotations

import functools
import random
from types import SimpleNamespace

import pytest

from trainer.data import batch
from trainer.data.map_dataset import KeyedSamples
from trainer.run.prepare import fingerprinted
from trainer.run.startup_checks import _samples_differ


@pytest.mark.parametrize("count", [1, 17, 64, 1000])
def test_samples_that_the_fingerprint_has_read_do_not_hide_cached_draws(count):
    class Cached:
        __len__ = lambda self: count  # noqa: E731
        __getitem__ = functools.cache(lambda self, index: index + random.random())

    data = Cached()
    for index in fingerprinted(count):
        KeyedSamples(data, seed=0).sample(index)

    why, _ = _samples_differ(SimpleNamespace(data={"train": data}, collate=batch.collate),
                             "train", 0)

    assert ("cache the random numbers" in why) == (count > 1)
