"""The default recipe as one file of plain DistributedDataParallel, without the trainer package.

    torchrun --standalone --nproc_per_node=2 examples/bare_loop.py --epochs 5
    python examples/bare_loop.py --epochs 5

The benchmarks compare the trainer with it. The mathematics are those of `trainer/step.py` and
`trainer/loop.py`, without fault tolerance.
"""

import argparse
import contextlib
import itertools
import lzma
import math
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler

SAMPLE = Path(__file__).parents[1] / "trainer/tasks/fashion_mnist_sample.xz"
GLOBAL_SIZE, MICRO_SIZE, VALIDATION = 128, 32, 0.2
PEAK_LR, WEIGHT_DECAY, CLIP_NORM, WARMUP, MIN_RATIO = 3e-3, 0.01, 5.0, 0.05, 0.1


def read_sample() -> list[np.ndarray]:
    """Training images Nx28x28 and labels N, then those for testing: four concatenated IDX files."""
    content, arrays, at = lzma.decompress(SAMPLE.read_bytes()), [], 0
    while at < len(content):
        dims = content[at + 3]
        shape = np.frombuffer(content, ">u4", dims, at + 4).astype(int)
        arrays.append(np.frombuffer(content, np.uint8, shape.prod(), at + 4 + 4 * dims))
        arrays[-1] = arrays[-1].reshape(shape)
        at += 4 + 4 * dims + arrays[-1].size
    return arrays


