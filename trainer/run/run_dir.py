"""The run folder: identity of the run, number of the attempt, files written once per attempt."""

from __future__ import annotations

import errno
import functools
import os
import platform
import secrets
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint.manifest import LISTED_FILE, check_listed
from trainer.checkpoint.store import Store
from trainer.distributed.world import World
from trainer.errors import (
    PATH_ERRNOS,
    AlreadyFinished,
    CheckpointDamaged,
    ConfigError,
    FileDamaged,
    GaveUp,
    LossDidNotFall,
)
from trainer.resilience.attempts import (
    RUN,
    failure_sentence,
    read_attempts,
    repeated_failures,
)
from trainer.storage import layout, tensorfile
from trainer.storage.files import (
    check_folder,
    display_path,
    make_folder,
    open_regular,
    replace_json,
    when_not_full,
)
from trainer.storage.jsonl import newest_step
from trainer.storage.locks import RunLock
from trainer.storage.records import (
    Kind,
    anything,
    is_count,
    is_flag,
    is_number,
    is_text,
    list_of,
    optional,
    read_json,
    table_of,
)
from trainer.storage.secrets import mask_arguments
from trainer.telemetry.events import Log, read_events

SUMMARY = Kind(
    needed={"step": is_count,
            "best": Kind({"step": is_count, "metric": optional(is_text),
                          "value": optional(is_number)}),
            "test": optional(table_of(optional(is_number)))},
    known={**dict.fromkeys(("skipped", "replaced", "planned_steps"), is_count),
           "stopped_early": is_flag, "final_weights": is_text, "product": LISTED_FILE,
           "overfit": Kind({"first": is_number, "last": is_number, "steps": is_count,
                            "fell": is_flag})})
"""Content of summary.json: the entries that readers use."""
ENVIRONMENT = Kind(known={
    "determinism": Kind({"label": is_text, "why": is_text}), "class_names": list_of(anything),
    "world_size": is_count, "command": list_of(is_text)})
"""Content of environment.json: the entries that readers use."""


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """Id of the run in a folder, and the number of this attempt (0 is the first)."""

    run_id: str
    attempt: int


def identify_run(
    path: Path, world: World, log: Log, *, resume: str,
    mirrored: Mapping[str, Any] | None = None,
) -> RunIdentity:  # fmt: skip
    """Collective. Determine the run's id, new for an empty folder, and the attempt's number. On
    rank 0, `mirrored` describes the run in the mirror."""

    def read() -> dict[str, Any] | None:
        old = _read_identity(path) if world.local_rank == 0 else None
        if old is None:
            if resume == "never" and mirrored is not None:
                raise ConfigError("--resume never: --checkpoint.mirror already holds a run; choose "
                                  "another URL, or omit --resume to continue it.")
            return None
        if mirrored is not None and mirrored["run"] != old["run"]:
            raise ConfigError(
                f"--checkpoint.mirror: it holds another run ({mirrored['run']}, step "
                f"{mirrored['step']}) than --run-dir {display_path(path)} ({old['run']}); choose "
                "another URL for this run, or another --run-dir to continue the other one.")
        restarted = old.get("launch") is not None and old["launch"] == launch_id(world)
        if resume == "never" and not restarted:
            raise ConfigError(f"--resume never: {display_path(path)} already holds a run; choose "
                              "another --run-dir, or omit --resume to continue it.")
        steps = [info.step for info in Store(path / layout.CHECKPOINTS).checkpoints()
                 if info.run == old["run"]]
        return {"run": old["run"], "attempt": old["attempt"], "step": max(steps, default=0)}

    mine = world.fail_together(read)
    # A node with its own disk may rejoin with an empty folder, or with a short run that it started
    # without the others. The run with the most steps is continued.
    remote = world.broadcast_json(mirrored)
    seen = [record for record in (*world.gather_json(mine), remote) if record is not None]
    if not seen:
        return RunIdentity(run_id=world.broadcast_json(secrets.token_hex(8)), attempt=0)
    run = (remote or max(seen, key=lambda record: record["step"]))["run"]
    attempt = 1 + max(record["attempt"] for record in seen if record["run"] == run)
    if mine is not None and mine["run"] != run:
        log.warning(f"{display_path(path)} holds another run ({mine['run']}, step {mine['step']}) "
                    f"than the one being continued ({run}); its checkpoints are kept, but not used")
    return RunIdentity(run_id=run, attempt=attempt)


