"""One CUDA card: what each lever is worth in training, what a save costs, in under 8 minutes.

    python -m benchmarks.gpu [--models …] [--rounds N] [--limit-s 440] [--json]
    python -m benchmarks.gpu --dry-run

ResNet-50 (224², batch 256), ResNet-18 (32², batch 512), a GPT of 124M parameters (8 × 1,024
tokens), each trained by AdamW from batches in host memory. Levers, each with those before it: fp32,
tf32, bf16 autocast, channels_last, torch.compile, fused AdamW (instead of foreach), torch.compile's
reduce-overhead (CUDA graphs), batches copied a step ahead from pinned memory. All levers of a model
are built and warmed up first, then take turns. For each: samples a second; the share of the rate at
which the card multiplies large bf16 matrices (MFU; 8192³, measured first); the memory that a step
takes; what it copies from the host; without compiling, the bytes that its operations read and
write.

Then the state of the GPT (1.5 GB): for how long a snapshot stalls the training, and a survivor's
copy on a stream of its own while the main stream is stuck in a kernel.

`--dry-run` makes a step of each model and lever on the CPU, all of it tiny, compiled without code
being generated: it shows that the script works, its figures say nothing.
"""

from __future__ import annotations

import argparse
import functools
import gc
import time
from typing import Any

from benchmarks import reporting
from benchmarks.turns import in_turn, ratios

WARM_UP = 4
TURN_S = 0.5
"""About how long a turn takes, in steps of at least one."""


def matmul_rate(device: Any, size: int, repeats: int = 20) -> float:
    """bf16 multiply-adds of a square product, in operations (2 a multiply-add) a second."""
    import torch

    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))

    def multiply() -> None:
        for _ in range(10):
            torch.matmul(a, b)
        synchronise(device)

    times = in_turn({"matmul": multiply}, repeats, warm=3)["matmul"]
    return 10 * 2 * size**3 / reporting.summary(times)["median"]


def synchronise(device: Any) -> None:
    """Wait for all that the card has been told to do."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(
    subject: Any, device: Any, rate: float, rounds: int, deadline_s: float, *, dry: bool
) -> dict[str, Any]:
    """Lever → figures. Levers whose turn to be built comes after the deadline are left out."""
    import torch

    from benchmarks import gpu_models as models

    trainees, found, left_out = {}, dict[str, dict[str, Any]](), []
    flops = 0
    for lever in models.levers(images=subject.images):
        if time.monotonic() > deadline_s and not dry:
            left_out.append(lever.name)
            continue
        began = time.perf_counter()
        trainee = models.Trainee(subject, lever, device, backend="eager" if dry else "inductor")
        flops = flops or models.count_flops(trainee)
        for _ in range(1 if dry else WARM_UP):
            trainee.step()
        synchronise(device)
        found[lever.name] = {"warm_up_s": time.perf_counter() - began,
                             "host_bytes": trainee.host_bytes, "moved_bytes": None}
        if lever.compile is None:
            found[lever.name]["moved_bytes"] = models.count_traffic(trainee)
        if device.type == "cuda" and lever.compile != "reduce-overhead":  # a graph keeps its memory
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            trainee.step()
            synchronise(device)
            found[lever.name]["peak_bytes"] = torch.cuda.max_memory_allocated() - before
        trainees[lever.name] = trainee

    def steps(trainee: Any, count: int) -> float:
        synchronise(device)
        began = time.perf_counter()
        for _ in range(count):
            trainee.step()
        synchronise(device)
        return (time.perf_counter() - began) / count

    turns = {name: functools.partial(steps, trainee, 1 if dry else
                                     max(1, round(TURN_S / steps(trainee, 2))))
             for name, trainee in trainees.items()}
    times = in_turn(turns, rounds, warm=0 if dry else 1)
    before = None
    for name, seconds in times.items():
        found[name] |= {
            "samples_per_s": reporting.summary([subject.batch / s for s in seconds]),
            "speedup": None if before is None else reporting.summary(ratios(before, seconds)),
            "speedup_in_all": reporting.summary(ratios(times["fp32"], seconds)),
            "mfu": flops / reporting.summary(seconds)["median"] / rate,
        }  # fmt: skip
        before = seconds
    for trainee in trainees.values():
        trainee.close()
    gc.collect()
    if device.type == "cuda":
        torch.compiler.reset()  # CUDA graphs keep their memory
        torch.cuda.empty_cache()
    return {"batch": subject.batch, "flops_per_step": flops, "levers": found,
            "left_out": left_out}


def show(name: str, found: dict[str, Any]) -> str:
    rows = []
    for lever, f in found["levers"].items():
        moved, peak = f["moved_bytes"], f.get("peak_bytes")
        rows.append([
            lever, reporting.spread(f["samples_per_s"]),
            "–" if f["speedup"] is None else reporting.spread(f["speedup"], digits=2),
            f"{f['speedup_in_all']['median']:.2f}", f"{100 * f['mfu']:.1f}",
            "–" if moved is None else f"{moved / 1e9:,.2f}", f"{f['host_bytes'] / 1e6:,.1f}",
            "–" if peak is None else f"{peak / 1e9:,.2f}", f"{f['warm_up_s']:.1f}",
        ])  # fmt: skip
    head = [name, "samples/s", "× the one before", "× fp32", "MFU, %", "operations move, GB a step",
            "from the host, MB", "memory of a step, GB", "ready after, s"]
    left = f"\nleft out for want of time: {', '.join(found['left_out'])}" if found[
        "left_out"] else ""
    return f"{reporting.table(head, rows)}{left}\n"


def measure_saves(subject: Any, device: Any, repeats: int) -> dict[str, Any]:
    """The stall of a snapshot beside a step's time, and a copy beside a stuck kernel."""
    from benchmarks import gpu_models as models
    from benchmarks import gpu_saves as saves

    lever = next(lever for lever in models.levers(images=False) if lever.name == "bf16")
    trainee = models.Trainee(subject, lever, device)
    trainee.step()
    synchronise(device)
    live = saves.state_of(trainee.model, trainee.optimizer)
    found = saves.stall(live, repeats)
    for name in ("snapshot", "one by one"):
        found[name] = reporting.summary(found[name])
    if device.type == "cuda":
        found["stuck"] = saves.beside_a_stuck_kernel(live)
    trainee.close()
    return found


