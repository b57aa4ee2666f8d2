"""`python -m trainer inspect RUN`: print what is in a run folder or its mirror, as text or JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.checkpoint.manifest import check_listed
from trainer.checkpoint.mirror import DATA, FINISHED, RECORDS, Mirror, MirrorEntry, total_bytes
from trainer.checkpoint.saved_state import SavedState
from trainer.checkpoint.store import Store
from trainer.commands.report import history
from trainer.commands.report.figures import text_table
from trainer.config import command_line, compatibility
from trainer.errors import CheckpointDamaged, ConfigError
from trainer.resilience.attempts import failure_sentence, repeated_failures
from trainer.run import circumstances, run_dir
from trainer.run.mirroring import MIRROR
from trainer.run.run_dir import ENVIRONMENT, early_end
from trainer.run.run_source import reading_mirror, run_folder
from trainer.storage import files, layout
from trainer.storage.object_store import path_or_url
from trainer.storage.records import read_json
from trainer.telemetry.events import writable


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="trainer inspect",
        description="Print the checkpoints and their validity, the attempts, the step, the uses of "
        "the wall time, and what the next start would do.")
    parser.add_argument("run", type=path_or_url, help="a run folder, or the URL of its mirror, of "
                        "which all files are read")
    parser.add_argument("others", type=Path, nargs="*", default=[], metavar="other",
                        help="folders of the same run on other nodes, for their events")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    if isinstance(options.run, str):
        report = inspect_url(options.run, *options.others)
    else:
        report = inspect(options.run, *options.others)
        if (owned := read_json(options.run / layout.MIRROR, MIRROR)) is not None:
            report["mirror"] = _mirror_beside(owned["url"])
    print(json.dumps(report, indent=2) if options.json else writable(_table(report, options.run)))
    return 0


def inspect(
    run: Path, *others: Path, found: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Return the object that `--json` prints. Each checkpoint is read and its hashes are verified,
    unless they are `found` already. `others` are folders of the same run on other nodes, for their
    events."""
    story = history.read_history(run, *others)
    if found is None:
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
    try:
        check_listed(run / layout.PRODUCT)
    except CheckpointDamaged as error:
        return [str(error)] * (run / layout.PRODUCT).exists()
    return []


def inspect_url(url: str, *others: Path) -> dict[str, Any]:
    """The same of a run in a mirror, whose checkpoints are read there; its entry `mirror` has what
    else is there."""
    with run_folder(url) as folder, reading_mirror(url) as mirror:
        listed = list_mirror(mirror, verify=True)
        found = [c for c in listed["checkpoints"] if c["valid"]]
        if found:  # the label of the next start depends on its state
            entry = MirrorEntry(found[-1]["generation"], found[-1]["step"])
            path = folder / layout.CHECKPOINTS / layout.step_name(entry.step)
            files.make_folder(path)
            files.replace_bytes(path / layout.STATE,
                                mirror.content(mirror.manifest(entry), layout.STATE))
        return inspect(folder, *others, found=listed["checkpoints"]) | {"mirror": listed}


def _mirror_beside(url: str) -> dict[str, Any]:
    """What is in the mirror of a run folder, by its manifests."""
    try:
        with reading_mirror(url) as mirror:
            return list_mirror(mirror)
    except ConfigError as error:
        return {"url": url, "why": str(error)}