def _read_identity(path: Path) -> dict[str, Any] | None:
    """The content of run.json, or what checkpoints and events tell without it."""
    try:
        if identity := read_json(path / layout.IDENTITY, RUN):
            return identity
        runs = [info.run for info in Store(path / layout.CHECKPOINTS).checkpoints() if info.run]
        if not runs:
            return None
        attempts = [event["attempt"] for event in read_events(path / layout.EVENTS)
                    if event.get("event") == "start" and "attempt" in event]
        return {"run": runs[-1], "attempt": max(attempts, default=0)}
    except OSError as problem:
        if problem.errno not in PATH_ERRNOS:
            raise
        raise ConfigError(f"--run-dir {display_path(path)}: {problem}; choose a folder that can be "
                          "read and written.") from problem


def refuse_finished(path: Path, world: World, step: int) -> None:
    """Collective. Raise AlreadyFinished if there are the product and a summary of `step`."""
    found = world.gather_json(read_finished(path) if world.local_rank == 0 else None)
    summary = next((s for s in found if s is not None and s["step"] == step), None)
    if summary is not None:
        check_overfit(summary)
        lines = [f"{display_path(path)}: the run is complete; nothing to do",
                 *closing_lines(summary, display_path(path))]
        raise AlreadyFinished("\n".join(lines))


def check_overfit(summary: Mapping[str, Any]) -> None:
    """Raise LossDidNotFall if the summary is of a run with --overfit whose loss did not fall."""
    if (judged := summary.get("overfit")) and not judged["fell"]:
        raise LossDidNotFall(
            f"--overfit {summary['planned_steps']}: the loss of one batch, {judged['first']:.4g}, "
            f"did not fall (the last one is {judged['last']:.4g}), so the task can't learn it. "
            "Check that the loss compares the output with the right targets and that gradients "
            "reach the parameters (trainer.testing.check_task), then --optim.lr and --freeze; and "
            "start again with another --run-dir")


def read_finished(path: Path) -> dict[str, Any] | None:
    """The summary of a run, if its model.safetensors is whole."""
    try:
        check_listed(path / layout.PRODUCT)
    except CheckpointDamaged:
        return None
    is_whole = tensorfile.is_whole(path / layout.PRODUCT)
    return read_json(path / layout.SUMMARY, SUMMARY) if is_whole else None


def closing_lines(summary: Mapping[str, Any], path: str) -> list[str]:
    """The last console lines of a finished run: metrics, and paths of its results."""
    best, test = summary["best"], summary["test"] or {}
    lines = [f"finished at step {summary['step']}{early_end(summary)}"
             + (f", {n} updates skipped" if (n := summary.get("skipped")) else "")
             + (f", {n} bad samples replaced" if (n := summary.get("replaced")) else "")]
    if best["value"] is not None:
        lines.append(f"best {best['metric']} {best['value']:.4f} at step {best['step']}")
    lines += [f"test {name} {value:.4f}" for name, value in test.items()
              if name != "samples" and value is not None]
    if judged := summary.get("overfit"):
        lines.append(f"the loss of one batch went from {judged['first']:.4g} to "
                     f"{judged['last']:.4g} in {judged['steps']} steps")
    return [*lines, f"best weights: {path}/{layout.PRODUCT}",
            f"final weights: {path}/{summary.get('final_weights', layout.CHECKPOINTS)}",
            f"curves: tensorboard --logdir {path}"]


def early_end(summary: Mapping[str, Any]) -> str:
    """What follows "finished" for a run that early stopping has ended."""
    if not summary.get("stopped_early"):
        return ""
    left = f", {n} steps before the planned end" if (
        n := summary.get("planned_steps", 0) - summary["step"]) > 0 else ""
    return f"{left}: stopped early by --eval.patience"


def enter(path: Path, identity: RunIdentity, lock: RunLock, world: World, log: Log) -> None:
    """Collective. Take the run folder's lock for this attempt, and open the event log.

    Rank 0 takes it first, then the first rank of each other node, which finds rank 0's lock in a
    shared folder. On a disk of its own it takes the lock and writes a full copy of the run there.
    """
    take: Callable[[], str | None] = functools.partial(_take, path, identity, lock, world, log)
    warning = world.fail_together(take if world.is_main else lambda: None)
    if world.has_nodes:
        others_turn = world.local_rank == 0 and not world.is_main
        warning = world.fail_together(take if others_turn else lambda: None) or warning
    log.open_events(path / layout.EVENTS, attempt=identity.attempt, nonce=world.nonce)
    if warning:
        log.warning(warning)


def _take(path: Path, identity: RunIdentity, lock: RunLock, world: World, log: Log) -> str | None:
    mine = {"run": identity.run_id, "attempt": identity.attempt, "launch": launch_id(world)}
    try:
        warning = take_lock(path, lock, world)
        if lock.holds:
            _check_writable(path)
            when_not_full(lambda: replace_json(path / layout.IDENTITY, mine), log.warning,
                          wait_s=None if identity.attempt else 0.0)
    except OSError as problem:
        if identity.attempt and problem.errno not in PATH_ERRNOS:
            raise  # no configuration error, since earlier attempts could write; may be temporary
        raise ConfigError(f"--run-dir {display_path(path)}: {problem}; choose a folder that can "
                          "be written.") from problem
    return warning


