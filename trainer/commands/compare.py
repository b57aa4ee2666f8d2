"""`python -m trainer compare RUN_A RUN_B`: check that two runs are bitwise equal."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint import saved_state
from trainer.checkpoint.manifest import CheckpointInfo
from trainer.checkpoint.store import Store
from trainer.config.fields import flag_of
from trainer.config.schema import Config
from trainer.errors import CheckpointDamaged, ConfigError
from trainer.run.run_dir import SUMMARY
from trainer.run.run_source import run_folder
from trainer.storage import layout, tensorfile
from trainer.storage.files import read_file
from trainer.storage.object_store import path_or_url
from trainer.storage.records import parse_json, read_record
from trainer.telemetry.events import writable
from trainer.telemetry.metrics import METRIC_LINE, line_key

COMPARED = ("progress", "best", "meter", "optimizer", "schedule", "scaler", "parts", "ema")


class Digits(str):
    """A number as it is written in a file: 0.0, -0.0 and 0 are three. Never equal to a text."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return type(other) is Digits and str.__eq__(self, other)

    __hash__ = str.__hash__

    def __repr__(self) -> str:
        return str(self)


NOTHING = Digits("nothing")
"""The value of an entry that only the other run has."""


def main(argv: Sequence[str]) -> int:
    """Compare two runs and print the first difference; exit code 0: same bits, 1: not."""
    parser = argparse.ArgumentParser(
        prog="trainer compare",
        description="Compare two runs bit by bit: the last checkpoint (weights, optimizer, "
        "schedule, scaler, progress, position in a stream; random states if both have the same "
        "number of ranks) and metrics.jsonl. The settings and circumstances (threads, versions, "
        "devices, data, code) that differ are printed before the first difference. Exit code 0: "
        "same bits; 1: they differ; 2: a run can't be read or isn't finished.")
    for name in ("run_a", "run_b"):
        parser.add_argument(name, type=path_or_url, help="a run folder, or the URL of its mirror")
    parser.add_argument("--at", type=int, metavar="STEP",
                        help="compare the checkpoints of this step, and the metrics up to it")
    options = parser.parse_args(argv)
    at, needed = options.at, "last" if options.at is None else str(options.at)
    with (run_folder(options.run_a, checkpoint=needed, product=at is None) as run_a,
          run_folder(options.run_b, checkpoint=needed, product=at is None) as run_b):
        first = next(differences(run_a, run_b, at=at), None)
        found = [] if first is None else [*_condition_differences(run_a, run_b, at=at), first]
        note = _source_note(run_a, run_b, at=at)
    print(writable(f"different: {'; '.join(found)}") if found else f"same bits{note}")
    return 1 if found else 0


def differences(run_a: Path, run_b: Path, *, at: int | None = None) -> Iterator[str]:
    """Describe each difference between two runs. Raises ConfigError if one can't be read, is not
    finished, or has no checkpoint of step `at`."""
    infos = [_checkpoint(run, at) for run in (run_a, run_b)]
    if infos[0].step != infos[1].step:
        yield f"the last step is {infos[0].step} and {infos[1].step}"
        return
    yield from _metric_differences(run_a, run_b, at)
    for name in sorted({f for i in infos for f in i.manifest["files"] if f != layout.STATE}):
        if any(name not in info.manifest["files"] for info in infos):
            yield f"{name} is in one checkpoint only"
        else:
            yield from _tensor_differences(
                name, *(tensorfile.load_tensors(info.path / name) for info in infos))
    facts = [_without_sources(_facts(info)) for info in infos]
    for part in COMPARED:
        yield from _value_differences(part, facts[0].get(part), facts[1].get(part))
    rng = [part.get("rng", []) for part in facts]
    if len(rng[0]) == len(rng[1]):
        yield from _value_differences("rng", *rng)
    raw = [read_file(info.path / layout.STATE) for info in infos]
    if raw[0] != raw[1] and any(json.dumps(json.loads(data)).encode() != data for data in raw):
        yield f"{layout.STATE} is written in another way"
    if at is None:
        yield from _tensor_differences(layout.PRODUCT, *(
            tensorfile.load_tensors(run / layout.PRODUCT) for run in (run_a, run_b)))


def _without_sources(facts: dict[str, Any]) -> dict[str, Any]:
    """The facts without the states of a stream's sources: these keep books of their own, such as
    where they were loaded, and may differ at the same place. The place of each lane follows from
    the step and from the first step of its epoch."""
    if "stream" not in facts["parts"]:
        return facts
    stream = {name: value for name, value in facts["parts"]["stream"].items() if name != "feeds"}
    return {**facts, "parts": {**facts["parts"], "stream": stream}}


def _source_note(run_a: Path, run_b: Path, *, at: int | None) -> str:
    """A note if the states of the sources of two equal runs differ, which aren't compared."""
    one, other = ([lane["state"] for lane in _facts(_checkpoint(run, at))["parts"].get(
        "stream", {}).get("feeds", ())] for run in (run_a, run_b))
    return "" if one == other else (
        "\nThe position in the stream and all losses are equal. The states of its sources differ, "
        "as after a restart; they are not compared.")


