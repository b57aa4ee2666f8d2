"""What the watchdog makes of a main thread that computes, or waits for a device by spinning."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest
import torch

from trainer.distributed.waits import WaitsFor, waiting_for
from trainer.distributed.world import LaunchInfo, World
from trainer.resilience.hang_detection import RankReport
from trainer.resilience.watchdog import Watchdog
from trainer.telemetry.events import Log
from trainer.telemetry.status import Phase

LIMIT_S = 0.2


@pytest.mark.parametrize("spins", [False, True])
def test_a_wait_for_a_device_is_found_although_it_takes_processor_time(spins: bool) -> None:
    log = Log(level="error")
    log.status.enter(Phase.TRAIN)
    watchdog = Watchdog(World(LaunchInfo(), torch.device("cpu"), 1), log, limit_s=LIMIT_S)
    watchdog.marks.mark(Phase.BACKWARD, 3, 0)
    reports: list[RankReport] = []
    ends_s = time.monotonic() + 4 * LIMIT_S

    def watch() -> None:
        while time.monotonic() < ends_s:
            reports.append(watchdog._look(time.monotonic()))
            time.sleep(LIMIT_S / 10)

    thread = threading.Thread(target=watch)
    thread.start()
    with waiting_for(WaitsFor.DEVICE) if spins else contextlib.nullcontext():
        while thread.is_alive():
            sum(range(1000))
    thread.join()

    assert reports[-1].over is spins
    assert not reports[0].over
