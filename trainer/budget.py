"""Whether a survivor's save fits into the time that launchers give it."""

from __future__ import annotations

from pathlib import Path

from trainer import tensorfile
from trainer.log import read_events
from trainer.state import TrainState
from trainer.store import Store

LAUNCHERS_GRACE_S = 30.0
"""After a rank has died, what launchers give the others before they kill them."""


def why_not(
    events: Path, store: Store, state: TrainState, *, generation: int, interval: int,
    spent_s: float,
) -> str | None:  # fmt: skip
    """Why a save of this step boundary is better not begun; None where it is to be tried.

    It isn't begun where it would be killed half-way *and* a whole checkpoint of the last interval
    is there. How fast a save is, is known from the last one; unknown, it is tried.

    Args:
        events: the run's `events.jsonl`.
        interval: of checkpoints, in steps; 0: there is none.
        spent_s: seconds since the loss of the peer was noticed.
    """
    step = state.progress.step
    kept = max((info.step for info in store.checkpoints() if info.why is None
                and info.generation == generation and info.step <= step), default=None)
    if kept is None or kept <= step - interval:
        return None
    needed_s = seconds_needed(events, sum(tensorfile.size(t) for t in state.tensors().values()))
    left_s = LAUNCHERS_GRACE_S - spent_s
    if needed_s is None or needed_s <= left_s:
        return None
    return (f"step {step} isn't saved: that would take {needed_s:.0f} s, as the last save has "
            f"shown, and launchers leave {left_s:.0f} s; the checkpoint of step {kept} is there")


def seconds_needed(events: Path, size: int) -> float | None:
    """Seconds that a save of so many bytes takes by the last save's speed; None if unknown."""
    saves = [e for e in read_events(events) if e.get("event") == "save" and e.get("bytes")]
    return saves[-1]["seconds"] * size / saves[-1]["bytes"] if saves else None
