"""Check that the code still computes the same bits as an earlier commit.

    python scripts/same_bits_as.py COMMIT [--only CASE] [--keep FOLDER]

Each case trains three short runs with the same interpreter and the same flags:

    straight   old code, undisturbed
    killed     new code, one rank killed and restarted
    finished   old code until a rank is killed for good, then new code until the end

`killed` and `finished` must have the bits of `straight`. This script compares tensors, metrics,
state and configuration by itself, and also calls the new code's `python -m trainer compare`. The
old code is a git worktree of COMMIT; packages that it needs and that are not installed are
installed beside it for the time of the check. The new code is a copy of the checkout that holds
this script, with its uncommitted changes, so edits during the check have no effect. Takes 2 to 4
minutes on 2 cores.

Exit codes: 0 same bits; 1 something differs, and a table names it; 2 wrong options, or a tree can't
be made, or a package not be installed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent

PER_RUN = ("state.json: settings.run", "state.json: settings.inject", "state.json: lines",
           "state.json: record*",
           "summary.json: attempts", "summary.json: save_waits", "summary.json: memory.*",
           "summary.json: model.safetensors", "*log.tensorboard_every")
"""Entries that may differ between equal runs: paths, faults, memory, a sentence, `lines`, those
lines of metrics.jsonl that weren't yet in the file when the checkpoint was saved, and a setting of
TensorBoard with another default."""
RECORDED = ("config.toml: *", "summary.json: planned_steps", "summary.json: product.*",
            "state.json: settings.*",
            "state.json: circumstances.*")
"""Entries that one side may lack: settings and facts that were added since, and settings that
nothing reads, which the new code doesn't record (or as None)."""
PER_WORLD = ("state.json: circumstances.world_size", "state.json: rng")
"""Entries that differ between two equal runs of different numbers of ranks."""

JOBS = 2  # cases at once: half the time of a run is the import of torch, by one process
LIMIT_S = 300.0  # of one command
SHOWN = 4  # differences of one run in the table


@dataclass(frozen=True)
class Case:
    """A configuration that both sides train."""

    name: str
    world: int  # number of ranks. The last one is killed in the backward pass of step 7
    arguments: str  # recipe and flags; the first checkpoint is saved before step 7
    twin: str = ""  # an earlier case with the same bits on another number of ranks


_SAMPLE = ("--steps 12 --batch.global-size 96 --batch.micro-size 16 --checkpoint.every 4 "
           "--eval.every 6")
_RECIPE = "--steps 10 --checkpoint.every 3 --eval.every 5"
CASES = (
    Case("sample-1", 1, _SAMPLE),
    Case("sample-2", 2, _SAMPLE),
    Case("sample-3", 3, _SAMPLE),
    Case("canonical-1", 1, f"{_SAMPLE} --parallel.reduction canonical"),
    Case("canonical-3", 3, f"{_SAMPLE} --parallel.reduction canonical", twin="canonical-1"),
    Case("spiral", 2, f"spiral {_RECIPE}"),
    Case("spiral-options", 2, f"spiral {_RECIPE} --optim.name sgd --optim.ema 0.9 --clip.value 0.1 "
         "--schedule.name plateau --nonfinite.spike-z 10 --inject nan:step=4"),
    Case("text", 2, f"text {_RECIPE} --batch.global-size 16 --batch.micro-size 4 "
         "--task.context 64 --precision.dtype bf16 --precision.recompute-every 1"),
    Case("text-stream", 2, f"text-stream {_RECIPE} --batch.global-size 16 --data.workers 1 "
         "--task.context 64"),
    Case("shapes", 1, f"shapes {_RECIPE} --batch.global-size 16 --batch.micro-size 8"),
)


