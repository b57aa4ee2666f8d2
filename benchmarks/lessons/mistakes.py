"""The rows of docs/the-loop.md's table of mistakes: each function measures one.

Its name is that of the row. It returns what was measured, in words, and whether the claim holds.
"""

from __future__ import annotations

import copy
import math
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.lessons.problem import (
    CLASSES,
    RIGHT,
    STEPS,
    Run,
    accuracy,
    adamw,
    apart,
    data,
    flat,
    gradient,
    loop,
    loss_of,
    moved,
    net,
    norm_of,
    quarters,
    same,
    sgd,
)

Found = tuple[str, bool]

# --- the three lines

def no_zero_grad() -> Found:
    wrong, right = loop(RIGHT[1:], make=sgd, steps=300), loop(make=sgd, steps=300)
    return (f"gradient of the 300th update {wrong.used[-1]:.2f} instead of {right.used[-1]:.2f}; "
            f"loss {wrong.loss:.2f} instead of {right.loss:.2f}",
            wrong.used[-1] > 3 * right.used[-1] and wrong.loss > right.loss)


def zero_grad_after_backward() -> Found:
    wrong = loop(("forward", "backward", "zero_grad", "step"))
    zeros = net()
    optimizer = adamw(zeros.parameters())
    for _ in range(STEPS):
        functional.cross_entropy(zeros(data()[0]), data()[1]).backward()
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
    return (f"largest change of a weight {moved(wrong.model):.0f} (with set_to_none=False "
            f"{moved(zeros):.1e}, the decay alone)",
            moved(wrong.model) == 0 and 0 < moved(zeros) < 1e-2)


def zero_grad_after_step() -> Found:
    wrong = loop(("forward", "backward", "clip", "step", "schedule", "zero_grad"))
    return f"same bits after {STEPS} updates", same(wrong.model, loop().model)


def step_before_backward() -> Found:
    wrong = loop(("zero_grad", "forward", "step", "backward"))
    return f"largest change of a weight {moved(wrong.model):.0f}", moved(wrong.model) == 0


def head_after_optimizer() -> Found:
    model = net()
    optimizer = adamw(model.parameters())
    model[-1] = nn.Linear(64, CLASSES)
    head = model[-1].weight.detach().clone()
    run = loop(model=model, make=lambda parameters: optimizer)
    change = float((model[-1].weight - head).detach().abs().max())
    return (f"largest change in the head {change:.0f}; loss {run.loss:.2f} instead of "
            f"{loop().loss:.2f}", change == 0)


# --- clipping

def clip_before_backward() -> Found:
    wrong = loop(("zero_grad", "forward", "clip", "backward", "step"), make=sgd, clip=0.1)
    unclipped, holds = _is_unclipped(wrong)
    return (f"reported norm {max(wrong.reported):.0f}, {unclipped}",
            holds and not max(wrong.reported))


def clip_after_step() -> Found:
    return _is_unclipped(loop(("zero_grad", "forward", "backward", "step", "clip"), make=sgd,
                              clip=0.1))


def _is_unclipped(run: Run) -> Found:
    return (f"norm used up to {max(run.used):.2f} at a limit of 0.1; same bits as without clipping",
            max(run.used) > 0.1 and same(run.model, loop(make=sgd).model))


def clip_per_micro_batch() -> Found:
    model = net()
    right = gradient(model, *quarters(model))
    right *= 0.1 / right.norm()
    model.zero_grad()
    for part in quarters(model):
        part().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    wrong = flat(p.grad for p in model.parameters())
    return f"gradient {apart(wrong, right):.0%} off", apart(wrong, right) > 0.1


def clip_without_unscale() -> Found:
    def half(order: tuple[str, ...], make: Any) -> Run:
        scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
        return loop(order, make=make, clip=1.0, scaler=scaler)

    right = ("zero_grad", "forward", "backward", "unscale", "clip", "step", "schedule")
    with_sgd, good, with_adam = half(RIGHT, sgd), half(right, sgd), half(RIGHT, adamw)
    wrong, true = with_sgd.reported[0], good.reported[0]
    return (f"reported norm {wrong:,.0f} instead of {true:.2f}; SGD ends at loss "
            f"{with_sgd.loss:.2f} instead of {good.loss:.2f}, AdamW at {with_adam.loss:.2f}",
            wrong > 1000 * true and with_sgd.loss > 2 * good.loss)


