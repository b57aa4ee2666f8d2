"""Rows of `wrong_orders`: schedules, accumulation, batch norm, several ranks, going on."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from benchmarks.mistakes import (
    STEPS,
    Found,
    adamw,
    apart,
    data,
    gradient,
    loop,
    moved,
    net,
    norm_of,
    row,
    sgd,
)

# --- schedules

def cosine(length: int) -> Callable[[Any], Any]:
    return lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, length)


@row("schedule laid out in updates, stepped once an epoch", "the rate hardly falls")
def schedule_per_epoch() -> Found:
    optimizer = sgd(net().parameters())
    schedule = cosine(STEPS)(optimizer)
    optimizer.step()
    for _ in range(5):  # epochs of 8 updates
        schedule.step()
    last = optimizer.param_groups[0]["lr"] / 0.1
    return f"after 5 epochs of 8 updates still {last:.0%} of the peak instead of 0%", last > 0.9


@row("schedule laid out in epochs, stepped at each update", "it is over after five updates, and "
     "torch's cosine then climbs again")
def schedule_per_update() -> Found:
    rates = [rate / 0.01 for rate in loop(schedule=cosine(5)).rates]
    return (f"rate of updates 6, 11, 16: {rates[5]:.0%}, {rates[10]:.0%}, {rates[15]:.0%} of the "
            "peak", rates[5] < 1e-6 and rates[10] > 0.99)


@row("lengths in micro-batches, stepped once in 4 of them", "only a quarter of the curve is seen, "
     "and the warm-up is four times as long")
def schedule_in_micro_batches() -> Found:
    def factor(n: int) -> float:
        warm, total = 4 * STEPS // 10, 4 * STEPS
        return (n + 1) / warm if n < warm else (
            1 + math.cos(math.pi * (n - warm) / (total - warm))) / 2

    rates = [r / 0.01 for r in loop(schedule=lambda o: lr_scheduler.LambdaLR(o, factor)).rates]
    return (f"peak at update {rates.index(max(rates)) + 1} of {STEPS} instead of 4; the last one "
            f"at {rates[-1]:.0%} of the peak", rates[-1] > 0.8)


@row("schedule before step", "the first rate is never used; torch warns")
def schedule_before_step() -> Found:
    order = ("zero_grad", "forward", "backward", "clip", "schedule", "step")
    with warnings.catch_warnings(record=True, action="always") as told:
        rates = loop(order, schedule=cosine(STEPS)).rates
    warned = any("lr_scheduler.step" in str(w.message) for w in told)
    right = loop(schedule=cosine(STEPS)).rates
    return (f"first update at {rates[0] / 0.01:.4f} of the peak instead of 1, last at "
            f"{rates[-1] / 0.01:.4f} instead of {right[-1] / 0.01:.4f}",
            warned and rates[:-1] == right[1:])


@row("warm-up from a factor of 0", "the first update has rate 0: a batch for nothing")
def warm_up_from_zero() -> Found:
    run = loop(steps=1, make=lambda p: torch.optim.SGD(p, 0.1),
               schedule=lambda o: lr_scheduler.LambdaLR(o, lambda n: min(1.0, n / 5)))
    return f"largest change of a weight {moved(run.model):.0f}", moved(run.model) == 0


@row("scheduler.step(val_loss) for another than a plateau", "the loss is taken for an epoch's "
     "number: the rate follows it the wrong way round")
def schedule_given_a_loss() -> Found:
    optimizer = sgd(net().parameters())
    schedule, rates = cosine(5)(optimizer), []
    optimizer.step()
    with warnings.catch_warnings(action="ignore"):
        for loss in (2.0, 1.0, 0.5):
            schedule.step(loss)
            rates.append(optimizer.param_groups[0]["lr"] / 0.1)
    return ("losses 2, 1, 0.5 set the rate to " + ", ".join(f"{r:.0%}" for r in rates)
            + " of the peak", rates == sorted(rates))


@row("a schedule that is stepped past its end", "OneCycle raises, torch's cosine climbs again")
def schedule_past_its_end() -> Found:
    optimizer = sgd(net().parameters())
    schedule = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    optimizer.step()
    made = 0
    try:
        while made < 99:
            schedule.step()
            made += 1
    except ValueError:
        rates = [r / 0.01 for r in loop(schedule=cosine(20)).rates]
        return (f"OneCycle of 10 raises at step {made + 1}; a cosine of 20 is back at "
                f"{rates[-1]:.0%} after {STEPS}", made == 10 and rates[-1] > 0.9)
    return "OneCycle didn't raise", False


# --- accumulation

def quarters(model: nn.Module, divide: float = 4) -> list[Callable[[], Tensor]]:
    x, y, *_ = data()
    return [lambda i=i: functional.cross_entropy(model(x[i:i + 16]), y[i:i + 16]) / divide
            for i in range(0, 64, 16)]


@row("the loss isn't divided by the number of micro-batches", "the gradient is k times too long: "
     "SGD's rate is k-fold, and a clip by norm is in reach")
def not_divided() -> Found:
    model = net()
    long, right = gradient(model, *quarters(model, 1)), gradient(model, *quarters(model))
    return (f"norm {long.norm():.2f} instead of {right.norm():.2f} with 4 micro-batches",
            abs(float(long.norm() / right.norm()) - 4) < 1e-4)


@row("zero_grad before each micro-batch", "only the last one counts, at a quarter of its weight")
def zero_grad_per_micro_batch() -> Found:
    model = net()
    last, right = gradient(model, quarters(model)[-1]), gradient(model, *quarters(model))
    return f"gradient {apart(last, right):.0%} off", apart(last, right) > 0.5


@row("the mean of means where micro-batches hold unequal counts", "tokens of a short micro-batch "
     "weigh more: sum the losses, divide by all that was counted")
def mean_of_means() -> Found:
    model, (x, y, *_) = net(), data()
    parts = [slice(0, 2), slice(2, 8), slice(8, 32), slice(32, 64)]

    def loss(part: slice, reduction: str = "mean") -> Tensor:
        return functional.cross_entropy(model(x[part]), y[part], reduction=reduction)

    wrong = gradient(model, *[lambda p=p: loss(p) / 4 for p in parts])
    sums = gradient(model, *[lambda p=p: loss(p, "sum") / 64 for p in parts])
    right = gradient(model, lambda: loss(slice(0, 64)))
    return (f"2 + 6 + 24 + 32 samples: gradient {apart(wrong, right):.0%} off; by sums "
            f"{apart(sums, right):.0e}", apart(wrong, right) > 0.05 > 1e-5 > apart(sums, right))


@row("if (i + 1) % 4 == 0: step, with 10 micro-batches an epoch", "the last two are mixed into the "
     "next epoch's first update (or are lost)")
def leftover_window() -> Found:
    (model, (x, y, *_)), windows, held = (net(), data()), [], 0
    optimizer, norms = sgd(model.parameters()), []
    for n in range(20):
        part = slice(16 * n, 16 * n + 16)
        (functional.cross_entropy(model(x[part]), y[part]) / 4).backward()
        held += 1
        if (n % 10 + 1) % 4 == 0:
            windows.append(held)
            norms.append(norm_of(model))
            optimizer.zero_grad()  # the weights stay, so that norms compare
            held = 0
    return (f"two epochs make {len(windows)} updates of {', '.join(map(str, windows))} "
            f"micro-batches, the third with a norm of {norms[2]:.2f} beside {norms[1]:.2f}; {held} "
            "are lost", windows == [4, 4, 6, 4] and norms[2] > 1.2 * norms[1])


@row("accumulation under batch norm taken for the large batch", "statistics are those of each "
     "micro-batch")
def accumulated_batch_norm() -> Found:
    found = []
    for norm in (True, False):
        model, (x, y, *_) = net(norm=norm), data()
        right = gradient(model, lambda: functional.cross_entropy(model(x[:64]), y[:64]))  # noqa: B023
        found.append(apart(gradient(model, *quarters(model)), right))
    return (f"4 × 16 beside 64: gradient {found[0]:.0%} off, without batch norm {found[1]:.0e}",
            found[0] > 0.05 and found[1] < 1e-5)


@row("batch norm's statistics under accumulation", "they move once a forward, not once an update")
def batch_norm_moves_per_forward() -> Found:
    shares = []
    for count in (1, 4):
        norm = nn.BatchNorm1d(1)
        for _ in range(count):
            norm(torch.tensor([[9.0], [11.0]]))
        shares.append(1 - float(norm.running_mean) / 10)
    return (f"after one update the old mean's share is {shares[1]:.0%} with 4 micro-batches, "
            f"{shares[0]:.0%} with one", abs(shares[1] - 0.9**4) < 1e-6)


@row("batch norm's momentum as in other libraries (0.99)", "in torch it is the share of the new "
     "batch: the statistics are the last batch's alone")
def batch_norm_momentum() -> Found:
    off = []
    for momentum in (0.99, 0.1):
        norm, generator = nn.BatchNorm1d(1000, momentum=momentum), torch.Generator().manual_seed(4)
        for _ in range(100):
            norm(torch.randn(8, 1000, generator=generator))
        off.append(float(norm.running_mean.std()))
    return (f"100 batches of 8, true mean 0 ± 1: the running mean is {off[0]:.2f} off instead of "
            f"{off[1]:.2f}", off[0] > 3 * off[1])


@row("accumulation for more negatives in a contrastive loss", "micro-batches don't see each other")
def accumulated_contrast() -> Found:
    x = data()[0][:32]
    noisy = x + torch.randn(x.shape, generator=torch.Generator().manual_seed(3))

    def info_nce(rows: slice) -> float:
        a, b = functional.normalize(x[rows], dim=1), functional.normalize(noisy[rows], dim=1)
        return float(functional.cross_entropy(a @ b.T / 0.2, torch.arange(len(a))))

    whole, parts = info_nce(slice(0, 32)), sum(
        info_nce(slice(i, i + 8)) for i in range(0, 32, 8)) / 4
    return f"loss {parts:.2f} as 4 × 8 instead of {whole:.2f} as 32", parts < 0.7 * whole


# --- several ranks

@contextmanager
def one_rank() -> Iterator[None]:
    """A gloo group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@row("backward outside no_sync under accumulation", "the same gradients, but an all-reduce of all "
     "of them in each micro-batch")
