"""A restarted group forms immediately under plain torchrun, whose attempts share one store."""

from __future__ import annotations

from pathlib import Path

import pytest
from launches import finish
from machine import free_port
from runs import TAPE

from trainer.commands.inspect import inspect


@pytest.mark.parametrize(("size", "times"), [(2, 1), *(
    pytest.param(size, 6, marks=[pytest.mark.long, pytest.mark.timeout(900)]) for size in (2, 3))])
def test_the_second_attempt_forms_its_group_after_a_sigkill(
    tmp_path: Path, size: int, times: int
) -> None:
    for number in range(times):
        done = finish(tmp_path / str(number), *TAPE, "--steps=5", "--batch.micro-size=1",
                      f"--inject=kill:rank={number % size}:step=4", size=size,
                      by="torchrun with one store",
                      options=["--max-restarts=3", f"--master-port={free_port()}"])

        attempts = inspect(done.run)["attempts"]
        assert [(a["start_step"], a["end_step"]) for a in attempts] == [(0, 3), (3, 5)]
        assert len({e["nonce"] for e in done.events("start", rank=0)}) == 2