def _condition_differences(run_a: Path, run_b: Path, *, at: int | None) -> Iterator[str]:
    """Describe what decides bits and differs: settings and circumstances."""
    ignored = {name for name, _, change in Config().leaves() if change == "ignored"}
    tables: list[dict[str, Any]] = []
    for run in (run_a, run_b):
        facts = _facts(_checkpoint(run, at))
        tables.append(facts.get("circumstances", {}) | {
            flag_of(name): value for name, value in facts.get("settings", {}).items()
            if name not in ignored})
    for name in tables[0]:
        if name in tables[1]:
            yield from _value_differences(name.replace("_", " "), tables[0][name], tables[1][name])


def _facts(info: CheckpointInfo) -> dict[str, Any]:
    """The content of state.json, with numbers as they are written."""
    path = info.path / layout.STATE
    read_record(path, saved_state.KIND)
    return _as_written(read_file(path))


def _as_written(data: bytes) -> Any:
    """Parse JSON; numbers become `Digits`."""
    return parse_json(data, parse_int=Digits, parse_float=Digits, parse_constant=Digits)


def _checkpoint(run: Path, at: int | None) -> CheckpointInfo:
    if not run.is_dir():
        raise ConfigError(f"{run}: there is no such run folder.")
    store = Store(run / layout.CHECKPOINTS)
    try:
        if at is not None:
            return store.verify(at)
        summary = read_record(run / layout.SUMMARY, SUMMARY)
        if summary is None:
            raise ConfigError(f"{run}: the run isn't finished (no {layout.SUMMARY}); "
                              "finish it, or compare checkpoints with --at STEP.")
        return store.verify(summary["step"])
    except CheckpointDamaged as error:
        raise ConfigError(f"{run}: {error}") from error


def _metric_differences(run_a: Path, run_b: Path, at: int | None) -> Iterator[str]:
    """Describe the differences of the lines (up to step `at`): the values of each step, then lines
    that are no record, or that are written in another way or order."""
    lines, tables = list[list[bytes]](), list[dict[tuple[int, bool], bytes]]()
    for run in (run_a, run_b):
        lines.append([])
        tables.append({})
        for line in _read_lines(run / layout.METRICS, whole=at is not None):
            key = _line_key(line)
            if key is not None and at is not None and key[0] > at:
                continue
            lines[-1].append(line)
            if key in tables[-1]:
                yield f"metrics.jsonl of {run} has a step twice"
            if key is not None:
                tables[-1][key] = line
    for key in sorted({**tables[0], **tables[1]}):
        what = f"metrics.jsonl, {'validation of ' if key[1] else ''}step {key[0]}"
        pair = [_as_written(table[key]) if key in table else None for table in tables]
        yield from _value_differences(what, *pair)
    for number, (left, right) in enumerate(itertools.zip_longest(*lines), 1):
        if left != right:
            yield from _value_differences(f"metrics.jsonl, line {number}", left, right)


def _read_lines(path: Path, *, whole: bool) -> list[bytes]:
    """The lines of a file, the last one empty or cut; without it if they are to be `whole`."""
    try:
        lines = read_file(path).split(b"\n")
    except FileNotFoundError:
        return []
    return lines[:-1] if whole else lines


def _line_key(line: bytes) -> tuple[int, bool] | None:
    """The key of a metric line; None for any other line."""
    try:
        record = parse_json(line)
    except ValueError:
        return None
    return None if METRIC_LINE.problem(record) else line_key(record)


def _tensor_differences(
    what: str, left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]
) -> Iterator[str]:
    for key in sorted({**left, **right}):
        if key not in left or key not in right:
            yield f"{what}: {key} is in one run only"
            continue
        a, b = left[key], right[key]
        if a.dtype != b.dtype or a.shape != b.shape:
            yield f"{what}: {key} is {a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}"
        elif a.numel():
            # Bytes: NaN may equal NaN, and 0 differs from -0.
            a, b = (t.contiguous().reshape(t.numel(), 1).view(torch.uint8) for t in (a, b))
            if count := int((a != b).any(1).sum()):
                yield f"{what}: {key} differs in {count} of {len(a)} elements"


def _value_differences(what: str, left: Any, right: Any) -> Iterator[str]:
    if isinstance(left, dict) and isinstance(right, dict):
        for key in sorted({**left, **right}):
            yield from _value_differences(f"{what}: {key}" if what in COMPARED else
                                          f"{what}, {key}", left.get(key, NOTHING),
                                          right.get(key, NOTHING))
    elif type(left) is not type(right) or left != right:
        shown = [text if len(text) <= 80 else text[:77] + "..."
                 for text in (repr(left), repr(right))]
        yield f"{what} is {' and '.join(shown)}"
