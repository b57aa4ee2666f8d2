"""Two ranks all-reduce in a real process group; in the first attempt one of them is killed."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from scripted import Rank


def main(argv: list[str]) -> int:
    rank = Rank(Path(argv[0]))
    rank.note("started", imported="torch._dynamo" in sys.modules, server=os.getppid())
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([rank.rank + 1.0])
    dist.all_reduce(total)
    rank.note("summed", total=total.item())
    if rank.attempt == 0:
        if rank.rank == 1:
            rank.note("dies")
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            while True:
                dist.all_reduce(total)
        except RuntimeError:
            os._exit(1)
    dist.destroy_process_group()
    return 0
