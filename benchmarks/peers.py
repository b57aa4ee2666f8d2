"""The contestants of `benchmarks.throughput`: a process trains in blocks on request of a socket.

    torchrun --nproc_per_node=W -m benchmarks.peers NAME MODEL SOCKET FOLDER

All train the same model in the same memory layout, from the same data in memory, with the same
batch size, clipping, fused AdamW and schedule, without end.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import trainer.__main__
import trainer.loop
from benchmarks import reporting
from benchmarks.loader import Pictures, unchanged
from benchmarks.small_tasks import SmallResNet, TinyMlp
from examples import bare_loop
from trainer.distributed import allocator

NAMES = ("by-hand", "control", "trainer", "lightning", "accelerate", "lightning-logging",
         "accelerate-logging", "usual", "memory-kept", "independent", "canonical", "mirrored")
"""`control` is by-hand again; `memory-kept` is by-hand with the trainer's settings of glibc, which
keep freed memory; `independent` ranks are by-hand without DDP; `canonical` is the trainer with
`--parallel.reduction canonical`, `mirrored` the trainer with a mirror."""
FOREVER = 10**6


@dataclass(frozen=True)
class Work:
    """The training of all contestants."""

    micro_size: int
    accumulation: int
    """Micro-batches of a step, over all ranks."""
    block: int
    """Steps of a turn; the trainer saves once in each."""
    task: str
    channels_last: bool = False

    def per_rank(self, ranks: int) -> int:
        """Micro-batches of a rank in a step."""
        return max(1, self.accumulation // ranks)


WORKS = {
    "mlp": Work(32, 1, 500, "benchmarks.small_tasks:TinyMlp"),
    "cnn": Work(32, 4, 50, "benchmarks.small_tasks:SmallCnn", channels_last=True),
    "resnet18": Work(64, 1, 50, "benchmarks.small_tasks:SmallResNet"),
}


class Gate:
    """Stops a contestant after each block of steps, reports its time and waits for the next one."""

    def __init__(self, path: str) -> None:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
        self._file = connection.makefile("rw")
        self._left, self._start_s = 0, 0.0
        self._report(0.0)

    def step(self, finish: Callable[[], None] = lambda: None) -> None:
        """Count a step; at the end of a block call `finish`, report and wait."""
        self._left -= 1
        if not self._left:
            finish()
            self._report(time.perf_counter() - self._start_s)

    def _report(self, seconds: float) -> None:
        self._file.write(f"{seconds}\n")
        self._file.flush()
        line = self._file.readline()
        if not line:
            os._exit(0)  # the benchmark is over
        self._left, self._start_s = int(line), time.perf_counter()


def make(name: str) -> tuple[nn.Module, Dataset]:
    """Model and training data."""
    torch.manual_seed(0)
    if name == "cnn":
        return bare_loop.make_model(), bare_loop.load_data(0)[0]
    task: Any = TinyMlp() if name == "mlp" else SmallResNet()
    return task.model(), task.dataset("train")


def loader_of(data: Dataset, work: Work, rank: int, ranks: int, **options: Any) -> DataLoader:
    """This rank's micro-batches of an epoch."""
    sampler: Any = DistributedSampler(data, ranks, rank, drop_last=True)  # type: ignore[arg-type]
    return DataLoader(data, work.micro_size, sampler=sampler, drop_last=True, **options)


def epochs(loader: DataLoader) -> Iterator[Any]:
    """Its micro-batches without end, each epoch in another order."""
    for epoch in itertools.count():
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        yield from loader


def hand_steps(name: str, rank: int, ranks: int, *, ddp: bool = True) -> Iterator[None]:
    """The step of examples/bare_loop.py without end: yields after each.

    Args:
        ddp: whether the ranks train one model together; else each trains its own.
    """
    work = WORKS[name]
    model, data = make(name)
    optimizer = bare_loop.make_optimizer(model)
    schedule = bare_loop.make_schedule(optimizer, FOREVER)
    wrapped = DistributedDataParallel(model) if ddp and ranks > 1 else model
    source = epochs(loader_of(data, work, rank, ranks, collate_fn=unchanged))
    while True:
        window = itertools.islice(source, work.per_rank(ranks))
        bare_loop.train_step(wrapped, optimizer, schedule, window, work.per_rank(ranks))
        yield


def usual_steps(rank: int, ranks: int) -> Iterator[None]:
    """The CNN's loop as in many repositories: PIL transforms of each sample in two workers, loss
    and accuracy read at every micro-batch."""
    work = WORKS["cnn"]
    model, _ = make("cnn")
    optimizer = bare_loop.make_optimizer(model)
    schedule = bare_loop.make_schedule(optimizer, FOREVER)
    wrapped = DistributedDataParallel(model) if ranks > 1 else model
    loader = loader_of(Pictures(), work, rank, ranks, num_workers=2)
    running, correct = 0.0, 0
    for number, (inputs, targets) in enumerate(epochs(loader), start=1):
        outputs = wrapped(inputs)
        loss = functional.cross_entropy(outputs, targets) / work.per_rank(ranks)
        loss.backward()
        running += loss.item()
        correct += int((outputs.argmax(1) == targets).sum().item())
        if number % work.per_rank(ranks) == 0:
            nn.utils.clip_grad_norm_(model.parameters(), bare_loop.CLIP_NORM)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            yield