def outside_no_sync() -> Found:
    counts, grads = [], []
    with one_rank():
        for waits in (False, True):
            model = nn.parallel.DistributedDataParallel(net())
            calls = [0]

            def hook(calls, bucket):  # type: ignore[no-untyped-def]  # DDP wants none as text
                calls[0] += 1
                future: torch.futures.Future[Tensor] = torch.futures.Future()
                future.set_result(bucket.buffer())
                return future

            model.register_comm_hook(calls, hook)
            for number, part in enumerate(quarters(model)):
                with model.no_sync() if waits and number < 3 else nullcontext():
                    part().backward()
            counts.append(calls[0])
            grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return (f"{counts[0]} all-reduces an update instead of {counts[1]}",
            counts == [4, 1] and torch.equal(*grads))


@row("set_epoch is missing", "each epoch has the first one's order")
def no_set_epoch() -> Found:
    sampler = DistributedSampler(range(512), 2, 0)
    first, second = list(sampler), list(sampler)
    sampler.set_epoch(1)
    third = list(sampler)
    return (f"epoch 2 equals epoch 1 in {np.mean(np.equal(first, second)):.0%} of the places, with "
            f"set_epoch in {np.mean(np.equal(first, third)):.0%}", first == second != third)


@row("one seed for all ranks", "all draw the same dropout masks and augmentations: fewer different "
     "ones than ranks")
