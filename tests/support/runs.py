"""Train in forked ranks by the real command line, and read the results."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

TAPE = ("--task=tape_task:Tape", "--device=cpu", "--data.workers=0", "--batch.global-size=8",
        "--batch.micro-size=2", "--task.samples=160")  # fmt: skip
"""Four micro-batches per step, twenty steps per epoch."""


PLATEAU = ("--schedule.name=plateau", "--schedule.options=patience=0",
           "--schedule.options=factor=0.5", "--schedule.options=threshold=0.2",
           "--schedule.warmup=4", "--eval.every=2", "--optim.lr=0.02")  # fmt: skip


def train(*arguments: str) -> int:
    """In a rank: the exit code of `python -m trainer ARGUMENTS`.

    One thread: more would wait for each other wherever another process takes a core.
    """
    from trainer.__main__ import main

    return main([*arguments, "--world.threads=1"])


def impatient(*arguments: str) -> int:
    """In a rank: as `train`, but it doesn't wait for space on a full disk."""
    from trainer.storage import files

    files.DISK_FULL_WAIT_S = 0.1
    return train(*arguments)


def codes(ranks: Any, size: int, *arguments: str, function: Callable[..., int] = train,
          **options: Any) -> list[int]:
    """Train in `size` ranks; their exit codes, -N for a death by signal N. Prints their output."""
    ended = ranks.outcomes(size, function, *arguments, group=False, **options)
    print(*(rank.output for rank in ended), sep="")
    for rank in ended:
        assert not rank.hung, rank.output
        if rank.error:
            raise rank.error
    return [-rank.signal if rank.signal else rank.exit_code or rank.value for rank in ended]


def run(ranks: Any, size: int, folder: Path, *arguments: str, code: int = 0,
        **options: Any) -> Path:
    """Train in `size` ranks, which must all end with `code`; returns the run folder."""
    assert codes(ranks, size, *arguments, f"--run-dir={folder}", **options) == [code] * size
    return folder


def until_done(ranks: Any, sizes: int | Sequence[int], folder: Path, *arguments: str,
               **options: Any) -> list[list[int]]:
    """Repeat a command until the run is complete, over stops and deaths; the codes of each start.

    Args:
        sizes: number of ranks, for each start; the last one is used for all further starts.
    """
    sizes = [sizes] if isinstance(sizes, int) else sizes
    ended: list[list[int]] = []
    while not ended or any(ended[-1]):
        assert len(ended) < 30, "the run does not end"
        size = sizes[min(len(ended), len(sizes) - 1)]
        ended.append(codes(ranks, size, *arguments, f"--run-dir={folder}", **options))
        assert 2 not in ended[-1]
    return ended


def metrics(run: Path | str) -> list[dict[str, Any]]:
    return [json.loads(t) for t in (Path(run) / "metrics.jsonl").read_text().splitlines()]


def steps(run: Path | str) -> list[dict[str, Any]]:
    return [line for line in metrics(run) if "loss" in line]


def validations(run: Path | str) -> list[dict[str, Any]]:
    return [line for line in metrics(run) if "val_loss" in line]


def events(run: Path, name: str, **fields: Any) -> list[dict[str, Any]]:
    """The events with this name and these fields."""
    from trainer.telemetry.events import read_events

    return [e for e in read_events(run / "events.jsonl")
            if e["event"] == name and all(e[key] == fields[key] for key in fields)]


def summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())


def state(run: Path, step: int) -> dict[str, Any]:
    return json.loads((run / f"checkpoints/step-{step:08d}/state.json").read_text())


def weights(run: Path | str, step: int) -> dict[str, Any]:
    """The model of a checkpoint, loaded as in a plain script."""
    from safetensors.torch import load_file

    return load_file(Path(run) / f"checkpoints/step-{step:08d}/model.safetensors")


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def fill(stage: Any) -> None:
    """Write the files that every checkpoint has and that aren't written yet, empty."""
    for name in ("model.safetensors", "optimizer.safetensors", "state.json"):
        if not (stage.path / name).exists():
            stage.write(name, b"")


def state_json(*, best: int = 0, **entries: Any) -> bytes:
    """The smallest complete content of a checkpoint's state.json."""
    from trainer.checkpoint.progress import BestTracker, TrainProgress

    progress, tracker = TrainProgress().state_dict(), BestTracker(step=best).state_dict()
    return json.dumps({"progress": progress, "best": tracker, "meter": {}, "optimizer": {},
                       "schedule": {}, "scaler": {}, "parts": {}, **entries}).encode()