def lightning(name: str, gate: Gate, rank: int, ranks: int, folder: Path | None = None) -> None:
    """pytorch-lightning; with a `folder` it logs loss and rate of each step there and saves once in
    each block."""
    import pytorch_lightning as pl
    from pytorch_lightning.callbacks import LearningRateMonitor, ModelCheckpoint
    from pytorch_lightning.loggers import CSVLogger

    work = WORKS[name]
    net, data = make(name)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            inputs, targets = batch
            loss = functional.cross_entropy(self.net(inputs), targets)
            if folder is not None:
                self.log("loss", loss, sync_dist=ranks > 1)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = bare_loop.make_optimizer(self.net)
            schedule = bare_loop.make_schedule(optimizer, FOREVER)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    class Turns(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
            if (rest[-1] + 1) % work.per_rank(ranks) == 0:
                gate.step()

    callbacks: list[pl.Callback] = [Turns()]
    if folder is not None:
        callbacks += [LearningRateMonitor(logging_interval="step"),
                      ModelCheckpoint(folder, every_n_train_steps=work.block)]
    pl.Trainer(
        accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto", max_epochs=-1,
        accumulate_grad_batches=work.per_rank(ranks), gradient_clip_val=bare_loop.CLIP_NORM,
        callbacks=callbacks, logger=False if folder is None else CSVLogger(folder),
        log_every_n_steps=1, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=folder is not None, use_distributed_sampler=False,
    ).fit(Module(), loader_of(data, work, rank, ranks, collate_fn=unchanged))  # fmt: skip


def accelerate(name: str, gate: Gate, ranks: int, folder: Path | None = None) -> None:
    """Hugging Face's accelerate, as in its documentation; with a `folder` it logs loss, rate and
    norm of each step there (TensorBoard) and saves once in each block."""
    from accelerate import Accelerator

    work = WORKS[name]
    model, data = make(name)
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=work.per_rank(ranks), project_dir=folder,
        log_with=None if folder is None else "tensorboard")  # fmt: skip
    if folder is not None:
        accelerator.init_trackers("log")
    optimizer = bare_loop.make_optimizer(model)
    schedule = bare_loop.make_schedule(optimizer, FOREVER)
    loader = DataLoader(data, work.micro_size, shuffle=True, drop_last=True, collate_fn=unchanged)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step = 0
    while True:
        for inputs, targets in loader:
            norm: Any = None
            with accelerator.accumulate(model):
                loss = functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), bare_loop.CLIP_NORM)
                optimizer.step()
                if accelerator.sync_gradients:
                    schedule.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            step += 1
            if folder is not None:
                mean: Any = accelerator.reduce(loss.detach(), "mean")
                accelerator.log({"loss": mean.item(), "lr": schedule.get_last_lr()[0],
                                 "grad_norm": norm.item()}, step)
                if step % work.block == 0:
                    accelerator.save_state(str(folder / "state"))
            gate.step()


def ours(name: str, gate: Gate, ranks: int, folder: Path, *flags: str) -> None:
    """This trainer with everything on; a block ends when its save is durable, and in the mirror."""
    work, loop = WORKS[name], trainer.loop.train

    def train(run: Any) -> Any:
        def wait_for_save() -> None:
            mirror = run.folder.mirror
            while run.guard.checkpoint.in_flight is not None or (mirror and mirror.in_use):
                time.sleep(0.0005)

        def turn(step: int) -> None:
            if step > work.block // 2:  # saves fall into the middle of the blocks
                gate.step(wait_for_save)

        run.context.status.on_step(turn)
        return loop(run)

    trainer.loop.train = train
    micro = work.micro_size
    raise SystemExit(trainer.__main__.main([
        f"--task={work.task}", f"--steps={FOREVER}", f"--batch.micro-size={micro}",
        f"--batch.global-size={micro * work.per_rank(ranks) * ranks}", "--eval.every=off",
        f"--checkpoint.every={work.block}", "--parallel.sync-bn=off", "--device=cpu",
        f"--clip.norm={bare_loop.CLIP_NORM}", "--watchdog.limit-s=3600", "--world.timeout-s=3600",
        f"--precision.channels-last={'on' if work.channels_last else 'off'}",
        "--log.level=warning", f"--run-dir={folder}", *flags,
    ]))  # fmt: skip


def main() -> None:
    parser = reporting.parser("peers", __doc__)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("model", choices=list(WORKS))
    parser.add_argument("socket")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    name, model = options.name, options.model
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    gate = Gate(options.socket)
    logs = options.folder if name.endswith("-logging") else None
    match name.removesuffix("-logging"):
        case "trainer":
            ours(model, gate, ranks, options.folder)
        case "canonical":
            ours(model, gate, ranks, options.folder, "--parallel.reduction=canonical")
        case "mirrored":
            ours(model, gate, ranks, options.folder,
                 f"--checkpoint.mirror=s3://benchmark/{options.folder.parent.name}")
        case "lightning":
            lightning(model, gate, rank, ranks, logs)
        case "accelerate":
            accelerate(model, gate, ranks, logs)
        case _:
            if name == "memory-kept" and not allocator.keep_freed():
                raise SystemExit("the C library, or the environment, does not allow these settings")
            if ranks > 1:
                dist.init_process_group("gloo")
            for _ in usual_steps(rank, ranks) if name == "usual" else hand_steps(
                    model, rank, ranks, ddp=name != "independent"):
                gate.step()


if __name__ == "__main__":
    reporting.finish(main)