def show_saves(found: dict[str, Any]) -> str:
    lines = [f"state of {found['bytes'] / 1e6:,.0f} MB: a snapshot holds the training for "
             f"{reporting.spread(found['snapshot'], 1e3)} ms (the first one, which makes its "
             f"buffers, {found['first_s'] * 1e3:,.0f} ms); tensor by tensor to pageable memory "
             f"{reporting.spread(found['one by one'], 1e3)} ms"]
    if stuck := found.get("stuck"):
        lines.append(f"beside a stuck kernel: copied in {stuck['seconds'] * 1e3:,.0f} ms, kernel "
                     f"still running: {stuck['kernel_still_ran']}, the boundary's bits: "
                     f"{stuck['same_bits']}")
    else:
        lines.append("beside a stuck kernel: needs a CUDA card, not tried")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", help="parts of their names, by commas; default: all")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each (%(default)s)")
    parser.add_argument("--limit-s", type=float, default=440.0,
                        help="levers that aren't built by then are left out; each model has its "
                        "share (%(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on the CPU")
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    options = parser.parse_args()

    import torch

    from benchmarks.gpu_models import subjects

    if not options.dry_run and not torch.cuda.is_available():
        parser.error("this needs a CUDA card; --dry-run tries the script on the CPU.")
    began_s = time.monotonic()
    device = torch.device("cpu" if options.dry_run else "cuda")
    torch.backends.cudnn.benchmark = True
    chosen = [subject for subject in subjects(tiny=options.dry_run)
              if not options.models or any(part in subject.name
                                           for part in options.models.split(","))]
    if not chosen:
        parser.error(f"--models {options.models}: there are "
                     f"{', '.join(s.name for s in subjects(tiny=True))}.")
    machine = reporting.machine()
    machine["card"] = None if options.dry_run else torch.cuda.get_device_name()
    say = (lambda text: None) if options.json else (lambda text: print(text, flush=True))
    say(f"{reporting.describe(machine)}; card: {machine['card'] or 'none, a dry run'}")
    rate = matmul_rate(device, 64 if options.dry_run else 8192, 3 if options.dry_run else 20)
    say(f"bf16 matrix products: {rate / 1e12:,.1f} TFLOP/s\n")
    rounds = 1 if options.dry_run else options.rounds
    found = {}
    for number, subject in enumerate(chosen, start=1):
        # A third of a model's time is left for its turns.
        deadline_s = began_s + options.limit_s * (number - 1 / 3) / (len(chosen) + 1 / 3)
        found[subject.name] = measure(subject, device, rate, rounds, deadline_s,
                                      dry=options.dry_run)
        say(show(subject.name, found[subject.name]))
    saved = measure_saves(subjects(tiny=options.dry_run)[-1], device, 2 if options.dry_run else 10)
    say(show_saves(saved))
    say(f"{time.monotonic() - began_s:.0f} s in all")
    reporting.print_json("gpu", machine=machine, dry_run=options.dry_run,
                         bf16_matmul_flops_per_s=rate, models=found, saves=saved)


if __name__ == "__main__":
    reporting.finish(main)
