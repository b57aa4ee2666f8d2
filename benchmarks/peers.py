"""The contestants of `benchmarks.throughput`: one process of one of them, which trains block by
block, as it is told through a socket.

    torchrun --nproc_per_node=W -m benchmarks.peers NAME MODEL SOCKET FOLDER

All train the same model in the same memory layout, from the same data in memory, in batches of the
same size, with the same clipping, fused AdamW and schedule, a step after the other for ever.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from benchmarks.small_tasks import SmallResNet, TinyMlp
from examples import bare_loop

FOREVER = 10**6
"""Steps of a run that is ended from outside."""


@dataclass(frozen=True)
class Work:
    """What all contestants compute."""

    micro_size: int
    accumulation: int
    """Micro-batches of a step, over all ranks where there are more of them."""
    block: int
    """Steps from one turn to the next; the trainer saves once in each."""
    task: str
    """The trainer's name of it."""
    channels_last: bool = False
    """The memory layout of the model."""

    def per_rank(self, ranks: int) -> int:
        """Micro-batches of a rank in a step."""
        return max(1, self.accumulation // ranks)


WORKS = {
    "mlp": Work(32, 1, 500, "benchmarks.small_tasks:TinyMlp"),
    "cnn": Work(32, 4, 50, "benchmarks.small_tasks:SmallCnn", channels_last=True),
    "resnet18": Work(64, 1, 50, "benchmarks.small_tasks:SmallResNet"),
}


class Gate:
    """Where a contestant stands between its blocks: it tells the seconds of the last one and waits
    for the next."""

    def __init__(self, path: str, hello: dict[str, Any]) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._file = self._socket.makefile("rw")
        self._left, self._start = 0, 0.0
        self._say(hello)
        self._wait()

    def step(self) -> bool:
        """A step is made; whether it ended a block (`rest` follows)."""
        self._left -= 1
        return self._left == 0

    def rest(self) -> None:
        """Tell and wait."""
        self._say({"seconds": time.perf_counter() - self._start})
        self._wait()

    def _say(self, what: dict[str, Any]) -> None:
        self._file.write(json.dumps(what) + "\n")
        self._file.flush()

    def _wait(self) -> None:
        line = self._file.readline()
        if not line:
            os._exit(0)  # the benchmark is over
        self._left, self._start = int(line), time.perf_counter()


def make(name: str) -> tuple[nn.Module, Dataset]:
    """Model and training data."""
    torch.manual_seed(0)
    if name == "cnn":
        return bare_loop.make_model(), bare_loop.load_data(0)[0]
    task: Any = TinyMlp() if name == "mlp" else SmallResNet()
    return task.model(), task.dataset("train")


def batches(data: Dataset, work: Work, rank: int, ranks: int) -> Iterator[Any]:
    """Micro-batches without end."""
    sampler = DistributedSampler(data, ranks, rank, drop_last=True)  # type: ignore[arg-type, var-annotated]
    loader = DataLoader(data, work.micro_size, sampler=sampler, drop_last=True,
                        collate_fn=_unchanged)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from loader


def by_hand(name: str, gate: Gate, rank: int, ranks: int, usual: bool = False) -> None:
    """examples/bare_loop.py's step; `usual`: a sample at a time through PIL, in two workers, with
    loss and accuracy read at every micro-batch, as most loops do."""
    work = WORKS[name]
    model, data = make(name)
    optimizer = bare_loop.make_optimizer(model)
    schedule = bare_loop.make_schedule(optimizer, FOREVER)
    wrapped = DistributedDataParallel(model) if ranks > 1 else model
    if usual:
        return as_usual(wrapped, optimizer, schedule, gate, work, rank, ranks)
    source = batches(data, work, rank, ranks)
    while True:
        window = itertools.islice(source, work.per_rank(ranks))
        bare_loop.train_step(wrapped, optimizer, schedule, window, work.per_rank(ranks))
        if gate.step():
            gate.rest()


def as_usual(model: nn.Module, optimizer: Any, schedule: Any, gate: Gate, work: Work, rank: int,
             ranks: int) -> None:
    """The CNN's loop as it stands in many a repository."""
    from torchvision import transforms

    images, labels, *_ = bare_loop.read_sample()
    data = PerSample(images, labels, transforms.Compose([
        transforms.RandomHorizontalFlip(), transforms.ToTensor(),
        transforms.Normalize((0.286,), (0.353,)),
    ]))
    sampler: Any = DistributedSampler(data, ranks, rank, drop_last=True)
    loader = DataLoader(data, work.micro_size, sampler=sampler, drop_last=True, num_workers=2)
    running, correct, number = 0.0, 0, 0
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            number += 1
            outputs = model(inputs)
            loss = functional.cross_entropy(outputs, targets) / work.per_rank(ranks)
            loss.backward()
            running += loss.item()
            correct += int((outputs.argmax(1) == targets).sum().item())
            if number % work.per_rank(ranks):
                continue
            nn.utils.clip_grad_norm_(model.parameters(), bare_loop.CLIP_NORM)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if gate.step():
                gate.rest()


class PerSample(Dataset):
    """A PIL image and a transform at a time."""

    def __init__(self, images: Any, labels: Any, transform: Any) -> None:
        self._images, self._labels, self._transform = images, labels, transform

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        return self._transform(Image.fromarray(self._images[index])), int(self._labels[index])


def lightning(name: str, gate: Gate, rank: int, ranks: int, folder: Path | None = None) -> None:
    """pytorch-lightning without bar; with a `folder` it logs loss and rate of each step there and
    saves once in each block, otherwise nothing."""
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
            if (rest[-1] + 1) % work.per_rank(ranks) == 0 and gate.step():
                gate.rest()

    sampler: Any = DistributedSampler(data, ranks, rank, drop_last=True)  # type: ignore[arg-type]
    loader = DataLoader(data, work.micro_size, sampler=sampler, drop_last=True,
                        collate_fn=_unchanged)
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
    ).fit(Module(), loader)  # fmt: skip


