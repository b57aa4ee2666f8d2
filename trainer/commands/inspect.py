"""`python -m trainer inspect RUN`: what is in a run folder, for people and (--json) programs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer import folder
from trainer.attempts import read_attempts, sentence
from trainer.errors import CheckpointDamaged
from trainer.log import read_events
from trainer.store import Store


def main(argv: Sequence[str]) -> int:
    """Print what a run folder holds; exit code 2 if there is no run in it."""
    parser = argparse.ArgumentParser(
        prog="trainer inspect",
        description="Checkpoints and their validity, attempts, the step, and how the next start "
        "would go on.",
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--json", action="store_true", help="for programs: one JSON object")
    options = parser.parse_args(argv)
    if folder.read_json(options.run / folder.IDENTITY) is None:
        print(f"{options.run}: there is no run in this folder (no {folder.IDENTITY})")
        return 2
    report = inspect(options.run)
    print(json.dumps(report, indent=2) if options.json else _table(report, options.run))
    return 0


def inspect(run: Path) -> dict[str, Any]:
    """Everything that `--json` prints; each checkpoint is read and compared with its hashes."""
    checkpoints = _checkpoints(run)
    summary = folder.read_json(run / folder.SUMMARY)
    valid = [c for c in checkpoints if c["valid"]]
    newest = max(valid, key=lambda c: (c["generation"], c["step"]), default=None)
    step = newest["step"] if newest else 0
    finished = summary is not None and summary["step"] == step
    determinism = (folder.read_json(run / folder.ENVIRONMENT) or {}).get("determinism", {})
    if checkpoints and not valid:
        following, why = "refused", "there are checkpoints and none is whole"
    else:
        following, why = determinism.get("label", "exact"), determinism.get("why", "")
    return {
        "step": step, "finished": finished, "attempts": _attempts(run),
        "checkpoints": checkpoints, "next": following, "why": why,
    }  # fmt: skip


def _checkpoints(run: Path) -> list[dict[str, Any]]:
    store = Store(run / folder.CHECKPOINTS)
    found = []
    for info in store.checkpoints():
        why = info.why
        if why is None:
            try:
                store.verify(info.step)
            except CheckpointDamaged as error:
                why = str(error)
        found.append({"step": info.step, "generation": info.generation, "valid": why is None,
                      "why": why or "", "kind": info.kind})
    return found


def _attempts(run: Path) -> list[dict[str, Any]]:
    return [
        {"attempt": a.number, "world_size": a.world_size, "start_step": a.start_step,
         "end_step": a.end_step, "end": a.end,
         "cause": None if a.cause is None else sentence(a.cause)}
        for a in read_attempts(read_events(run / folder.EVENTS))
    ]  # fmt: skip


def _table(report: dict[str, Any], run: Path) -> str:
    state = "finished" if report["finished"] else "not finished"
    lines = [f"{run}: step {report['step']}, {state}",
             f"the next start: {report['next']}" + (f" ({report['why']})" * bool(report["why"])),
             "", "attempt  ranks  from  to    ended"]  # fmt: skip
    lines += [f"{a['attempt']:<8} {a['world_size']:<6} {a['start_step']:<5} {a['end_step']:<5} "
              f"{a['end']}" + f": {a['cause']}" * bool(a["cause"]) for a in report["attempts"]]
    lines += ["", "checkpoint  generation  kind      state"]
    lines += [f"{c['step']:<11} {c['generation'] if c['generation'] is not None else '-':<11} "
              f"{c['kind'] or '-':<9} {'whole' if c['valid'] else c['why']}"
              for c in report["checkpoints"]]
    return "\n".join(lines)
