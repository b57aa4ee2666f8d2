"""A rank that joins its world and all-reduces sums; in the first attempt the victim is killed."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch

from trainer.distributed.world import World


def main(folder: Path, victim: int) -> None:
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with World.form(device="cpu", timeout_s=100, join_timeout_s=100) as world:
        total = 0.0
        for step in range(5):
            total += float(world.all_sum(torch.tensor(float(step * world.size + world.rank))))
            if attempt == 0 and step == 3 and world.rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
        line = json.dumps({"nonce": world.nonce, "total": total})
        (folder / f"attempt-{attempt}-rank-{world.rank}.json").write_text(line)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