def accelerate(name: str, gate: Gate, rank: int, ranks: int, folder: Path | None = None) -> None:
    """Hugging Face's accelerate, as its documentation shows the loop; with a `folder` it logs loss,
    rate and norm of each step there (TensorBoard) and saves once in each block."""
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
    loader = DataLoader(data, work.micro_size, shuffle=True, drop_last=True, collate_fn=_unchanged)
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
            if gate.step():
                gate.rest()


def ours(name: str, gate: Gate, ranks: int, folder: Path) -> None:
    """This trainer, with everything on; a block ends when its save is durable."""
    import trainer.loop
    from trainer.__main__ import main

    work, loop = WORKS[name], trainer.loop.train

    def train(run: Any) -> Any:
        def turn(step: int) -> None:
            if step > work.block // 2 and gate.step():  # saves fall into the middle of the blocks
                while run.guard.checkpoint.in_flight is not None:
                    time.sleep(0.0005)
                gate.rest()

        run.context.status.on_step(turn)
        return loop(run)

    trainer.loop.train = train
    micro = work.micro_size
    raise SystemExit(main([
        f"--task={work.task}", f"--steps={FOREVER}", f"--batch.micro-size={micro}",
        f"--batch.global-size={micro * work.per_rank(ranks) * ranks}", "--eval.every=off",
        f"--checkpoint.every={work.block}", "--parallel.sync-bn=off", "--device=cpu",
        f"--clip.norm={bare_loop.CLIP_NORM}", "--watchdog.limit-s=3600", "--world.timeout-s=3600",
        f"--precision.channels-last={'on' if work.channels_last else 'off'}",
        "--log.level=warning", f"--run-dir={folder}",
    ]))  # fmt: skip


def _unchanged(batch: Any) -> Any:
    return batch


def main() -> None:
    """Train as the socket tells."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("model", choices=list(WORKS))
    parser.add_argument("socket")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    if options.name in ("by-hand", "control", "usual") and ranks > 1:
        dist.init_process_group("gloo")
    gate = Gate(options.socket, {"name": options.name, "rank": rank})
    match options.name:
        case "by-hand" | "control" | "usual":
            by_hand(options.model, gate, rank, ranks, usual=options.name == "usual")
        case "lightning" | "lightning-logging":
            lightning(options.model, gate, rank, ranks,
                      options.folder if options.name == "lightning-logging" else None)
        case "accelerate" | "accelerate-logging":
            accelerate(options.model, gate, rank, ranks,
                       options.folder if options.name == "accelerate-logging" else None)
        case "trainer":
            ours(options.model, gate, ranks, options.folder)
        case name:
            parser.error(f"no contestant {name!r}")


if __name__ == "__main__":
    main()
