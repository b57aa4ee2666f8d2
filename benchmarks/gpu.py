"""What does each optimisation gain on one CUDA card, and what does a save cost?

    python -m benchmarks.gpu [--models …] [--rounds N] [--limit-s 440]
    python -m benchmarks.gpu --dry-run

ResNet-50 (224², batch 256), ResNet-18 (32², batch 512), a GPT of 124M parameters (8 × 1,024
tokens), each trained by AdamW from batches in host memory. Each optimisation is added to those
before it: fp32, tf32, bf16 autocast, channels_last, torch.compile, fused AdamW (instead of
foreach), torch.compile's reduce-overhead (CUDA graphs), batches copied a step ahead from pinned
memory. All versions of a model are built and warmed up first, then take turns. For each: samples
per second; the share of the rate at which the card multiplies large bf16 matrices (MFU; 8192³,
measured first); the memory of a step.

Then, with the state of the GPT (1.5 GB): for how long a snapshot stalls the training. `pytest -m
gpu` tests a survivor's copy on its own stream while the main stream is stuck in a kernel.

`--dry-run` makes a step of each on the CPU with tiny models, compiled without code generation. It
shows that the script works; its figures mean nothing.
"""

from __future__ import annotations

import functools
import gc
import time
from typing import Any

import torch

from benchmarks import reporting
from benchmarks.gpu_models import Subject, Trainee, count_flops, levers, state_of, subjects
from benchmarks.turns import in_turn, ratios
from trainer.checkpoint.snapshot import Snapshot

WARM_UP = 4
TURN_S = 0.5
"""About how long a turn takes, in steps of at least one."""


def matmul_rate(device: torch.device, size: int, repeats: int) -> float:
    """Operations per second of bf16 matrix products (2 for a multiply-add)."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))

    def multiply() -> None:
        for _ in range(10):
            torch.matmul(a, b)
        synchronise(device)

    times = in_turn({"matmul": multiply}, repeats, warm=3)["matmul"]
    return 10 * 2 * size**3 / reporting.summary(times)["median"]


def synchronise(device: torch.device) -> None:
    """Wait for all work that the card was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(subject: Subject, device: torch.device, rate: float, rounds: int, deadline_s: float
            ) -> dict[str, Any]:
    """Lever → figures. Levers that would be built after the deadline are left out."""
    dry = device.type == "cpu"
    trainees, found, left_out = dict[str, Trainee](), dict[str, dict[str, Any]](), list[str]()
    flops = 0

    def steps(trainee: Trainee, count: int) -> float:
        synchronise(device)
        began = time.perf_counter()
        for _ in range(count):
            trainee.step()
        synchronise(device)
        return (time.perf_counter() - began) / count

    for lever in levers(images=subject.images):
        if time.monotonic() > deadline_s and not dry:
            left_out.append(lever.name)
            continue
        began = time.perf_counter()
        trainee = Trainee(subject, lever, device, backend="eager" if dry else "inductor")
        flops = flops or count_flops(trainee)
        steps(trainee, 1 if dry else WARM_UP)
        found[lever.name] = {"warm_up_s": time.perf_counter() - began}
        if not dry and lever.compile != "reduce-overhead":  # a graph keeps its memory
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            steps(trainee, 1)
            found[lever.name]["peak_bytes"] = torch.cuda.max_memory_allocated() - before
        trainees[lever.name] = trainee
    turns = {name: functools.partial(steps, trainee, 1 if dry else
                                     max(1, round(TURN_S / steps(trainee, 2))))
             for name, trainee in trainees.items()}
    times = in_turn(turns, rounds, warm=0 if dry else 1)
    previous = times["fp32"]
    for name, seconds in times.items():
        found[name] |= {
            "samples_per_s": reporting.summary([subject.batch / s for s in seconds]),
            "speedup": reporting.summary(ratios(previous, seconds)),
            "speedup_in_all": reporting.summary(ratios(times["fp32"], seconds)),
            "mfu": flops / reporting.summary(seconds)["median"] / rate,
        }  # fmt: skip
        previous = seconds
    for trainee in trainees.values():
        trainee.close()
    gc.collect()
    if not dry:
        torch.compiler.reset()  # CUDA graphs keep their memory
        torch.cuda.empty_cache()
    return {"batch": subject.batch, "flops_per_step": flops, "levers": found, "left_out": left_out}