def clip_and_nan() -> Found:
    told = []
    for bad in (math.nan, math.inf):
        model = net()
        functional.cross_entropy(model(data()[0]), data()[1]).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        gradients[0][0, 0] = bad
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        told.append(sum(int(g.isnan().sum()) for g in gradients))
    count = sum(p.numel() for p in net().parameters())
    return (f"NaNs in {count:,} gradients afterwards: {told[0]:,} from one NaN, {told[1]} from one "
            "infinity", told == [count, 1])


def nan_in_buffers() -> Found:
    model, (x, *_) = net(norm=True), data()
    model(torch.cat([x[:31], x[:1] * math.nan]))
    run = loop(model=model)
    bad = int(model[1].running_mean.isnan().sum())
    return (f"{STEPS} good updates later {bad} of 64 running means are NaN, and the loss in eval "
            f"mode is {run.loss}", bad == 64 and math.isnan(run.loss))


# --- modes

def no_eval() -> Found:
    model = loop(model=net(norm=True, dropout=0.5)).model
    model.eval()
    right, before = accuracy(model), model[1].running_mean.clone()
    model.train()
    found = [accuracy(model) for _ in range(2)]
    drift = float((model[1].running_mean - before).abs().max())
    return (f"accuracy {found[0]:.3f}, then {found[1]:.3f}, instead of {right:.3f} each time; a "
            f"running mean moved by {drift:.2f}",
            found[0] != found[1] and max(found) < right and drift > 0)


def no_train() -> Found:
    model = net(norm=True, dropout=0.5).eval()
    before = model[1].running_mean.clone()
    loop(model=model)
    moving = model[1].running_mean.clone()
    zeros = float((model[:4](data()[0]) == 0).float().mean())
    drawn = float((model.train()[:4](data()[0]) == 0).float().mean())
    drift = float((moving - before).abs().max())
    return (f"{STEPS} updates move the running means by {drift:.0f}; hidden units at zero "
            f"{zeros:.0%} instead of {drawn:.0%}", drift == 0 and zeros < drawn)


def no_no_grad() -> Found:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(8)])
    x = torch.randn(512, 256)

    def peak_bytes(context: Any, keep: bool) -> int:
        live, peak, outputs = weakref.WeakSet[Tensor](), [0], list[Tensor]()

        def pack(tensor: Tensor) -> Tensor:
            kept = tensor.detach()  # the tensor itself would hold its own graph
            if len(tensor) == len(x):  # weights exist anyway
                live.add(kept)
                peak.append(len(live) * kept.nbytes)
            return kept

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept), context:
            for _ in range(20):
                outputs = [*(outputs if keep else []), model(x)]  # the last one lives on
        return max(peak)

    dropped, kept, none = (peak_bytes(nullcontext(), False), peak_bytes(nullcontext(), True),
                           peak_bytes(torch.no_grad(), True))
    return (f"20 batches hold up to {dropped / 1e6:.0f} MB for backward, {kept / 1e6:.0f} MB where "
            f"outputs are kept, {none} under no_grad", none == 0 and kept == 10 * dropped)


def mean_of_batches() -> Found:
    model, (_, _, x, y) = loop().model, data()
    order = torch.argsort(functional.cross_entropy(model(x), y, reduction="none").detach())
    parts = order.split(128)  # 300 = 128 + 128 + 44
    wrong = sum(loss_of(model, x[part], y[part]) for part in parts) / len(parts)
    right = loss_of(model, x, y)
    return f"loss {wrong:.3f} instead of {right:.3f}", wrong > 1.1 * right


# --- losses

def softmax_twice() -> Found:
    wrong = loop(loss=lambda z, y: functional.cross_entropy(z.softmax(1), y), make=sgd)
    right, (x, y, *_) = loop(make=sgd), data()
    value = float(functional.cross_entropy(wrong.model(x).softmax(1), y).detach())
    least = math.log(1 + (CLASSES - 1) / math.e)
    return (f"loss {value:.2f} (least {least:.2f}) instead of {right.loss:.2f}; held-out accuracy "
            f"{accuracy(wrong.model):.2f} instead of {accuracy(right.model):.2f}",
            value > least and accuracy(wrong.model) < accuracy(right.model))


def sigmoid_twice() -> Found:
    def bce(z: Tensor, y: Tensor) -> Tensor:
        target = functional.one_hot(y, CLASSES).float()
        return functional.binary_cross_entropy_with_logits(z, target)

    wrong, right = loop(loss=lambda z, y: bce(z.sigmoid(), y)), loop(loss=bce)
    x, y, *_ = data()
    low, high = (float(bce(z.detach(), y)) for z in (wrong.model(x).sigmoid(), right.model(x)))
    return f"loss {low:.2f} instead of {high:.2f}", low > 0.6 > high


