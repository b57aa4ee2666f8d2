"""A loader process dies while the state is updated by a validation, or at the start of a step."""

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
    """Like `train`, but kill a loader process when the rank first reaches a place."""
    from trainer.checkpoint.progress import LossMeter
    from trainer.distributed.comm_timer import DeviceInterval
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
                time.sleep(0.01)  # if another thread received the signal, it will arrive
            return result

        return called

    if place == "meter":
        LossMeter.take_mean = then_strike(LossMeter.take_mean)  # type: ignore[method-assign]
    elif place == "average":  # the first call is that of the first update
        ema._copy = then_strike(ema._copy, 2)
    else:  # in the fifth step, before its copy of the buffers is made
        DeviceInterval.first = then_strike(DeviceInterval.first, 5)  # type: ignore[method-assign]
    return train(*arguments)


PLACES = ("meter", "average", "beginning")


def struck_each(folder: str) -> int:
    """Train without a launcher; kill a loader process at the place with the rank's number."""
    place = PLACES[int(os.environ["RANK"])]
    for name in ("RANK", "WORLD_SIZE"):
        del os.environ[name]
    return struck(place, *TASK, f"--run-dir={folder}/{place}")


def test_a_loader_process_dies_during_it(ranks, tmp_path):
    straight = tmp_path / "straight"
    assert ranks(1, train, *TASK, f"--run-dir={straight}", group=False) == [0]

    # At the same time, because torch looks for a dead loader process only every 5 s.
    assert ranks(len(PLACES), struck_each, str(tmp_path), group=False) == [1, 1, 1]
    for place in PLACES:
        hurt = tmp_path / place
        assert ranks(1, train, *TASK, f"--run-dir={hurt}", group=False) == [0]

        assert not list(differences(straight, hurt))