def take_lock(path: Path, lock: RunLock, world: World) -> str | None:
    """Take the lock of a run folder for this attempt; see `RunLock.take`."""
    make_folder(path)
    for name in layout.FOLDERS:
        check_folder(path / name)
    for name in layout.REPLACED:
        if (path / name).is_dir():
            raise FileDamaged(f"{display_path(path / name)}: this is a folder; remove it")
    launcher = None if world.launch.run_id is None else os.getppid()
    warning = lock.take(launcher_pid=launcher, launch_id=launch_id(world))
    world.write_run_dir(lock.holds)
    return warning


def _check_writable(path: Path) -> None:
    """Raise OSError if an existing file, perhaps of another user, can't be written."""
    for name in layout.APPENDED:
        if name != layout.LOCK and os.path.lexists(path / name):
            os.close(open_regular(path / name, os.O_RDWR))
    for place in (path / layout.CHECKPOINTS, path / layout.TENSORBOARD):
        if place.exists() and not os.access(place, os.R_OK | os.W_OK | os.X_OK,
                                            effective_ids=os.access in os.supports_effective_ids):
            number = errno.EROFS if os.statvfs(place).f_flag & os.ST_RDONLY else errno.EACCES
            raise OSError(number, os.strerror(number), str(place))


def check_room(path: Path, needed: int) -> None:
    """Raise OSError if the next save has no room: its steps would be computed for nothing."""
    if (free := shutil.disk_usage(path).free) < needed:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: the next save needs {needed:,} "
                                    f"bytes and {free:,} are free", str(path))


def begin(path: Path, events: Sequence[Mapping[str, Any]], world: World, log: Log, *,
          position: int, version: str, max_same_step: int) -> None:
    """Collective. Record that this attempt starts, from step `position`. Raises GaveUp if
    `max_same_step` attempts in a row have failed at the same step with this `version` of
    configuration and task; `events` are those of earlier attempts, on rank 0."""
    error = None
    reached = newest_step(path / layout.METRICS) if world.is_main else 0
    row = repeated_failures(read_attempts(events), version=version) if events else []
    if len(row) >= max_same_step:
        first = next((a.cause for a in row if a.cause is not None), None)
        cause = "unknown; the process was killed" if first is None else failure_sentence(first)
        error = GaveUp(
            f"gave up: step {row[0].failed_step} has failed {len(row)} time{'s' * (len(row) > 1)} "
            f"in a row (--restart.max-same-step {max_same_step}). Fix the cause; the same command "
            f"then continues from step {position}. First cause: {cause}")
    log.event("start", world_size=world.size, pid=os.getpid(), launch=launch_id(world),
              version=version, reached=reached)
    world.raise_on_all_ranks(error)


def launch_id(world: World) -> str | None:
    """An id that all attempts of one launcher share (torchrun's own is "none" by default)."""
    launch = world.launch
    if launch.run_id is None:
        return None
    return launch.launch_id or f"{launch.run_id} {launch.master_address} {os.getppid()}"


def clean(path: Path) -> None:
    """Remove temporary files of dead attempts; call it at the start of an attempt."""
    for name in (layout.METRICS, *layout.REPLACED):
        for aside in path.glob(f".{name}.*.tmp"):
            aside.unlink(missing_ok=True)


def environment(world: World, card: Mapping[str, Any], *, label: str, why: str) -> dict[str, Any]:
    """The content of environment.json."""
    return {
        "command": mask_arguments(sys.argv),
        "python": platform.python_version(), "packages": package_versions(),
        "host": platform.node(), "system": platform.platform(),
        "cpu": torch.backends.cpu.get_cpu_capability(), "device": str(world.device),
        "device_name": device_name(world.device), "world_size": world.size,
        "local_size": world.local_size, "threads": world.threads, **card,
        "determinism": {"label": label, "why": why}}


def device_name(device: Any) -> str:
    """The kind of device, on which results depend: the GPU's name, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@functools.cache  # looking them up takes 20 ms
def package_versions() -> dict[str, str | None]:
    """Versions of the packages on which results may depend."""
    return {name: package_version(name) for name in (
        "torch", "torchvision", "numpy", "safetensors", "tensorboard")}


def package_version(name: str) -> str | None:
    """The version of a package; None if it has none."""
    version = getattr(sys.modules.get(name), "__version__", None)
    if version is None:
        try:
            version = metadata.version(name)
        except (metadata.PackageNotFoundError, ValueError):  # or no name of a package
            return None
    return str(version)
