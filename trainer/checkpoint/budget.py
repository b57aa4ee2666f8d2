"""Decide whether an emergency save fits into the launcher's grace time."""

from __future__ import annotations

from pathlib import Path

from trainer.checkpoint.store import Store
from trainer.checkpoint.train_state import TrainState
from trainer.storage import tensorfile
from trainer.telemetry.events import read_events


def why_not(
    events: Path, store: Store, state: TrainState, *, generation: int, interval: int,
    left_s: float,
) -> str | None:  # fmt: skip
    """Why an emergency save of this step boundary should not be started; None to start it.

    It is not started if it would be killed before it completes *and* a complete checkpoint from
    within the last interval exists. The duration is estimated from the speed of the last save;
    without one the save is tried.

    Args:
        events: the run's `events.jsonl`.
        interval: checkpoint interval in steps; 0: no periodic checkpoints.
        left_s: seconds until the launcher kills this rank.
    """
    step = state.progress.step
    kept = max((info.step for info in store.checkpoints() if info.why is None
                and info.generation == generation and info.step <= step), default=None)
    if kept is None or kept <= step - interval:
        return None
    needed_s = seconds_needed(events, sum(tensorfile.size(t) for t in state.tensors().values()))
    if needed_s is None or needed_s <= left_s:
        return None
    return (f"step {step} is not saved: by the speed of the last save this would take "
            f"{needed_s:.0f} s, and the launcher leaves {left_s:.0f} s; the checkpoint of step "
            f"{kept} is complete")


def seconds_needed(events: Path, size: int) -> float | None:
    """Estimated seconds to save `size` bytes at the speed of the last save; None if unknown."""
    saves = [e for e in read_events(events) if e.get("event") == "save" and e.get("bytes")]
    return saves[-1]["seconds"] * size / saves[-1]["bytes"] if saves else None
