"""A loader process dies while a validation is taken into the state, which is no boundary then, or
as a step begins."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from runs import train

from trainer.commands.compare import differences

TASK = ["--task=tape_task:Tape", "--device=cpu", "--data.workers=1", "--batch.global-size=8",
        "--batch.micro-size=2", "--task.samples=160", "--task.validation=6", "--steps=12",
        "--eval.every=5", "--checkpoint.every=3", "--optim.ema=0.9",
        "--task.norm=batch"]  # fmt: skip


def struck(place: str, *arguments: str) -> int:
    """As `train`; a loader process is killed at a place, the first time that the rank is there."""
    from trainer.checkpoint.progress import LossMeter
    from trainer.distributed.comm_timer import Marks
    from trainer.optim import ema

    def then_strike(function: Callable[..., Any], times: int = 1) -> Callable[..., Any]:
        left = iter(range(times)[::-1])

        def called(*given: Any) -> Any:
            result = function(*given)
            if next(left, None) == 0:
                worker = multiprocessing.active_children()[0]
                os.kill(worker.pid or 0, signal.SIGKILL)
                while worker.is_alive():
                    time.sleep(0.01)
                time.sleep(0.01)  # where another thread has got the signal, it is on its way
            return result

        return called

    if place == "meter":
        LossMeter.take_mean = then_strike(LossMeter.take_mean)  # type: ignore[method-assign]
    elif place == "average":  # the first is that of the first update
        ema._copy = then_strike(ema._copy, 2)
    else:  # of the fifth step, whose copy of the buffers isn't made yet
        Marks.first = then_strike(Marks.first, 5)  # type: ignore[method-assign]
    return train(*arguments)


def test_a_loader_process_dies_amid_it(ranks, tmp_path):
    straight = tmp_path / "straight"
    assert ranks(1, train, *TASK, f"--run-dir={straight}", group=False) == [0]

    for place in ("meter", "average", "beginning"):
        hurt = tmp_path / place
        assert ranks(1, struck, place, *TASK, f"--run-dir={hurt}", group=False) == [1]
        assert ranks(1, train, *TASK, f"--run-dir={hurt}", group=False) == [0]

        assert not list(differences(straight, hurt))
