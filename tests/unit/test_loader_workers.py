"""A loader worker whose rank is gone before it has begun; a batch that it can't hand over."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from machine import left_in_shared_memory, shared_memory
from torch.utils.data import DataLoader

from trainer.data.loader import reading, shut_down

FORK = multiprocessing.get_context("fork")


def enter(start: Callable[[int], None]) -> None:
    start(0)
    os._exit(7)


@pytest.mark.parametrize(("gone", "code"), [(False, 7), (True, 0)])
def test_a_worker_goes_on_only_below_the_rank_that_asked_for_it(gone: bool, code: int) -> None:
    start = reading(1, 2, torch.device("cpu"))["worker_init_fn"]
    if gone:  # as if its parent had been another process
        with FORK.Pool(1) as another:
            start = partial(start.func, another.apply(os.getpid))
    worker = FORK.Process(target=enter, args=(start,))
    worker.start()
    worker.join(100)

    assert worker.exitcode == code


class Unsendable:
    """A data set whose third batch can't be handed over; the worker's shared memory is left as
    torch leaves it where there is no room."""

    def __getitem__(self, index: int) -> object:
        if index != 2:
            return index
        Path(f"/dev/shm/torch_{os.getpid()}_1_0").touch()
        return lambda: None

    def __len__(self) -> int:
        return 4


def test_a_batch_that_can_not_be_handed_over_is_an_error_and_no_endless_wait() -> None:
    before = shared_memory()
    loader = DataLoader(Unsendable(), **reading(1, 2, torch.device("cpu")))
    batches = iter(loader)
    pids = [os.getpid(), *(worker.pid for worker in multiprocessing.active_children())]

    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(Exception, match=r"in DataLoader worker process 0[\s\S]*pickle"):
        next(batches)
    assert next(batches) == 3
    shut_down(batches)
    assert left_in_shared_memory(before, pids) == set()
