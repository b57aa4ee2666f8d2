"""Train in forked ranks by the real command line, and read the results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def train(*arguments: str) -> int:
    """In a rank: the exit code of `python -m trainer ARGUMENTS`.

    One thread: more would wait for each other wherever another process takes a core.
    """
    from trainer.__main__ import main

    return main([*arguments, "--world.threads=1"])


def metrics(run: Path | str) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(t) for t in (Path(run) / "metrics.jsonl").read_text().splitlines()]


def steps(run: Path | str) -> list[dict[str, Any]]:
    """The lines of training steps."""
    return [line for line in metrics(run) if "loss" in line]


def validations(run: Path | str) -> list[dict[str, Any]]:
    """The lines of validations."""
    return [line for line in metrics(run) if "val_loss" in line]


def weights(run: Path | str, step: int) -> dict[str, Any]:
    """The model of a checkpoint, loaded as in a plain script."""
    from safetensors.torch import load_file

    return load_file(Path(run) / f"checkpoints/step-{step:08d}/model.safetensors")


def state_json(*, best: int = 0, **entries: Any) -> bytes:
    """The smallest complete content of a checkpoint's state.json."""
    from trainer.checkpoint.progress import BestTracker, TrainProgress

    progress, tracker = TrainProgress().state_dict(), BestTracker(step=best).state_dict()
    return json.dumps({"progress": progress, "best": tracker, "meter": {}, "optimizer": {},
                       "schedule": {}, "scaler": {}, "parts": {}, **entries}).encode()