def one_seed() -> Found:
    def mask(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return functional.dropout(torch.ones(10_000), 0.5) > 0

    equal = [float((mask(7) == mask(seed)).float().mean()) for seed in (7, 8)]
    return (f"masks of two ranks agree in {equal[0]:.0%} of the units, with seed + rank in "
            f"{equal[1]:.0%}", equal[0] == 1 and equal[1] < 0.6)


class Draws(Dataset):
    """A numpy draw for each sample."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        return float(np.random.rand())


@row("worker_init_fn that seeds numpy with 42 + worker", "every epoch draws the same numbers; "
     "torch's own seeding, which leaves nothing to do, doesn't")
def worker_seed() -> Found:
    def epochs(init: Any) -> list[list[float]]:
        loader = DataLoader(Draws(), num_workers=1, worker_init_fn=init,
                            multiprocessing_context="fork")
        return [[float(v) for v in loader] for _ in range(2)]

    wrong, right = epochs(lambda worker: np.random.seed(42 + worker)), epochs(None)
    return (f"epoch 2 draws {'the same' if wrong[0] == wrong[1] else 'other'} numbers, left alone "
            f"{'the same' if right[0] == right[1] else 'others'}",
            wrong[0] == wrong[1] and right[0] != right[1])


# --- going on

@row("resume from the weights alone", "Adam begins anew: its first update moves every weight by "
     "the full rate, whatever its gradient (and the schedule starts over)")
def resume_from_weights() -> Found:
    moves = []
    for keep in (False, True):
        run = loop()
        before, kept = copy.deepcopy(run.model), run.optimizer if keep else None
        loop(model=run.model, make=lambda p, kept=kept: kept or adamw(p), steps=1)  # type: ignore[misc]
        change = [(p - q).detach().abs().flatten() for p, q in
                  zip(run.model.parameters(), before.parameters(), strict=True)]
        moves.append(float(torch.cat(change).mean()) / 0.01)
    return (f"the next update moves a weight by {moves[0]:.2f} of the rate on average instead of "
            f"{moves[1]:.2f}", moves[0] > 2 * moves[1])