def list_mirror(mirror: Mirror, *, verify: bool = False) -> dict[str, Any]:
    """The content of a mirror: its owner, checkpoints, products, the size of the records, and files
    without a manifest. A checkpoint is valid if its files have the right sizes; to `verify`, all
    are read."""
    sizes = dict(mirror.store.list())
    owner, data = mirror.owner(), {key for key in sizes if key.startswith(f"{DATA}/")}

    def describe(entry: MirrorEntry) -> dict[str, Any]:
        fields: dict[str, Any] = {"step": entry.step, "generation": entry.generation}
        try:
            manifest = mirror.manifest(entry)
            of_data = {f"{manifest['data']}/{name}": f for name, f in manifest["files"].items()}
            data.difference_update(of_data)
            fields |= {"bytes": total_bytes(manifest), "kind": manifest["kind"]}
            if wrong := [key for key, f in of_data.items() if sizes.get(key) != f["bytes"]]:
                raise CheckpointDamaged(f"{wrong[0]} is missing or has another size")
            if verify:
                mirror.verify(entry)
        except CheckpointDamaged as error:
            return {"bytes": None, "kind": None, **fields, "valid": False, "why": str(error)}
        return fields | {"valid": True, "why": ""}

    return {
        "url": mirror.store.url, "owner": None if owner is None else dataclasses.asdict(owner[0]),
        "checkpoints": [describe(entry) for entry in mirror.entries()],
        "products": [describe(entry) for entry in mirror.entries(FINISHED)],
        "records_bytes": sum(n for key, n in sizes.items() if key.startswith(f"{RECORDS}/")),
        "orphans": {"objects": len(data), "bytes": sum(sizes[key] for key in data)}}


def checkpoints(run: Path) -> list[dict[str, Any]]:
    """Return each checkpoint of a run, oldest first, with its validity."""
    store = Store(run / layout.CHECKPOINTS)
    found = []
    for info in store.checkpoints():
        why = ""
        try:
            store.verify(info.step)
        except CheckpointDamaged as error:
            why = str(error)
        found.append({"step": info.step, "generation": info.generation, "valid": not why,
                      "why": why, "kind": info.kind,
                      "bytes": total_bytes(info.manifest) if info.manifest else None})
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
        versions = {n: run_dir.package_version(n) for n in then.get("packages", {})}
        now = {**then, **circumstances.library_versions(), "packages": versions,
               "code": circumstances.code_on_disk(then.get("code", {}))}
        settings = {n: v for n, v in saved.settings.items() if not n.startswith("task.")}
        verdict = compatibility.compare_settings(config, settings, before=saved.inexact,
                                                 now=now, then=then)
    except ConfigError as error:
        return ("refused", str(error)) if "--accept" in str(error) else last
    # The last start may have had a reason that isn't known here, such as its kernels.
    return last if verdict.label == "exact" else (verdict.label, verdict.why)


def _mirror_lines(mirror: dict[str, Any]) -> list[str]:
    if "why" in mirror:
        return ["", f"mirror not read: {mirror['why']}"]
    owner, orphans = mirror["owner"], mirror["orphans"]
    who = "no owner" if owner is None else (
        f"owner attempt {owner['attempt']} on {owner['host']}, generation {owner['generation']}")
    saved, products = ([f"{c['step']} (generation {c['generation']}, {_size(c['bytes'])})"
                        + f", damaged: {c['why']}" * (not c["valid"]) for c in mirror[kind]]
                       for kind in ("checkpoints", "products"))
    lines = ["", f"mirror {mirror['url']}: {who}", f"  steps {', '.join(saved) or 'none'}"]
    lines += [f"  product of step {product}" for product in products]
    lines += [f"  records {_size(mirror['records_bytes'])}"]
    lines += [f"  {orphans['objects']} files ({_size(orphans['bytes'])}) without a manifest: of an "
              "upload in progress, or left for the next start to delete"] * bool(orphans["objects"])
    return lines


def _size(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e6:.3g} MB"


def _table(report: dict[str, Any], run: Path | str) -> str:
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
    lines += ["", text_table([["attempt", "ranks", "from", "to", "seconds", "ended"], *(
        [str(a["attempt"]), str(a["world_size"]), str(a["start_step"]), str(a["end_step"]),
         f"{a['seconds']:.1f}", a["end"] + f": {a['cause']}" * bool(a["cause"])]
        for a in report["attempts"])])]
    lines += ["", text_table([["checkpoint", "generation", "kind", "size", "state"], *(
        [str(c["step"]), "-" if c["generation"] is None else str(c["generation"]), c["kind"] or "-",
         _size(c["bytes"]), "whole" if c["valid"] else c["why"]] for c in report["checkpoints"])])]
    lines += [""] * bool(report["damage"]) + [f"damaged: {what}" for what in report["damage"]]
    return "\n".join(lines + (_mirror_lines(report["mirror"]) if "mirror" in report else []))