class Images(Dataset):
    """Batches of images Nx1x28x28, randomly flipped if `flip`, and their labels N."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, mean: float, std: float,
                 flip: bool = False) -> None:
        self.images = torch.from_numpy((images.astype(np.float32) - mean) / std).unsqueeze(1)
        self.labels, self.flip = torch.from_numpy(labels.astype(np.int64)), flip

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        where = torch.tensor(indices)
        images = self.images[where]
        if self.flip:
            images = torch.where(torch.rand(len(where), 1, 1, 1) < 0.5, images.flip(3), images)
        return images, self.labels[where]


def load_data(seed: int) -> tuple[Images, Images, Images]:
    """The training, validation and test images."""
    images, labels, test_images, test_labels = read_sample()
    order = np.random.default_rng(seed).permutation(len(labels))
    held_out = round(len(labels) * VALIDATION)
    train, validation = order[held_out:], order[:held_out]
    scale = float(images[train].mean()), float(images[train].std())
    return (Images(images[train], labels[train], *scale, flip=True),
            Images(images[validation], labels[validation], *scale),
            Images(test_images, test_labels, *scale))


def make_model(device: torch.device | str = "cpu") -> nn.Module:
    """Two blocks of convolution, norm, ReLU and pooling, then a hidden layer: 422,000 weights."""
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs),
                nn.ReLU(), nn.MaxPool2d(2)]

    model = nn.Sequential(*block(1, 32), *block(32, 64), nn.Flatten(),
                          nn.Linear(64 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, 10))
    return model.to(device, memory_format=torch.channels_last)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Fused AdamW with weight decay for weights, but not for biases and norms."""
    parameters = list(model.parameters())
    groups = [{"params": [p for p in parameters if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
              {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK_LR, fused=True)


def make_schedule(optimizer: torch.optim.Optimizer, total: int) -> LambdaLR:
    """Linear warm-up that starts above zero, then cosine decay that ends at the last update."""
    warmup = max(1, round(WARMUP * total))

    def factor(update: int) -> float:
        if update < warmup:
            return (update + 1) / warmup
        done = min(1.0, (update + 1 - warmup) / max(1, total - warmup))
        return MIN_RATIO + (1 - MIN_RATIO) * (1 + math.cos(math.pi * done)) / 2

    return LambdaLR(optimizer, factor)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: LambdaLR,
               micro_batches: Iterable[tuple[Tensor, Tensor]], accumulation: int) -> Tensor:
    """One update from `accumulation` micro-batches of equal size; returns this rank's mean loss."""
    optimizer.zero_grad(set_to_none=True)
    total = torch.zeros((), device=next(model.parameters()).device)
    for number, (images, labels) in enumerate(micro_batches, start=1):
        waits = number < accumulation and isinstance(model, DistributedDataParallel)
        with model.no_sync() if waits else contextlib.nullcontext():
            loss = functional.cross_entropy(model(images), labels) / accumulation
            loss.backward()
        total += loss.detach()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
    optimizer.step()
    schedule.step()
    return total


@torch.no_grad()
def evaluate(model: nn.Module, data: Images, rank: int, num_ranks: int) -> float:
    """The accuracy over `data`. Each rank takes every `num_ranks`-th sample, so no sample is
    counted twice."""
    model.eval()
    device = next(model.parameters()).device
    if num_ranks > 1:
        for buffer in model.buffers():  # each rank has its own running statistics
            dist.broadcast(buffer, 0)
    correct = torch.zeros((), device=device)
    for some in torch.arange(rank, len(data), num_ranks).split(2 * MICRO_SIZE):
        images, labels = (part.to(device) for part in data.__getitems__(some.tolist()))
        correct += (model(images).argmax(1) == labels).sum()
    if num_ranks > 1:
        dist.all_reduce(correct)
    model.train()
    return correct.item() / len(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--steps", type=int, help="number of updates")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    rank, num_ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_size))
    on_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_cuda else "cpu"
    if on_cuda:
        torch.cuda.set_device(device)
    if num_ranks > 1:
        dist.init_process_group("nccl" if on_cuda else "gloo")
    accumulation, rest = divmod(GLOBAL_SIZE // MICRO_SIZE, num_ranks)
    if rest or not accumulation:
        parser.error(f"{num_ranks} ranks can't share {GLOBAL_SIZE // MICRO_SIZE} micro-batches")

    train, validation, test = load_data(options.seed)
    torch.manual_seed(options.seed)
    plain = make_model(device)
    torch.manual_seed(options.seed + 1 + rank)  # ranks flip differently
    if num_ranks > 1 and on_cuda:
        # torch has no SyncBatchNorm for the CPU: there each rank uses its own statistics.
        plain = nn.SyncBatchNorm.convert_sync_batchnorm(plain)
    model = DistributedDataParallel(plain) if num_ranks > 1 else plain
    per_epoch = len(train) // GLOBAL_SIZE
    total = options.steps or options.epochs * per_epoch
    optimizer = make_optimizer(plain)
    schedule = make_schedule(optimizer, total)
    sampler = DistributedSampler(train, num_ranks, rank, seed=options.seed, drop_last=True)
    loader = DataLoader(train, MICRO_SIZE, sampler=sampler, drop_last=True, collate_fn=lambda x: x)

    step, best, best_weights, start = 0, -1.0, {}, time.perf_counter()
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        batches = ((images.to(device), labels.to(device)) for images, labels in loader)
        losses = []
        for _ in range(min(per_epoch, total - step)):
            window = itertools.islice(batches, accumulation)
            losses.append(train_step(model, optimizer, schedule, window, accumulation))
            step += 1
        accuracy = evaluate(plain, validation, rank, num_ranks)
        if accuracy > best:
            best = accuracy
            best_weights = {name: value.clone() for name, value in plain.state_dict().items()}
        if rank == 0:
            print(f"epoch {epoch + 1}: step {step}, loss {torch.stack(losses).mean():.4f}, "
                  f"validation accuracy {accuracy:.4f}, {time.perf_counter() - start:.1f} s")
        if step >= total:
            break

    plain.load_state_dict(best_weights)
    accuracy = evaluate(plain, test, rank, num_ranks)
    if rank == 0:
        print(f"test accuracy {accuracy:.4f}")
    if num_ranks > 1:
        dist.destroy_process_group()
        sys.stdout.flush()
        os._exit(0)  # a gloo thread that still releases a tensor would abort at interpreter exit


if __name__ == "__main__":
    main()