def broadcast() -> Found:
    x, y, *_ = data()
    outputs = x[:, :1]
    with warnings.catch_warnings(record=True, action="always"):
        wrong = float(functional.mse_loss(outputs, x[:, 0]))
    try:
        functional.binary_cross_entropy_with_logits(outputs, y.float())
        refused = False
    except ValueError:
        refused = True
    return f"MSE of a column with itself {wrong:.2f} instead of 0", refused and wrong > 1


# --- schedules

def _cosine(length: int) -> Callable[[Any], Any]:
    return lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, length)


def schedule_per_epoch() -> Found:
    optimizer = sgd(net().parameters())
    schedule = _cosine(STEPS)(optimizer)
    optimizer.step()
    for _ in range(5):  # epochs of 8 updates
        schedule.step()
    last = optimizer.param_groups[0]["lr"] / 0.1
    return f"after 5 epochs of 8 updates still {last:.0%} of the peak instead of 0%", last > 0.9


def schedule_per_update() -> Found:
    rates = loop(schedule=_cosine(5)).rates
    return (f"rate of updates 6, 11, 16: {rates[5]:.0%}, {rates[10]:.0%}, {rates[15]:.0%} of the "
            "peak", rates[5] < 1e-6 and rates[10] > 0.99)


def schedule_in_micro_batches() -> Found:
    def factor(n: int) -> float:
        warm, total = 4 * STEPS // 10, 4 * STEPS
        return (n + 1) / warm if n < warm else (
            1 + math.cos(math.pi * (n - warm) / (total - warm))) / 2

    rates = loop(schedule=lambda o: lr_scheduler.LambdaLR(o, factor)).rates
    return (f"peak at update {rates.index(max(rates)) + 1} of {STEPS} instead of 4; the last one "
            f"at {rates[-1]:.0%} of the peak", rates[-1] > 0.8)


def schedule_before_step() -> Found:
    order = ("zero_grad", "forward", "backward", "clip", "schedule", "step")
    with warnings.catch_warnings(record=True, action="always") as told:
        rates = loop(order, schedule=_cosine(STEPS)).rates
    warned = any("lr_scheduler.step" in str(w.message) for w in told)
    right = loop(schedule=_cosine(STEPS)).rates
    return (f"first update at {rates[0]:.4f} of the peak instead of 1, last at {rates[-1]:.4f} "
            f"instead of {right[-1]:.4f}", warned and rates[:-1] == right[1:])


def warm_up_from_zero() -> Found:
    run = loop(steps=1, make=sgd,
               schedule=lambda o: lr_scheduler.LambdaLR(o, lambda n: min(1.0, n / 5)))
    return f"largest change of a weight {moved(run.model):.0f}", moved(run.model) == 0


def schedule_given_a_loss() -> Found:
    optimizer = sgd(net().parameters())
    schedule, rates = _cosine(5)(optimizer), []
    optimizer.step()
    with warnings.catch_warnings(action="ignore"):
        for loss in (2.0, 1.0, 0.5):
            schedule.step(loss)
            rates.append(optimizer.param_groups[0]["lr"] / 0.1)
    return ("losses 2, 1, 0.5 set the rate to " + ", ".join(f"{r:.0%}" for r in rates)
            + " of the peak", rates == sorted(rates))


def schedule_past_its_end() -> Found:
    schedule = lr_scheduler.OneCycleLR(sgd(net().parameters()), 0.1, total_steps=10)
    made = 0
    with suppress(ValueError), warnings.catch_warnings(action="ignore"):
        while made < 99:
            schedule.step()
            made += 1
    last = loop(schedule=_cosine(20)).rates[-1]
    return (f"OneCycle of 10 raises at step {made + 1}; a cosine of 20 is back at {last:.0%} after "
            f"{STEPS}", made == 10 and last > 0.9)


# --- accumulation

def not_divided() -> Found:
    model = net()
    long, right = gradient(model, *quarters(model, 1)), gradient(model, *quarters(model))
    return (f"norm {long.norm():.2f} instead of {right.norm():.2f} with 4 micro-batches",
            abs(float(long.norm() / right.norm()) - 4) < 1e-4)


def zero_grad_per_micro_batch() -> Found:
    model = net()
    last, right = gradient(model, quarters(model)[-1]), gradient(model, *quarters(model))
    return f"gradient {apart(last, right):.0%} off", apart(last, right) > 0.5


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


