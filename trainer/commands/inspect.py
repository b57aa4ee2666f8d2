"""`python -m trainer inspect RUN`: print the contents of a run folder, as text or as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.checkpoint.manifest import check_listed
from trainer.checkpoint.saved_state import SavedState
from trainer.checkpoint.store import Store
from trainer.commands.report import history
from trainer.config import command_line, compatibility
from trainer.errors import CheckpointDamaged, ConfigError
from trainer.resilience.attempts import failure_sentence, repeated_failures
from trainer.run import circumstances, run_dir
from trainer.run.run_dir import ENVIRONMENT, early_end
from trainer.storage import layout
from trainer.storage.records import read_json
from trainer.telemetry.events import writable


def main(argv: Sequence[str]) -> int:
    """Print the contents of a run folder."""
    parser = argparse.ArgumentParser(
        prog="trainer inspect",
        description="Print the checkpoints and their validity, the attempts, the step, the uses of "
        "the wall time, and what the next start would do.")
    parser.add_argument("run", type=Path)
    parser.add_argument("others", type=Path, nargs="*", default=[], metavar="other",
                        help="folders of the same run on other nodes, for their events")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    report = inspect(options.run, *options.others)
    print(json.dumps(report, indent=2) if options.json else writable(_table(report, options.run)))
    return 0


def inspect(run: Path, *others: Path) -> dict[str, Any]:
    """Return the object that `--json` prints. Each checkpoint is read and its hashes are verified.
    `others` are folders of the same run on other nodes, for their events."""
    story = history.read_history(run, *others)
    found = checkpoints(run)
    valid = [c for c in found if c["valid"]]
    damage = story.damage + _product_damage(run)
    newest = max(valid, key=lambda c: (c["generation"], c["step"]), default=None)
    step = newest["step"] if newest else 0
    finished = story.summary is not None and story.summary["step"] == step
    if found and not valid:
        kind, why, then = "refused", "there are checkpoints and none is whole", "fails"
    elif finished and run_dir.read_finished(run) is None:
        kind, why, then = *resume_label(run, step), f"writes {layout.PRODUCT} again"
    elif finished:
        kind, why, then = *resume_label(run, step), "nothing to do: the run is complete"
    else:
        kind, why, then = _following(run, story, step, has_checkpoint=newest is not None)
    running = story.owner is not None
    if running:
        then = f"is refused while the run is in progress; afterwards: {then}"
    return {
        "step": step, "finished": finished, "running": running,
        "early_end": early_end(story.summary) if finished and story.summary else "",
        "attempts": [_attempt(times) for times in story.attempt_times],
        "world_sizes": sorted({p.attempt.world_size for p in story.attempt_times}),
        "checkpoints": found, "next": kind, "why": why, "does": then,
        "wall_s": round(story.wall_s, 6),
        "goodput": {part: round(seconds, 6) for part, seconds in story.goodput.items()},
        "lost_steps": story.lost_steps, "damage": damage}


def _product_damage(run: Path) -> list[str]:
    """What is wrong with the model of a finished run."""
    path = run / layout.PRODUCT
    try:
        check_listed(path)
    except CheckpointDamaged as error:
        return [str(error)] if path.exists() else []
    return []


def checkpoints(run: Path) -> list[dict[str, Any]]:
    """Return each checkpoint of a run, oldest first, with its validity."""
    store = Store(run / layout.CHECKPOINTS)
    found = []
    for info in store.checkpoints():
        why = info.why or ""
        if not why:
            try:
                store.verify(info.step)
            except CheckpointDamaged as error:
                why = str(error)
        found.append({"step": info.step, "generation": info.generation, "valid": not why,
                      "why": why, "kind": info.kind})
    return found


def _attempt(times: history.AttemptTimes) -> dict[str, Any]:
    """Describe an attempt by its events. The folder of a node has those of its own ranks only."""
    a = times.attempt
    return {"attempt": a.number, "world_size": a.world_size, "start_step": a.start_step,
            "end_step": a.end_step, "end": a.end, "seconds": round(times.over - times.begun, 6),
            "cause": None if a.cause is None else failure_sentence(a.cause)}


def _following(
    run: Path, story: history.History, step: int, *, has_checkpoint: bool
) -> tuple[str, str, str]:
    """Return what the same command would do now: (label, reason, description)."""
    attempts = [p.attempt for p in story.attempt_times]
    limit = story.config.get("restart.max_same_step", 3)
    version = next((a.version for a in reversed(attempts)), None) or ""
    failures = repeated_failures(attempts, version=version)
    if len(failures) >= limit:
        causes = [f": {failure_sentence(a.cause)}" for a in failures if a.cause is not None]
        why = f"step {failures[0].failed_step} has failed {len(failures)} times in a row"
        return ("refused", why + "".join(causes[:1]),
                "gives up, unless the configuration or the task's file has changed")
    if not has_checkpoint:
        return "exact", "", "begins at step 0: there is no checkpoint"
    return *resume_label(run, step), f"continues from step {step}"


def resume_label(run: Path, step: int) -> tuple[str, str]:
    """Return the label of a start from a checkpoint (exact, equivalent or refused) and the reason,
    if it has the configuration, ranks and kind of device of the last one, and the libraries and
    code here. Nothing of the run is imported: of the task's settings the last start has judged.
    """
    determinism = (read_json(run / layout.ENVIRONMENT, ENVIRONMENT) or {}).get("determinism", {})
    last = determinism.get("label", "exact"), determinism.get("why", "")
    try:
        saved = SavedState.read(run / layout.CHECKPOINTS / layout.step_name(step))
    except (CheckpointDamaged, OSError):  # a running training may delete it
        return last
    if not saved.settings or not saved.circumstances:
        return last
    then = saved.circumstances
    try:
        config = command_line.load_without_task(run / layout.CONFIG)
        versions = {n: circumstances.package_version(n) for n in then.get("packages", {})}
        now = {**then, **circumstances.library_versions(), "packages": versions,
               "code": circumstances.code_on_disk(then.get("code", {}))}
        settings = {n: v for n, v in saved.settings.items() if not n.startswith("task.")}
        verdict = compatibility.compare_settings(config, settings, before=saved.inexact,
                                                 now=now, then=then)
    except ConfigError as error:
        return ("refused", str(error)) if "--accept" in str(error) else last
    # The last start may have had a reason that isn't known here, such as its kernels.
    return last if verdict.label == "exact" else (verdict.label, verdict.why)


def _table(report: dict[str, Any], run: Path) -> str:
    state = ("finished" + report["early_end"] if report["finished"] else
             "running" if report["running"] else "not finished")
    wall_s, parts = report["wall_s"], report["goodput"]
    lines = [f"{run}: step {report['step']}, {state}",
             f"the next start {report['does']}",
             f"it would be {report['next']}" + f": {report['why']}" * bool(report["why"])]
    if wall_s > 0:
        uses = ", ".join(
            f"{part} {seconds:.1f} s" for part, seconds in parts.items() if seconds >= 0.05)
        lines.append(f"goodput {parts['useful'] / wall_s:.1%} of {wall_s:.1f} s: {uses}; "
                     f"{report['lost_steps']} steps repeated")
    lines += ["", "attempt  ranks  from  to    seconds  ended"]
    lines += [f"{a['attempt']:<8} {a['world_size']:<6} {a['start_step']:<5} {a['end_step']:<5} "
              f"{a['seconds']:<8.1f} {a['end']}" + f": {a['cause']}" * bool(a["cause"])
              for a in report["attempts"]]
    lines += ["", "checkpoint  generation  kind      state"]
    lines += [f"{c['step']:<11} {c['generation'] if c['generation'] is not None else '-':<11} "
              f"{c['kind'] or '-':<9} {'whole' if c['valid'] else c['why']}"
              for c in report["checkpoints"]]
    lines += [""] * bool(report["damage"]) + [f"damaged: {what}" for what in report["damage"]]
    return "\n".join(lines)
