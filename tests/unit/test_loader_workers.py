"""A loader worker whose rank is gone before the worker has begun."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from functools import partial

import pytest
import torch

from trainer.data.loader import reading

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
    worker.join(30)

    assert worker.exitcode == code