def accumulated_batch_norm() -> Found:
    found = []
    for norm in (True, False):
        model, (x, y, *_) = net(norm=norm), data()
        right = gradient(model, lambda: functional.cross_entropy(model(x[:64]), y[:64]))  # noqa: B023
        found.append(apart(gradient(model, *quarters(model)), right))
    return (f"4 × 16 beside 64: gradient {found[0]:.0%} off, without batch norm {found[1]:.0e}",
            found[0] > 0.05 and found[1] < 1e-5)


def batch_norm_moves_per_forward() -> Found:
    shares = []
    for count in (1, 4):
        norm = nn.BatchNorm1d(1)
        for _ in range(count):
            norm(torch.tensor([[9.0], [11.0]]))
        shares.append(1 - float(norm.running_mean) / 10)
    return (f"after one update the old mean's share is {shares[1]:.0%} with 4 micro-batches, "
            f"{shares[0]:.0%} with one", abs(shares[1] - 0.9**4) < 1e-6)


def batch_norm_momentum() -> Found:
    off = []
    for momentum in (0.99, 0.1):
        norm, generator = nn.BatchNorm1d(1000, momentum=momentum), torch.Generator().manual_seed(4)
        for _ in range(100):
            norm(torch.randn(8, 1000, generator=generator))
        off.append(float(norm.running_mean.std()))
    return (f"100 batches of 8, true mean 0 ± 1: the running mean is {off[0]:.2f} off instead of "
            f"{off[1]:.2f}", off[0] > 3 * off[1])


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

def outside_no_sync() -> Found:
    def hook(calls, bucket):  # type: ignore[no-untyped-def]  # DDP takes no annotations as text
        calls.append(bucket)
        return allreduce_hook(dist.group.WORLD, bucket)

    calls: tuple[list[Any], list[Any]] = [], []
    grads = []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for waits, own in zip((False, True), calls, strict=True):
        model = nn.parallel.DistributedDataParallel(net())
        model.register_comm_hook(own, hook)
        for number, part in enumerate(quarters(model)):
            with model.no_sync() if waits and number < 3 else nullcontext():
                part().backward()
        grads.append(flat(p.grad for p in model.parameters()))
    dist.destroy_process_group()
    return (f"{len(calls[0])} all-reduces an update instead of {len(calls[1])}",
            [len(own) for own in calls] == [4, 1] and torch.equal(*grads))


def no_set_epoch() -> Found:
    sampler = DistributedSampler(range(512), 2, 0)
    first, second = list(sampler), list(sampler)
    sampler.set_epoch(1)
    third = list(sampler)
    return (f"epoch 2 equals epoch 1 in {np.mean(np.equal(first, second)):.0%} of the places, with "
            f"set_epoch in {np.mean(np.equal(first, third)):.0%}", first == second != third)


def one_seed() -> Found:
    def mask(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return functional.dropout(torch.ones(10_000), 0.5) > 0

    equal = [float((mask(7) == mask(seed)).float().mean()) for seed in (7, 8)]
    return (f"masks of two ranks agree in {equal[0]:.0%} of the units, with seed + rank in "
            f"{equal[1]:.0%}", equal[0] == 1 and equal[1] < 0.6)


def worker_seed() -> Found:
    def epochs(init: Any) -> list[list[float]]:
        loader = DataLoader(range(4), num_workers=1, worker_init_fn=init,  # type: ignore[arg-type]
                            multiprocessing_context="fork",
                            collate_fn=lambda _: float(np.random.rand()))
        return [[*loader] for _ in range(2)]

    wrong, right = epochs(lambda worker: np.random.seed(42 + worker)), epochs(None)
    return (f"epoch 2 draws {'the same' if wrong[0] == wrong[1] else 'other'} numbers, left alone "
            f"{'the same' if right[0] == right[1] else 'others'}",
            wrong[0] == wrong[1] and right[0] != right[1])


# --- going on

def resume_from_weights() -> Found:
    moves = []
    for keep in (False, True):
        run = loop()
        before, kept = copy.deepcopy(run.model), run.optimizer if keep else None
        loop(model=run.model, make=lambda p, kept=kept: kept or adamw(p), steps=1)  # type: ignore[misc]
        change = flat(run.model.parameters()) - flat(before.parameters())
        moves.append(float(change.abs().mean()) / 0.01)
    return (f"the next update moves a weight by {moves[0]:.2f} of the rate on average instead of "
            f"{moves[1]:.2f}", moves[0] > 2 * moves[1])
