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

import collections
import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import reporting
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

    def settle(self) -> None:
        """Wait until the last save is on disk."""
        self.checkpointer.settle()

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
        self.settle()
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
    return compared(found, rounds, WORKS["cnn"].block, 1.0,
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
        of.settle()
        of.wait()
        return seconds / SAVES

    found = in_turn({name: (lambda of=of: turn(of)) for name, of in made.items()}, rounds)
    for of in made.values():
        of.close()
    return compared(found, rounds, BLOCK, 1.0 / BLOCK, subject.bytes)


def compared(found: dict[str, list[float]], rounds: int, steps: int, scale: float, size: int
             ) -> dict[str, Any]:  # fmt: skip
    """Ratios of turns, whose times, multiplied by `scale`, are those of a step."""
    return {"bytes": size, "n": rounds, "steps": steps,
            "step_ms": 1e3 * reporting.summary(found["without"])["median"] * scale,
            "with / without": reporting.interval(ratios(found["with"], found["without"])),
            "control / without": reporting.interval(ratios(found["control"], found["without"]))}


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
    return {"bytes": subject.bytes, "n": repeats, **{
        name: [reporting.summary(list(column)) for column in zip(*times, strict=True)]
        for name, times in found.items()}}


def measure_stop(url: str, megabytes: float, repeats: int, folder: Path) -> dict[str, Any]:
    """Seconds from a stop to the end of the upload, and how many ended within `GRACE_S`."""
    subject, seconds, within = make_subject(megabytes), [], 0
    for turn in range(repeats):
        ours = Mirrored(subject, folder / f"stop-{turn}", f"{url}/{turn}")
        assert ours.uploads is not None
        began = time.perf_counter()
        ours.save("stop")
        ours.settle()
        done = ours.uploads.drain(lambda began=began: GRACE_S - (time.perf_counter() - began))
        seconds.append(time.perf_counter() - began)
        within += done
        ours.close()
    return {"bytes": subject.bytes, "seconds": reporting.summary(seconds), "within": within,
            "n": repeats}


def count_requests(url: str, megabytes: float, folder: Path) -> dict[str, int]:
    """Calls of the store for a save that prunes the one before; parts of files count once."""
    ours = Mirrored(make_subject(megabytes), folder / "requests", url)
    ours.times()
    ours.times()
    counts: collections.Counter[str] = collections.Counter()
    before = {name: getattr(ObjectStore, name) for name in (
        "put_new", "put", "replace", "read", "upload", "download", "list", "delete")}

    def counted(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            counts[name] += 1
            return before[name](*arguments, **options)
        return call

    try:
        for name in before:
            setattr(ObjectStore, name, counted(name))
        ours.times()
    finally:
        for name, method in before.items():
            setattr(ObjectStore, name, method)
    ours.close()
    return dict(counts)


@contextlib.contextmanager
def peer(python: str, url: str, megabytes: float) -> Iterator[Callable[[], float] | None]:
    """A function that lets Lightning save and returns the seconds; None without the packages."""
    if subprocess.run([python, "-c", "import s3fs, pytorch_lightning"],
                      capture_output=True, check=False).returncode:
        print("left out: Lightning; --lightning PYTHON names one with lightning and s3fs")
        yield None
        return
    with subprocess.Popen(
        [python, "-m", "benchmarks.mirror_peer", url, str(megabytes)], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env=reporting.environment(),
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        to, answers = process.stdin, process.stdout
        while (line := answers.readline()) != "ready\n":
            if not line:
                raise SystemExit("Lightning has ended; run python -m benchmarks.mirror_peer by "
                                 "hand for its error")

        def save() -> float:
            to.write("\n")
            to.flush()
            return float(answers.readline())

        yield save
        to.close()


@contextlib.contextmanager
def moto() -> Iterator[str]:
    """The URL of a bucket of a new server, which the environment variables name."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, "-m", "moto.server", "-p", str(port)],
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(server.pid, cores - {min(cores)} or cores)
    endpoint = f"http://127.0.0.1:{port}"
    os.environ |= {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "benchmark",
                   "AWS_SECRET_ACCESS_KEY": "benchmark", "AWS_REGION": "us-east-1",
                   "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
    create = urllib.request.Request(
        f"{endpoint}/benchmark", method="PUT", headers={
            "authorization": "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/x"})
    try:
        for _ in range(600):
            if server.poll() is not None:
                raise SystemExit("moto did not start; pip install 'moto[server]'")
            with contextlib.suppress(OSError):
                urllib.request.urlopen(create, timeout=5)
                break
            time.sleep(0.1)
        yield "s3://benchmark"
    finally:
        server.kill()
        server.wait()


def show(found: dict[str, Any]) -> None:
    for part, what in (("step", "small CNN"), ("often", "small MLP")):
        if step := found.get(part):
            print(f"{part}: {what}, {step['step_ms']:.1f} ms, {step['bytes'] / 1e6:.1f} MB saved "
                  f"every {step['steps']} steps, n = {step['n']} turns; median ratios (95 % "
                  "interval)")
            print(reporting.table(["", "ratio"], [
                [name, reporting.within(step[name])]
                for name in ("with / without", "control / without")]) + "\n")
    if save := found.get("save"):
        print(f"save: {save['bytes'] / 1e6:.0f} MB, n = {save['n']}; medians (quartiles)")
        print(reporting.table(["", "held, ms", "on disk, ms", "in the store, ms"], [
            [name, *(reporting.spread(column, 1e3, 0) for column in columns)]
            for name, columns in save.items() if isinstance(columns, list)]) + "\n")
    if stop := found.get("stop"):
        print(f"stop: {stop['bytes'] / 1e6:.0f} MB in the mirror after "
              f"{reporting.spread(stop['seconds'], 1, 2)} s; {stop['within']} of {stop['n']} "
              f"within {GRACE_S:g} s\n")
    if requests := found.get("requests"):
        print("requests of a save: "
              + ", ".join(f"{count} {name}" for name, count in sorted(requests.items())) + "\n")


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
    with tempfile.TemporaryDirectory(prefix="mirror-") as name, moto() as url:
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
            show({part: found[part]})
    print(json.dumps({"benchmark": "mirror", **found}))


if __name__ == "__main__":
    reporting.finish(main)