class Check:
    """Runs cases with the source trees `old` and `new`; run folders and logs are in `runs`."""

    def __init__(self, old: Path, new: Path, runs: Path) -> None:
        self.old, self.new, self.runs = old, new, runs

    def case(self, case: Case) -> list[str]:
        """The differences of one case, each with the name of its run."""
        straight, killed, finished = (self.runs / case.name / name
                                      for name in ("straight", "killed", "finished"))
        fault = f"kill:rank={case.world - 1}:step=7:phase=backward"
        starts = (  # tree, folder, restarts, whether a rank is killed, expected exit code
            (self.old, straight, 0, False, 0), (self.new, killed, 1, True, 0),
            (self.old, finished, 0, True, 1), (self.new, finished, 0, True, 0),
        )
        for tree, run, restarts, kill, expected in starts:
            command = ["-m", "launch", "--nproc-per-node", str(case.world), "--max-restarts",
                       str(restarts), "--", *case.arguments.split(), "--world.threads", "1",
                       "--device", "cpu", "--run-dir", str(run)]
            code, output = self.python(tree, run, *command, *["--inject", fault] * kill)
            if code != expected:
                return [f"{run.name}: exit code {code} of the {tree.name} code, not {expected}: "
                        f"{one_line(output)}"]
        return [f"{run.name}: {difference}" for run in (killed, finished)
                for difference in (*self.restart(run), *self.differences(straight, run))]

    def restart(self, run: Path) -> Iterator[str]:
        """Deviations from one exact restart from a checkpoint."""
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        found = [(event["at_step"], event["label"]) for event in events
                 if event["event"] == "restore" and event["rank"] == 0]
        if len(found) != 1 or found[0][0] < 1 or found[0][1] != "exact":
            yield f"events.jsonl: restarts (step, label) are {found}, not one exact restart"

    def differences(self, left: Path, right: Path, ignored: tuple[str, ...] = ()) -> list[str]:
        """Differences of two runs, found by this script and by `trainer compare`."""
        a, b = dict(entries(left)), dict(entries(right))
        found = [f"{key}: {a.get(key, 'nothing'):.70} | {b.get(key, 'nothing'):.70}"
                 for key in {**a, **b} if a.get(key) != b.get(key)
                 and not any(fnmatchcase(key, p) for p in (*PER_RUN, *ignored))
                 and not (any(fnmatchcase(key, p) for p in RECORDED)
                          and (key not in a or b.get(key, "None") == "None"))]
        if len(found) > SHOWN:
            found[SHOWN:] = [f"and {len(found) - SHOWN} more"]
        code, output = self.python(
            self.new, right, "-m", "trainer", "compare", str(left), str(right))
        if code:
            found.append(f"trainer compare: exit code {code}: {one_line(output)}")
        return found

    def python(self, tree: Path, run: Path, *arguments: str) -> tuple[int, str]:
        """Exit code and output of `python ARGUMENTS` with the packages of a tree; -1: timeout."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        environment["PYTHONPATH"] = os.pathsep.join(
            (str(tree), *[str(packages_of(tree))] * (tree == self.old)))
        run.parent.mkdir(parents=True, exist_ok=True)
        with run.with_suffix(".log").open("a+") as log:
            print("$", tree.name, *arguments, file=log, flush=True)
            start = log.tell()
            try:
                code = subprocess.run(
                    [sys.executable, *arguments], cwd=tree, env=environment, timeout=LIMIT_S,
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log).returncode
            except subprocess.TimeoutExpired:
                code = -1
            log.seek(start)
            return code, log.read()

    def verify_imports(self) -> None:
        """Exit with 2 if Python would import the packages of another place than the tree."""
        code = "import launch, trainer\nprint(*launch.__path__, *trainer.__path__)"
        for tree in (self.old, self.new):
            _, output = self.python(tree, self.runs / f"imports-{tree.name}", "-c", code)
            if output.split() != [str(tree / "launch"), str(tree / "trainer")]:
                stop(f"in {tree} Python imports other packages: {output}")


def packages_of(tree: Path) -> Path:
    """Where the packages are that only this tree needs."""
    return tree.with_name(f"{tree.name}-packages")


def install_missing(tree: Path) -> None:
    """Install what the project of a tree depends on and this environment lacks."""
    project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
    missing = [line for line in project["dependencies"]
               if not any(metadata.distributions(name=re.split(r"[^\w.-]", line)[0]))]
    if missing:
        done = subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--target",
                               str(packages_of(tree)), *missing], capture_output=True, text=True)
        if done.returncode:
            stop(f"the old code needs {', '.join(missing)}: {one_line(done.stderr)}")


def entries(run: Path) -> Iterator[tuple[str, str]]:
    """Everything in a run folder that must be equal, as ("FILE: KEY", text)."""
    checkpoint = max((run / "checkpoints").glob("step-*"))
    yield "checkpoints: last", checkpoint.name
    for number, line in enumerate((run / "metrics.jsonl").read_text().splitlines(), 1):
        yield f"metrics.jsonl: line {number}", line
    tables = {path.name: json.loads(path.read_text())
              for path in (run / "summary.json", checkpoint / "state.json")}
    tables["config.toml"] = tomllib.loads((run / "config.toml").read_text())
    for name, table in tables.items():
        yield from ((f"{name}: {key}", text) for key, text in leaves(table))
    for path in (run / "model.safetensors", *sorted(checkpoint.glob("*.safetensors"))):
        yield from ((f"{path.relative_to(run)}: {name}", text) for name, text in tensors(path))


def tensors(path: Path) -> Iterator[tuple[str, str]]:
    """Name, and dtype, shape and hash of the bytes, of each tensor in a safetensors file."""
    content = path.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    for name, about in json.loads(content[8:begin]).items():
        if name != "__metadata__":
            first, end = (begin + offset for offset in about["data_offsets"])
            digest = hashlib.sha256(content[first:end]).hexdigest()
            yield name, f"{about['dtype']} {about['shape']} sha256 {digest}"


def leaves(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted key and text of each value in nested tables."""
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, repr(value)


