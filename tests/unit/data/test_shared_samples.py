"""Validation samples among the training samples: found by index or content, in limited time."""

from __future__ import annotations

import torch
from torch.utils.data import Subset, TensorDataset

from trainer.data import shared_samples as leaks


def shared_samples(train, validation, clock=lambda: 0.0) -> str:
    """Search with a clock that stands still, so that the speed of the machine does not matter."""
    return leaks.shared_samples(train, validation, seed=0, clock=clock)


def points(seed: int, count: int = 300) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, 4, generator=generator), torch.zeros(count))


def test_subsets_of_one_data_set_are_compared_by_their_indices():
    whole = points(0)

    apart = shared_samples(Subset(whole, range(200)), Subset(whole, range(200, 300)))
    overlap = shared_samples(Subset(whole, range(250)), Subset(whole, range(200, 300)))

    assert apart == ""
    assert overlap.startswith("50 of 100 validation samples")


def test_data_in_memory_is_compared_by_content_and_no_random_state_changes():
    before = torch.get_rng_state()

    assert shared_samples(points(0), points(1)) == ""
    copied = shared_samples(points(0), points(0))

    assert copied.startswith("300 of 300 validation samples")
    assert torch.equal(torch.get_rng_state(), before)


def test_data_with_mostly_equal_samples_gives_no_hint():
    equal = TensorDataset(torch.ones(300, 4), torch.zeros(300))

    assert shared_samples(equal, equal) == ""


def test_the_search_ends_at_its_time_limit():
    times = iter(range(100))

    assert shared_samples(points(0), points(0), clock=lambda: next(times)) == ""


def test_data_that_must_be_fetched_is_not_read():
    class Fetched(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> None:
            raise AssertionError("read")

    assert shared_samples(points(0), None) == ""
    assert shared_samples(Fetched(), Fetched()) == ""


def test_a_sample_that_cannot_be_read_gives_no_hint():
    class Broken(TensorDataset):
        def __getitem__(self, index: int) -> None:
            raise ValueError("torn file")

    assert shared_samples(Broken(torch.ones(9, 2)), points(0)) == ""


def test_targets_that_are_larger_than_the_input_are_not_compared():
    def drawn(seed: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(seed)
        return TensorDataset(torch.randn(50, 2, generator=generator), torch.zeros(50, 9))

    assert shared_samples(drawn(0), drawn(1)) == ""
