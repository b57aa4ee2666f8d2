"""What does a mirror in an object store cost, and how soon is a save there?

    python -m benchmarks.mirror [--parts step,often,save,stop,requests] [--lightning PYTHON]

step      Runs of the small CNN, which take turns: with a mirror, without, and a control without.
          A block of steps ends when its save is durable, and in the mirror.
often     The same for a small MLP that saves far more often than is usual.
save      For how long a save holds up the training, and the time until it is durable: on disk and
          in the mirror. Beside Lightning's Trainer(default_root_dir="s3://…"), with s3fs.
stop      Seconds from a stop until its save, 100 MB, is in the mirror.
requests  Requests of a save.

The store is moto, on another core than the training of `step` and `often`, since it belongs to
another machine. That training has one core, which the uploads share: more cores hide their cost.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks import reporting
from benchmarks.chaos_store import BUCKET, FaultyStore
from benchmarks.peers import WORKS
from benchmarks.reporting import in_turn, ratios
from benchmarks.synthetic_state import Subject, make_checkpointer, make_subject
from benchmarks.throughput import Contestant
from trainer.checkpoint.mirror import Mirror, Owner
from trainer.checkpoint.mirror_uploads import MirrorUploads
from trainer.checkpoint.mirror_writer import MirrorPolicy
from trainer.checkpoint.store import Store
from trainer.storage.object_store import ObjectStore
from trainer.telemetry.events import Log

PARTS = ("save", "stop", "requests", "step", "often")
GRACE_S = 10.0
STEP_MB, BATCH = 5.0, 64
BLOCK, SAVES = 20, 10
"""Of `often`: size of the state, batch, steps from save to save, and saves of a turn."""


class Recorder(Log):
    """Notes when a checkpoint is in the mirror."""

    def __init__(self) -> None:
        super().__init__(level="error")
        self.committed_s, self.failure = 0.0, ""

    def event(self, name: str, **fields: Any) -> None:
        if name == "mirror":
            self.committed_s = time.perf_counter()
        if name == "mirror-failed":
            self.failure = fields["why"]


class Mirrored:
    """A checkpointer; with a URL, and its mirror."""

    def __init__(self, subject: Subject, folder: Path, url: str | None = None) -> None:
        self.subject, self.log, self.uploads = subject, Recorder(), None
        store = Store(folder / "checkpoints", run="benchmark", keep=1)
        if url is not None:
            folder.mkdir()
            self.uploads = MirrorUploads(Mirror.open(url), store, folder, MirrorPolicy(keep=1),
                                         log=self.log)
            self.uploads.fence.take(Owner(run="benchmark", generation=1, nonce=folder.name))
            self.uploads.start()
        self.checkpointer = make_checkpointer(subject, store, self.uploads)

    def save(self, kind: str = "periodic") -> None:
        self.subject.state.progress.step += 1
        self.checkpointer.save(kind)

    def wait(self) -> None:
        """Wait until all is uploaded, verified and pruned."""
        while self.uploads is not None and self.uploads.in_use:
            if self.log.failure or self.uploads.error:
                raise SystemExit(f"an upload failed: {self.log.failure or self.uploads.error}")
            time.sleep(0.005)

    def times(self) -> tuple[float, float, float]:
        """Seconds of a save: training held, durable on disk, durable in the mirror."""
        began = time.perf_counter()
        self.save()
        held = time.perf_counter() - began
        self.checkpointer.settle()
        on_disk = time.perf_counter() - began
        self.wait()
        return held, on_disk, self.log.committed_s - began

    def close(self) -> None:
        self.checkpointer.close()
        if self.uploads is not None:
            self.uploads.close()


def measure_step(rounds: int, folder: Path) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        runs = {}
        for name in ("without", "with", "control"):
            (folder / name).mkdir()
            run = Contestant("mirrored" if name == "with" else "trainer", "cnn", 1, folder / name)
            stack.callback(run.close)
            runs[name] = functools.partial(run.run, WORKS["cnn"].block)
        found = in_turn(runs, rounds, warm=2)
    saved = next((folder / "without").glob("trainer/checkpoints/step-*"))
    return compared("step: small CNN", found, WORKS["cnn"].block, 1.0,
                    sum(file.stat().st_size for file in saved.iterdir()))


def measure_often(url: str, rounds: int, folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    subject = make_subject(STEP_MB)
    inputs = torch.randn(BATCH, subject.width)
    made = {name: Mirrored(subject, folder / f"often-{name}", url if name == "with" else None)
            for name in ("without", "with", "control")}

    def turn(of: Mirrored) -> float:
        began = time.perf_counter()
        for _ in range(SAVES):
            of.save()
            for _ in range(BLOCK):
                subject.optimizer.zero_grad(set_to_none=True)
                subject.model(inputs).square().mean().backward()
                subject.optimizer.step()
        seconds = time.perf_counter() - began
        of.checkpointer.settle()
        of.wait()
        return seconds / SAVES

    found = in_turn({name: (lambda of=of: turn(of)) for name, of in made.items()}, rounds)
    for of in made.values():
        of.close()
    return compared("often: small MLP", found, BLOCK, 1.0 / BLOCK, subject.bytes)


def compared(part: str, found: dict[str, list[float]], steps: int, scale: float, size: int
             ) -> dict[str, Any]:  # fmt: skip
    """Ratios of turns, whose times, multiplied by `scale`, are those of a step."""
    step_ms = 1e3 * reporting.summary(found["without"])["median"] * scale
    against = {f"{name} / without": reporting.interval(ratios(found[name], found["without"]))
               for name in ("with", "control")}
    print(f"{part}, {step_ms:.1f} ms, {size / 1e6:.1f} MB saved every {steps} steps, n = "
          f"{len(found['without'])} turns; median ratios (95 % interval)")
    print(reporting.table(["", "ratio"], [[name, reporting.within(ratio)]
                                          for name, ratio in against.items()]) + "\n")
    return {"bytes": size, "n": len(found["without"]), "step_ms": step_ms, **against}


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Leave this process, and those that it starts, one core, which the store doesn't use."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def measure_save(url: str, megabytes: float, repeats: int, folder: Path,
                 lightning: str) -> dict[str, Any]:
    subject = make_subject(megabytes)
    ours = Mirrored(subject, folder / "save", url)
    contestants: dict[str, Callable[[], tuple[float, ...]]] = {"this trainer": ours.times}
    with peer(lightning, f"{url}-lightning", megabytes) as save:
        if save is not None:
            contestants["Lightning, s3fs"] = lambda: (seconds := save(), seconds, seconds)
        found = in_turn(contestants, repeats)
    ours.close()
    columns = {name: [reporting.summary(column) for column in zip(*times, strict=True)]
               for name, times in found.items()}
    print(f"save: {subject.bytes / 1e6:.0f} MB, n = {repeats}; medians (quartiles)")
    print(reporting.table(["", "held, ms", "on disk, ms", "in the store, ms"], [
        [name, *(reporting.spread(column, 1e3, 0) for column in own)]
        for name, own in columns.items()]) + "\n")
    return {"bytes": subject.bytes, "n": repeats, **columns}


def measure_stop(url: str, megabytes: float, repeats: int, folder: Path) -> dict[str, Any]:
    """Seconds from a stop to the end of the upload, and how many ended within `GRACE_S`."""
    subject, seconds, within = make_subject(megabytes), [], 0
    for turn in range(repeats):
        ours = Mirrored(subject, folder / f"stop-{turn}", f"{url}/{turn}")
        assert ours.uploads is not None
        began = time.perf_counter()
        ours.save("stop")
        ours.checkpointer.settle()
        done = ours.uploads.drain(lambda began=began: GRACE_S - (time.perf_counter() - began))
        seconds.append(time.perf_counter() - began)
        within += done
        ours.close()
    found = reporting.summary(seconds)
    print(f"stop: {subject.bytes / 1e6:.0f} MB in the mirror after "
          f"{reporting.spread(found, 1, 2)} s; {within} of {repeats} within {GRACE_S:g} s\n")
    return {"bytes": subject.bytes, "seconds": found, "within": within, "n": repeats}


def count_requests(url: str, megabytes: float, folder: Path) -> dict[str, int]:
    """Calls of the store for a save that prunes the one before; parts of files count once."""
    ours = Mirrored(make_subject(megabytes), folder / "requests", url)
    ours.times()
    ours.times()
    with contextlib.ExitStack() as stack:
        calls = {name: stack.enter_context(mock.patch.object(
            ObjectStore, name, autospec=True, side_effect=getattr(ObjectStore, name)))
            for name in ("put_new", "put", "replace", "read", "upload", "download", "list",
                         "delete")}
        ours.times()
    ours.close()
    counts = {name: call.call_count for name, call in calls.items() if call.called}
    print("requests of a save: "
          + ", ".join(f"{count} {name}" for name, count in counts.items()) + "\n")
    return counts


@contextlib.contextmanager
def peer(python: str, url: str, megabytes: float) -> Iterator[Callable[[], float] | None]:
    """A function that lets Lightning save and returns the seconds; None if it does not start."""
    with subprocess.Popen(
        [python, "-m", "benchmarks.lightning_peer", "save", url, str(megabytes)], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env=reporting.environment(),
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        to, answers = process.stdin, process.stdout
        if "ready\n" not in iter(answers.readline, ""):
            print("left out: Lightning; --lightning PYTHON names one with lightning and s3fs")
            yield None
            return

        def save() -> float:
            to.write("\n")
            to.flush()
            return float(answers.readline())

        yield save
        to.close()


def main() -> None:
    parser = reporting.parser("mirror", __doc__)
    parser.add_argument("--parts", type=reporting.some_of(PARTS), default=",".join(PARTS),
                        help="(%(default)s)")
    parser.add_argument("--megabytes", type=float, default=100.0, help="of save and stop (100)")
    parser.add_argument("--pairs", type=int, default=20, help="turns of `step` and `often` (20)")
    parser.add_argument("--repeats", type=int, default=5, help="of save and stop (5)")
    parser.add_argument("--lightning", metavar="PYTHON", default=sys.executable,
                        help="interpreter that has lightning and s3fs; default: this one")
    options = parser.parse_args()
    found: dict[str, Any] = {"machine": reporting.machine()}
    store, cores, url = FaultyStore(seed=0), os.sched_getaffinity(0), f"s3://{BUCKET}"
    for thread in os.listdir(f"/proc/{store.process.pid}/task"):
        os.sched_setaffinity(int(thread), cores - {min(cores)} or cores)
    with tempfile.TemporaryDirectory(prefix="mirror-") as name:
        folder, size, repeats = Path(name), options.megabytes, options.repeats
        parts: dict[str, Callable[[], Any]] = {
            "step": lambda: measure_step(options.pairs, folder),
            "often": lambda: measure_often(f"{url}/often", options.pairs, folder),
            "save": lambda: measure_save(f"{url}/save", size, repeats, folder, options.lightning),
            "stop": lambda: measure_stop(f"{url}/stop", size, repeats, folder),
            "requests": lambda: count_requests(f"{url}/requests", STEP_MB, folder)}
        for part in sorted(options.parts, key=PARTS.index):
            with one_core() if part in ("step", "often") else contextlib.nullcontext():
                found[part] = parts[part]()
    reporting.print_json("mirror", **found)


if __name__ == "__main__":
    reporting.finish(main)