def one_line(output: str) -> str:
    return " ".join(output.split())[-200:]


def git(*arguments: str) -> str:
    """Output of a git command in this repository; exits with 2 if it fails."""
    done = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode:
        stop(done.stderr.strip())
    return done.stdout


def stop(why: str) -> None:
    print(f"same_bits_as: {why}", file=sys.stderr)
    raise SystemExit(2)


def copy_checkout(target: Path) -> None:
    """Copy the files of this checkout that git tracks or doesn't ignore."""
    for name in git("ls-files", "-co", "--exclude-standard", "-z").split("\0"):
        if name and (REPOSITORY / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, target / name)


def report(check: Check, cases: list[Case]) -> dict[str, list[str]]:
    """Differences by case; prints a line for each case when it ends."""
    results: dict[str, list[str]] = {}

    def timed(case: Case) -> tuple[Case, list[str], float]:
        start = time.monotonic()
        try:
            found = check.case(case)
        except (OSError, ValueError, LookupError) as error:  # a file is missing or isn't readable
            found = [f"{type(error).__name__}: {error}"]
        return case, found, time.monotonic() - start

    with ThreadPoolExecutor(JOBS) as pool:
        for future in as_completed([pool.submit(timed, case) for case in cases]):
            case, results[case.name], seconds = future.result()
            verdict = "DIFFERS" if results[case.name] else "ok"
            print(f"{verdict:8}{case.name:16}{case.world} ranks {seconds:6.0f} s", flush=True)
    for case in cases:
        if case.twin in results and not any((*results[case.twin], *results[case.name])):
            left, right = (check.runs / name / "straight" for name in (case.twin, case.name))
            found = check.differences(left, right, PER_WORLD)
            results[f"{case.twin} = {case.name}"] = found
            print(f"{'DIFFERS' if found else 'ok':8}{case.twin} = {case.name}")
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the bits of two versions of this code.")
    parser.add_argument("commit", metavar="COMMIT", help="the old code")
    parser.add_argument("--only", action="append", choices=[case.name for case in CASES],
                        help="only this case (repeatable)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the runs in a new folder")
    options = parser.parse_args()
    commit = git("rev-parse", "--verify", f"{options.commit}^{{commit}}").strip()
    with tempfile.TemporaryDirectory(prefix="same-bits-") as temporary:
        old, new = (Path(temporary).resolve() / name for name in ("old", "new"))
        runs = options.keep.resolve() if options.keep else old.with_name("runs")
        if runs.exists():
            stop(f"--keep {runs}: it exists; name a new folder")
        runs.mkdir(parents=True)
        try:
            git("worktree", "add", "--detach", str(old), commit)
            install_missing(old)
            copy_checkout(new)
            check = Check(old, new, runs)
            check.verify_imports()
            results = report(check, [case for case in CASES
                                     if not options.only or case.name in options.only])
        finally:
            if old.exists():
                git("worktree", "remove", "--force", str(old))
    for name, found in results.items():
        for difference in found:
            print(f"{name:24}{difference}")
    return int(any(results.values()))


if __name__ == "__main__":
    sys.exit(main())
