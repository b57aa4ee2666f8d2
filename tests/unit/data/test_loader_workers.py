"""Loader workers: a rank that dies early, file offsets, and batches that can't be sent."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from trainer.data.batch import collate
from trainer.data.workers import SMALL, DataReader, _start_worker
from trainer.storage import processes

FORK = multiprocessing.get_context("fork")


def reader(dataset: object, workers: int) -> DataReader:
    return DataReader(dataset, sampler=range(len(dataset)), workers=workers, prefetch=2,
                      device=torch.device("cpu"))


def enter(start: Callable[[int], None]) -> None:
    start(0)
    os._exit(7)


@pytest.mark.parametrize(("gone", "code"), [(False, 7), (True, 0)])
def test_a_worker_runs_only_as_a_child_of_its_rank(gone: bool, code: int) -> None:
    parent = os.getppid() if gone else os.getpid()
    worker = FORK.Process(target=enter, args=(partial(_start_worker, parent, 0),))
    worker.start()
    worker.join(100)

    assert worker.exitcode == code


class Opened:
    """Rows of a file that is opened once; two workers seek before either of them reads."""

    def __init__(self, path: Path, *, buffering: int) -> None:
        self.file = path.open("rb", buffering=buffering)
        self.both = FORK.Barrier(2)

    def __getitem__(self, index: int) -> int:
        self.file.seek(4096 * index)
        self.both.wait(60)
        value = self.file.read(1)[0]
        self.both.wait(60)
        return value

    def __len__(self) -> int:
        return 6


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux")
@pytest.mark.parametrize("buffering", [0, 64])
def test_workers_have_separate_file_offsets_in_files_of_the_data_set(
        tmp_path: Path, buffering: int) -> None:
    path = tmp_path / "rows"
    path.write_bytes(b"".join(bytes([row]) * 4096 for row in range(6)))
    dataset = Opened(path, buffering=buffering)
    path.unlink()  # a deleted file is reopened too

    rows = list(reader(dataset, 2))

    assert rows == [0, 1, 2, 3, 4, 5]
    assert dataset.file.tell() == 0
    dataset.file.close()


def test_files_open_for_writing_keep_a_shared_offset(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for mode in ("wb", "w+b"):
        with path.open(mode, buffering=0) as file:
            worker = FORK.Process(target=lambda file=file: (
                processes.separate_reads(), file.write(b"one")))
            worker.start()
            worker.join(30)
            file.write(b"two")

        assert path.read_bytes() == b"onetwo"


class Unsendable:
    """A data set whose third batch can't be sent."""

    def __getitem__(self, index: int) -> object:
        return index if index != 2 else lambda: None

    def __len__(self) -> int:
        return 4


def test_a_batch_that_cannot_be_sent_raises_instead_of_hanging() -> None:
    batches = reader(Unsendable(), 1)

    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(Exception, match=r"in DataLoader worker process 0[\s\S]*[Pp]ickle"):
        next(batches)
    assert next(batches) == 3
    batches.close()


SHARED = torch.arange(4.0).share_memory_()
"""Tensors that a data set has put in shared memory remain shared: others write to them."""


class Odd:
    """Batches of all kinds of tensors."""

    def __getitem__(self, index: int) -> dict[str, object]:
        table = torch.arange(24.0).reshape(4, 6)
        return {
            "plain": torch.full((3,), float(index)),
            "bfloat16": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
            "bool": torch.tensor([True, False]),
            "scalar": torch.tensor(7),
            "nothing": torch.empty(0, 5),
            "turned": torch.arange(24.0).reshape(2, 3, 2, 2).to(memory_format=torch.channels_last),
            "part": table[1:3, 2:5],
            "same part": table[1:3],
            "wide": torch.ones(1).expand(5),
            "trained": torch.nn.Parameter(torch.ones(2)),
            "stacked": collate([torch.full((4,), 2.0), torch.ones(4)]),
            "arrays": collate([np.arange(3, dtype=np.int16)] * 2),
            "of two types": collate([torch.ones(2, dtype=torch.int16), torch.ones(2)]),
            "of two, large": collate([torch.ones(SMALL, dtype=torch.int16),
                                      torch.full((SMALL,), 1 << 40)]),
            "large": torch.full((SMALL,), float(index)),
            "shared": SHARED,
            "text": "a text"}

    def __len__(self) -> int:
        return 3


def test_a_loader_process_preserves_all_kinds_of_tensors() -> None:
    source = reader(Odd(), 2)
    try:
        batches = list(source)
    finally:  # otherwise a raised exception would keep the workers alive
        source.close()

    for index, found in enumerate(batches):
        wanted = Odd()[index]
        assert found.keys() == wanted.keys()
        assert found.pop("text") == wanted.pop("text")
        for name, tensor in wanted.items():
            there = found[name]
            assert (type(there), there.dtype, there.shape, there.stride(), there.requires_grad) == (
                type(tensor), tensor.dtype, tensor.shape, tensor.stride(),
                tensor.requires_grad), name
            assert torch.equal(there, tensor), name
        # As without loader processes: both tensors share memory.
        assert (found["part"].untyped_storage().data_ptr()
                == found["same part"].untyped_storage().data_ptr())
    inside = [name for name in batches[0] if batches[0][name].untyped_storage().is_shared()]
    assert inside == ["of two, large", "large", "shared"]
    assert all(b["plain"].untyped_storage().data_ptr() % 64 == 0 for b in batches)
    batches[0]["shared"][0] = 9.0
    assert SHARED[0] == 9.0
