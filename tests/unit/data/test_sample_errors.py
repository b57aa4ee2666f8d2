"""Bad samples: named by their index, or replaced as a function of (seed, epoch, index)."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bad_task import Bad, BadAtOnce, BadTape
from stream_task import StreamTape
from torch.utils.data import Subset

from trainer import rng
from trainer.config.schema import Batch, Config, Data
from trainer.data import batch as batches
from trainer.data.map_dataset import KeyedSamples, MicroBatch
from trainer.data.sample_errors import SampleError
from trainer.data.sampler import MicroBatchSpec
from trainer.distributed.world import LaunchInfo, World
from trainer.errors import ConfigError
from trainer.run.prepare import prepare

BAD = {3, 7, 8, 20}
COUNT, SEED, EPOCH = 24, 5, 2
CPU = torch.device("cpu")


def reader(kind: Callable[..., Any] = Bad, bad: set[int] = BAD, **arguments: Any) -> KeyedSamples:
    return KeyedSamples(kind(COUNT, 3, bad), seed=SEED, **{"skip": True, **arguments})


def read(samples: KeyedSamples, *indices: int) -> MicroBatch:
    return samples[MicroBatchSpec(1, EPOCH, 0, True, indices)]


def fussy(samples: list[dict[str, Any]]) -> Any:
    """A collate that raises for the bad samples."""
    wrong = {sample["index"] for sample in samples} & BAD
    if wrong:
        raise ValueError(f"no shape for {min(wrong)}")
    return batches.collate(samples)


def in_place_of(index: int, bad: set[int] = BAD) -> int:
    """The replacement as documented."""
    choices = [rng.mix(SEED, rng.REPLACE, EPOCH, index, i) % COUNT for i in range(1, 11)]
    return next(choice for choice in choices if choice not in bad)


def same(left: Any, right: Any) -> bool:
    return all(torch.equal(a, b) for a, b in
               zip(batches.tensors(left), batches.tensors(right), strict=True))


READERS = {
    "one by one": lambda: reader(Bad),
    "at once": lambda: reader(BadAtOnce),
    "collated": lambda: reader(Bad, set(), collate=fussy),
    "at once and collated": lambda: reader(BadAtOnce, set(), collate=fussy),
    "unreadable and collated": lambda: reader(Bad, {3, 20}, collate=fussy)}


# --- the replacement

@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("indices", [(3,), (3, 1), (0, 3, 7, 8), (5, 20, 3), (8, 7, 20)])
def test_a_bad_sample_is_replaced_by_the_documented_choice(kind, indices):
    micro = read(READERS[kind](), *indices)

    bad = [index for index in indices if index in BAD]
    assert [(r.index, r.by) for r in micro.replaced] == [(i, in_place_of(i)) for i in bad]
    chosen = [in_place_of(index) if index in BAD else index for index in indices]
    clean = reader(BadAtOnce if "at once" in kind else Bad, set(), skip=False)
    assert micro.batch["index"].tolist() == chosen
    assert same(micro.batch, read(clean, *chosen).batch), "draws and all"
    assert micro.spec.indices == indices
    assert {r.epoch for r in micro.replaced} == {EPOCH}


@pytest.mark.parametrize("kind", [Bad, BadAtOnce])
def test_an_error_that_is_gone_at_the_second_reading_replaces_nothing(kind):
    class Recovering(kind):
        def __getitem__(self, index: int) -> Any:
            try:
                return super().__getitem__(index)
            finally:
                self.bad = set()

    micro = read(reader(Recovering), 3, 1)

    assert micro.replaced == ()
    assert same(micro.batch, read(reader(kind, set()), 3, 1).batch)


def test_a_stand_in_is_read_as_a_micro_batch_and_counts_nothing():
    one = reader(bad={1})

    micro = one[MicroBatchSpec(1, EPOCH, -1, True, (), stand_in=(1, 2))]

    assert same(micro.batch, read(one, 1, 2).batch)
    assert (micro.samples, micro.replaced) == (0, ())


# --- errors that are not the fault of a sample

def test_if_all_replacements_are_bad_the_first_error_is_raised():
    with pytest.raises(SampleError, match=r"reading sample 3 of epoch 2 raised ValueError: no "
                       r"picture in 3, and so did the 10 samples") as caught:
        read(reader(bad=set(range(COUNT))), 3)

    assert str(caught.value.__cause__) == "no picture in 3"


@pytest.mark.parametrize("error", [
    RuntimeError("unable to allocate shared memory(shm) for file </torch_1_2_3>: No space left "
                 "on device (28)"),
    OSError(errno.EMFILE, "Too many open files"),
    MemoryError()])
def test_a_resource_shortage_is_not_blamed_on_the_sample(error):
    def collate(samples: list[Any]) -> Any:
        raise error

    with pytest.raises(SampleError, match=r"collating sample.* raised ") as caught:
        read(reader(bad=set(), collate=collate, advice="skip"), 1, 3)

    assert "skip" not in str(caught.value)


@pytest.mark.parametrize("kind", [Bad, BadAtOnce])
def test_an_interrupt_passes_through(kind):
    samples = KeyedSamples(kind(COUNT, 3, BAD, "KeyboardInterrupt"), seed=SEED, skip=True)

    with pytest.raises(KeyboardInterrupt):
        read(samples, 1, 3)


@pytest.mark.parametrize("skip", [False, True])
def test_samples_that_fail_only_together_are_all_named(skip):
    def picky(samples: list[Any]) -> Any:
        if len(samples) > 1:
            raise ValueError("no two of them fit")
        return batches.collate(samples)

    with pytest.raises(SampleError, match=r"collating samples \[4, 5\] of epoch 2 raised ValueError"
                       r": no two of them fit \(rank 0\)$"):
        read(reader(bad=set(), collate=picky, skip=skip, advice="skip"), 4, 5)


# --- naming a bad sample

@pytest.mark.parametrize(("kind", "collate", "doing"), [
    (Bad, batches.collate, "reading sample 7 "), (BadAtOnce, batches.collate, "reading sample 7 "),
    (Bad, fussy, "collating sample 7 ")])
def test_the_one_that_is_bad_is_named_among_many(kind, collate, doing):
    bad = {7} if collate is batches.collate else set()

    with pytest.raises(SampleError) as caught:
        read(reader(kind, bad, collate=collate, skip=False, rank=2, advice="fix it"), 5, 7, 1)

    text = str(caught.value)
    assert text.startswith(f"{doing}of epoch 2 raised ValueError: no ")
    assert text.endswith(" (rank 2); fix it")


def test_a_sample_of_a_subset_is_named_by_both_indices():
    subset = Subset(Subset(Bad(COUNT, 3, BAD), range(10)), [9, 8, 7])

    with pytest.raises(SampleError, match=r"sample 8 \(in the subset: 1\) of epoch 2 raised"):
        read(KeyedSamples(subset, seed=SEED), 0, 1)
    replaced, = read(KeyedSamples(subset, seed=SEED, skip=True), 0, 1).replaced
    assert (replaced.index, replaced.by) == (8, 9), "the only good one in it"



def test_skipping_in_a_stream_is_refused_before_anything_starts():
    config = Config(task=StreamTape(), data=Data(on_error="skip"), steps=2,
                    batch=Batch(global_size=4, micro_size=2))

    with pytest.raises(ConfigError, match=r"--data\.on-error skip: .* stream"):
        prepare(config, World(LaunchInfo(), CPU, threads=torch.get_num_threads()))


def test_the_fingerprint_of_the_data_skips_bad_samples_if_the_run_does():
    task = BadTape(samples=8, bad="0,1,2")
    skip, stop = (Config(task=task, data=Data(on_error=on_error), steps=2,
                         batch=Batch(global_size=4, micro_size=2)) for on_error in ("skip", "stop"))

    world = World(LaunchInfo(), CPU, threads=torch.get_num_threads())

    assert prepare(skip, world).fingerprint == prepare(skip, world).fingerprint
    with pytest.raises(SampleError, match=r"no picture in .*--data\.on-error skip"):
        prepare(stop, world)
