"""The harness that runs functions in forked ranks tells the truth and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch.distributed as dist
from harness import RankDied, RankHung, Ranks


def fail_on(rank: int, *, killed: bool = False) -> None:
    if dist.get_rank() == rank:
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)
        raise ZeroDivisionError("the cause")
    dist.barrier()


def a_name_to_find_in_the_stack() -> None:
    while True:
        signal.pause()


def hang_on(rank: int, folder: str) -> None:
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    Path(folder, str(dist.get_rank())).write_text(f"{os.getpid()} {child.pid}")
    if dist.get_rank() == rank:
        a_name_to_find_in_the_stack()


@pytest.mark.parametrize("rank", [0, 2])
def test_the_exception_that_came_first_is_raised_with_rank_and_traceback(
        ranks: Ranks, rank: int) -> None:
    with pytest.raises(ZeroDivisionError, match="the cause") as caught:
        ranks(3, fail_on, rank)

    [note] = caught.value.__notes__
    assert note.startswith(f"in rank {rank} of 3:")
    assert "in fail_on" in note


def test_a_death_is_the_cause_and_not_the_errors_of_its_peers(ranks: Ranks) -> None:
    with pytest.raises(RankDied, match="rank 1 of 3 died by SIGKILL"):
        ranks(3, fail_on, 1, killed=True)


def test_a_hang_is_reported_with_its_stack_and_nothing_is_left(
        ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RankHung, match=r"from rank 1 of 2\n(.|\n)*a_name_to_find_in_the_stack"):
        ranks(2, hang_on, 1, str(tmp_path), timeout_s=5)  # and what comes before takes less

    pids = [int(pid) for file in tmp_path.iterdir() for pid in file.read_text().split()]
    assert len(pids) == 4
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