def show(name: str, found: dict[str, Any]) -> str:
    rows = [[lever, reporting.spread(f["samples_per_s"]), reporting.spread(f["speedup"], digits=2),
             f"{f['speedup_in_all']['median']:.2f}", f"{100 * f['mfu']:.1f}",
             f"{f['peak_bytes'] / 1e9:,.2f}" if "peak_bytes" in f else "–",
             f"{f['warm_up_s']:.1f}"] for lever, f in found["levers"].items()]
    head = [name, "samples/s", "× the one before", "× fp32", "MFU, %", "memory of a step, GB",
            "ready after, s"]
    left = f"\nleft out, no time: {', '.join(found['left_out'])}" if found["left_out"] else ""
    return f"{reporting.table(head, rows)}{left}\n"


def measure_stall(subject: Subject, device: torch.device, repeats: int) -> dict[str, float]:
    """Seconds for which a snapshot of a model and its optimizer holds the training."""
    trainee = Trainee(subject, levers(images=False)[0], device)
    trainee.step()
    snapshot, live = Snapshot(), state_of(trainee.model, trainee.optimizer)

    def take() -> float:
        synchronise(device)
        began = time.perf_counter()
        snapshot.take(live)
        return time.perf_counter() - began

    return reporting.summary(in_turn({"snapshot": take}, repeats)["snapshot"])


def main() -> None:
    parser = reporting.parser("gpu", __doc__)
    parser.add_argument("--models", help="parts of their names, separated by commas; default: all")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each (%(default)s)")
    parser.add_argument("--limit-s", type=float, default=440.0,
                        help="each model has its share; optimisations that are not built in it are "
                        "left out (%(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on the CPU")
    options = parser.parse_args()
    dry = options.dry_run
    if not dry and not torch.cuda.is_available():
        parser.error("this needs a CUDA card; --dry-run tries the script on the CPU.")
    began_s, device = time.monotonic(), torch.device("cpu" if dry else "cuda")
    torch.backends.cudnn.benchmark = True
    known = subjects(tiny=dry)
    chosen = [subject for subject in known if not options.models
              or any(part in subject.name for part in options.models.split(","))]
    if not chosen:
        parser.error(f"--models {options.models}: there are {', '.join(s.name for s in known)}.")
    machine = reporting.machine()
    machine["card"] = None if dry else torch.cuda.get_device_name()
    rate = matmul_rate(device, 64 if dry else 8192, 3 if dry else 20)
    print(f"card: {machine['card'] or 'none, a dry run'}; bf16 matrix products: "
          f"{rate / 1e12:,.1f} TFLOP/s\n", flush=True)
    found = {}
    for number, subject in enumerate(chosen, start=1):
        # A third of a model's time is left for its turns.
        deadline_s = began_s + options.limit_s * (number - 1 / 3) / (len(chosen) + 1 / 3)
        found[subject.name] = measure(subject, device, rate, 1 if dry else options.rounds,
                                      deadline_s)
        print(show(subject.name, found[subject.name]), flush=True)
    stall = measure_stall(known[-1], device, 2 if dry else 10)
    print(f"a snapshot of {known[-1].name} holds the training for {reporting.spread(stall, 1e3)} ms\n"
          f"{time.monotonic() - began_s:.0f} s in all")
    reporting.print_json("gpu", machine=machine, dry_run=dry, bf16_matmul_flops_per_s=rate,
                         models=found, stall=stall)


if __name__ == "__main__":
    reporting.finish(main)
