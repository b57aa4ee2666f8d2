"""Rows of `wrong_orders`: the three lines, clipping, modes, losses."""

from __future__ import annotations

import math
import statistics
import time
import warnings
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.mistakes import (
    CLASSES,
    RIGHT,
    STEPS,
    Found,
    Run,
    accuracy,
    adamw,
    apart,
    data,
    gradient,
    loop,
    loss_of,
    moved,
    net,
    row,
    same,
    sgd,
)

# --- the three lines

@row("zero_grad is missing", "gradients of all batches so far add up, like a momentum of 1: the "
     "weights swing, and don't settle")
def no_zero_grad() -> Found:
    wrong, right = loop(RIGHT[1:], make=sgd, steps=300), loop(make=sgd, steps=300)
    return (f"gradient of the 300th update {wrong.used[-1]:.2f} instead of {right.used[-1]:.2f}; "
            f"loss {wrong.loss:.2f} instead of {right.loss:.2f}",
            wrong.used[-1] > 3 * right.used[-1] and wrong.loss > right.loss)


@row("zero_grad between backward and step", "the gradient is erased: nothing is learnt (nothing "
     "adds up); AdamW isn't called with zeros but with None, so it doesn't even decay")
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


@row("zero_grad after step instead of before forward", "nothing: it only has to lie between step "
     "and the next backward")
def zero_grad_after_step() -> Found:
    wrong = loop(("forward", "backward", "clip", "step", "schedule", "zero_grad"))
    return f"same bits after {STEPS} updates", same(wrong.model, loop().model)


@row("step before backward", "the update finds the gradients just erased: nothing is learnt")
def step_before_backward() -> Found:
    wrong = loop(("zero_grad", "forward", "step", "backward"))
    return f"largest change of a weight {moved(wrong.model):.0f}", moved(wrong.model) == 0


@row("the optimizer is made before the head is replaced", "it holds the old head's parameters: the "
     "new head never learns")
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

@row("clip before backward", "there is no gradient yet: nothing is clipped")
def clip_before_backward() -> Found:
    order = ("zero_grad", "forward", "clip", "backward", "step", "schedule")
    wrong, none = loop(order, make=sgd, clip=0.1), loop(make=sgd)
    return (f"reported norm {max(wrong.told):.0f}, norm used up to {max(wrong.used):.2f} at a "
            "limit of 0.1; same bits as without clipping",
            not max(wrong.told) and max(wrong.used) > 0.1 and same(wrong.model, none.model))


@row("clip after step", "the update is made already: nothing is clipped")
def clip_after_step() -> Found:
    order = ("zero_grad", "forward", "backward", "step", "clip", "schedule")
    wrong, none = loop(order, make=sgd, clip=0.1), loop(make=sgd)
    return (f"norm used up to {max(wrong.used):.2f} at a limit of 0.1; same bits as without "
            "clipping", max(wrong.used) > 0.1 and same(wrong.model, none.model))


@row("clip after each micro-batch instead of once", "what is added up is clipped again and again: "
     "early micro-batches weigh less")
def clip_per_micro_batch() -> Found:
    model, (x, y, *_) = net(), data()
    parts = [lambda i=i: functional.cross_entropy(model(x[i:i + 16]), y[i:i + 16]) / 4
             for i in range(0, 64, 16)]
    right = gradient(model, *parts)
    right *= 0.1 / right.norm()
    model.zero_grad()
    for part in parts:
        part().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    wrong = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return f"gradient {apart(wrong, right):.0%} off", apart(wrong, right) > 0.1


@row("fp16: clip without unscale", "the norm contains the loss scale: everything is clipped to "
     "almost nothing (Adam hides it, SGD doesn't)")
def clip_without_unscale() -> Found:
    def half(order: tuple[str, ...], make: Any) -> Run:
        scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
        return loop(order, make=make, clip=1.0, scaler=scaler)

    right = ("zero_grad", "forward", "backward", "unscale", "clip", "step", "schedule")
    with_sgd, good, with_adam = half(RIGHT, sgd), half(right, sgd), half(RIGHT, adamw)
    return (f"reported norm {with_sgd.told[0]:,.0f} instead of {good.told[0]:.2f}; SGD ends at "
            f"loss {with_sgd.loss:.2f} instead of {good.loss:.2f}, AdamW at {with_adam.loss:.2f}",
            with_sgd.told[0] > 1000 * good.told[0] and with_sgd.loss > 2 * good.loss)


@row("clipping as a defence against NaN", "one NaN makes all gradients NaN, an infinity becomes "
     "NaN beside zeros, and nothing is raised: look at the norm and leave the update out")
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


