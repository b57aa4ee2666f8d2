"""Summary of a run: figures and notable events."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.commands.report.history import History
from trainer.resilience.attempts import Event

ORDINARY = ("start", "fresh", "restore", "first-step", "save", "lost-peer")
"""Events of every healthy run, and `lost-peer`, which follows the failure of another rank."""

WINDOWS = 150
"""Largest number of timing lines in a plot; more lines are summed in groups."""

STEP_PARTS = ("data", "compute", "communication", "save")


def notable_events(history: History) -> list[tuple[float, Event, str]]:
    """Return the notable events as (seconds since the start, event, description).

    An event that several ranks report appears once. Secondary failures, which follow from the
    failure of another rank, are left out.
    """
    found, seen = list[tuple[float, Event, str]](), set[tuple[Any, ...]]()
    for event in history.events:
        name = event["event"]
        if name in ORDINARY or event.get("echo") or event.get("error") == "StaleAttempt":
            continue
        what = event.get("fault") or event.get("why") or event.get("what") or ""
        key = (event["attempt"], name, event.get("at_step", event["step"]), what)
        if key not in seen:
            seen.add(key)
            text = f"{name}: {what}" if what else name
            found.append((event["time"] - history.begun, event, text))
    return found


def affected_rank(event: Event) -> int:
    """Return the rank that an event is about: for a hang its culprit, not the reporting rank."""
    culprit = event.get("culprit")
    return event["rank"] if culprit is None else culprit


def figures(history: History) -> dict[str, Any]:
    """Return the figures of a run by name."""
    steps, summary = history.steps, history.summary or {}
    last = steps[-1] if steps else {}
    norms, limit = [s.get("grad_norm") for s in steps], history.config.get("clip.norm") or 0.0
    half = norms[len(norms) // 2 :]
    timing = [line for line in history.timing if line["step_s"][0]]
    count = sum(line["steps"] for line in timing)
    sums = {part: sum(line[f"{part}_s"][0] or 0.0 for line in timing)
            for part in ("step", "data", "compute", "communication", "save")}
    faults = [e for e in history.events if e["event"] == "fault"]
    memory = [m for line in timing for m in line["memory_mb"] if m]
    best = summary.get("best") or {}
    return {
        "step": last.get("step", 0), "finished": history.summary is not None
        and history.summary.get("step") == last.get("step"),
        "attempts": len(history.attempt_times), "faults": len(faults),
        "skipped": sum(bool(s.get("skipped")) for s in steps), "lost_steps": history.lost_steps,
        "wall_s": history.wall_s, "goodput": history.useful_share,
        "goodput_running": history.useful_share_running, "parts_s": history.goodput,
        "loss": last.get("loss"), "best": best.get("value"), "best_metric": best.get("metric"),
        "best_step": best.get("step"), "test": summary.get("test"),
        "clip_norm": limit, "clipped": _share(norms, limit), "clipped_last_half": _share(
            half, limit),
        "step_s": sums["step"] / count if count else None,
        "split_s": {part: value / count for part, value in sums.items()} if count else None,
        "samples_per_s": sum(line["samples"] for line in timing) / sums["step"] if (
            sums["step"]) else None,
        "memory_mb": max(memory, default=None),
    }  # fmt: skip


def timing_windows(timing: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the lines of timing.jsonl, summed in at most `WINDOWS` groups.

    A group has the largest memory, and lines without the times of every rank are left out.
    """
    lines = [line for line in timing if line["steps"]]
    if len(lines) <= WINDOWS:
        return lines
    lines = [line for line in lines if None not in line["step_s"]]
    size, found = math.ceil(len(lines) / WINDOWS), list[Mapping[str, Any]]()
    for i in range(0, len(lines), size):
        group = [line for line in lines[i : i + size]
                 if len(line["step_s"]) == len(lines[i]["step_s"])]
        whole: dict[str, Any] = {"step": group[-1]["step"]}
        whole |= {key: sum(line[key] for line in group) for key in ("steps", "samples")}
        for key in ("step_s", *(f"{part}_s" for part in STEP_PARTS), "memory_mb"):
            reduce = max if key == "memory_mb" else sum
            by_rank = zip(*(line[key] for line in group), strict=True)
            whole[key] = [reduce(values) for values in by_rank]
        found.append(whole)
    return found


def _share(norms: Sequence[float | None], limit: float) -> float | None:
    """Return the share of steps whose gradient was clipped."""
    known = [norm for norm in norms if norm is not None]
    return sum(norm > limit for norm in known) / len(known) if known and limit else None