@row("the NaN's update is left out, the batch norm's statistics stay", "they are NaN for ever: "
     "training looks healthy, validation is NaN")
def nan_in_buffers() -> Found:
    model, (x, *_) = net(norm=True), data()
    model(torch.cat([x[:31], x[:1] * math.nan]))
    run = loop(model=model)
    bad = int(model[1].running_mean.isnan().sum())
    return (f"{STEPS} good updates later {bad} of 64 running means are NaN, and the loss in eval "
            f"mode is {run.loss}", bad == 64 and math.isnan(run.loss))


# --- modes

@row("eval() is forgotten in validation", "dropout draws and batch norm uses the batch: another "
     "figure each time, and the statistics learn the held-out data")
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


@row("train() is forgotten after validation", "from then on no dropout and frozen statistics, "
     "silently")
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


@row("no_grad is forgotten in validation", "each forward keeps its activations until its output is "
     "dropped: a higher peak; it only grows where outputs or losses are kept")
def no_no_grad() -> Found:
    model, x = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(8)]
                             ), torch.randn(512, 256)
    live = [0, 0]

    class Kept:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor.detach()  # itself it would hold its own graph
            self.size = tensor.nbytes if len(tensor) == len(x) else 0  # weights are there anyway
            live[0] += self.size
            live[1] = max(live)

        def __del__(self) -> None:
            live[0] -= self.size

    def bytes_of(context: Any, keep: bool) -> int:
        live[:] = [0, 0]
        outputs: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(Kept, lambda k: k.tensor), context:
            for _ in range(20):
                outputs = [*(outputs if keep else []), model(x)]  # the last one lives on
        return live[1]

    def spent_s(context: Any) -> float:
        start = time.process_time()
        with context:
            model(x)
        return time.process_time() - start

    dropped, kept, none = (bytes_of(nullcontext(), False), bytes_of(nullcontext(), True),
                           bytes_of(torch.no_grad(), True))
    pairs = [(spent_s(nullcontext()), spent_s(torch.no_grad())) for _ in range(30)]
    slow, fast = (statistics.median(times) for times in zip(*pairs, strict=True))
    return (f"20 batches hold up to {dropped / 1e6:.0f} MB for backward, {kept / 1e6:.0f} MB where "
            f"outputs are kept, {none} under no_grad; processor time {slow / fast:.2f}-fold",
            none == 0 and kept == 10 * dropped)


@row("the mean of batch means in validation", "the last, smaller batch weighs as much as a full "
     "one: add sums, divide by the count")
def mean_of_batches() -> Found:
    model, (_, _, x, y) = loop().model, data()
    order = torch.argsort(functional.cross_entropy(model(x), y, reduction="none").detach())
    parts = order.split(128)  # 300 = 128 + 128 + 44
    wrong = sum(loss_of(model, x[part], y[part]) for part in parts) / len(parts)
    right = loss_of(model, x, y)
    return f"loss {wrong:.3f} instead of {right:.3f}", wrong > 1.1 * right


# --- losses

@row("softmax before cross-entropy", "it is taken twice: the loss can't fall below 1.46 for ten "
     "classes, and gradients are small")
def softmax_twice() -> Found:
    wrong = loop(loss=lambda z, y: functional.cross_entropy(z.softmax(1), y), make=sgd)
    right, (x, y, *_) = loop(make=sgd), data()
    value = float(functional.cross_entropy(wrong.model(x).softmax(1), y).detach())
    least = math.log(1 + (CLASSES - 1) / math.e)
    return (f"loss {value:.2f} (least {least:.2f}) instead of {right.loss:.2f}; held-out accuracy "
            f"{accuracy(wrong.model):.2f} instead of {accuracy(right.model):.2f}",
            value > least and accuracy(wrong.model) < accuracy(right.model))


@row("sigmoid before BCE-with-logits", "it is taken twice: a sure no still costs 0.69, a sure yes "
     "0.31")
def sigmoid_twice() -> Found:
    def bce(z: Tensor, y: Tensor) -> Tensor:
        target = functional.one_hot(y, CLASSES).float()
        return functional.binary_cross_entropy_with_logits(z, target)

    wrong, right = loop(loss=lambda z, y: bce(z.sigmoid(), y)), loop(loss=bce)
    x, y, *_ = data()
    low, high = (float(bce(z.detach(), y)) for z in (wrong.model(x).sigmoid(), right.model(x)))
    return f"loss {low:.2f} instead of {high:.2f}", low > 0.6 > high


@row("outputs N×1 against N targets", "broadcast to N×N: each output is compared with every target "
     "(torch refuses it for BCE, and computes it, with a warning, for MSE)")
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
