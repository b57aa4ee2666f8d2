"""Whom a rank waits for when it stands still: real ranks, of which one is stopped by a signal."""

from __future__ import annotations

import io
import os
import pdb
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer.distributed.waits import WaitsFor, waiting_for, waits_for
from trainer.distributed.world import World
from trainer.storage import processes


def standing(wait: Callable[[], Any], release: Callable[[], Any], expected: WaitsFor) -> str:
    """Run `wait` in this thread, and `release` in another one, which has then seen this one wait
    for `expected` for half a second, or waited a minute for that; what it saw last."""
    me, seen = threading.get_ident(), list[WaitsFor]()

    def look() -> None:
        began_s = since_s = time.monotonic()
        while time.monotonic() - since_s < 0.5 and time.monotonic() - began_s < 60:
            seen.append(waits_for(me, sys._current_frames().get(me)))
            if seen[-1] is not expected:
                since_s = time.monotonic()
            time.sleep(0.01)
        release()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        wait()
    finally:
        thread.join()
    return seen[-1].value


def beside_a_stopped_peer(where: str) -> str:
    """In each of two ranks: rank 1 stops itself; what is seen of rank 0, which waits for it."""
    with World.form(device="cpu", threads=1) as world:
        model = DistributedDataParallel(nn.Linear(2, 1), process_group=world.group)
        loss = model(torch.ones(1, 2)).sum()
        peer = world.gather_json(os.getpid())[1]
        call = {
            "collective": world.barrier,
            "the user's own collective": lambda: dist.all_reduce(torch.ones(3)),
            "backward": lambda: backward(loss),
        }[where]
        if world.rank == 1:
            os.kill(peer, signal.SIGSTOP)
            call()
            return ""

        def resume() -> None:
            while not processes.is_stopped(peer):
                time.sleep(0.01)
            os.kill(peer, signal.SIGCONT)

        return standing(call, resume, WaitsFor.PEERS)


def backward(loss: Tensor) -> None:
    with waiting_for(WaitsFor.PEERS):
        loss.backward()


@pytest.mark.parametrize("where", ["collective", "the user's own collective", "backward"])
def test_a_rank_whose_peer_is_stopped_waits_for_it(ranks, where):
    assert ranks(2, beside_a_stopped_peer, where, group=False) == ["peers", ""]


class Stuck(torch.autograd.Function):
    """The user's own function: its backward waits for an event."""

    event = threading.Event()

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        Stuck.event.wait()
        return gradients[0]


def in_user_code(where: str, whom: str) -> str:
    """In a rank: what is seen of a thread that stands in code of the user's."""
    event = Stuck.event
    loss = Stuck.apply(torch.ones(1, requires_grad=True)).sum()

    def loop() -> None:
        while not event.is_set():
            pass

    def device() -> None:
        with waiting_for(WaitsFor.DEVICE):
            loop()

    wait = {"a loop": loop, "a hook in backward": lambda: backward(loss), "the device": device}[
        where]
    return standing(wait, event.set, WaitsFor(whom))


@pytest.mark.parametrize(("where", "whom"), [
    ("a loop", "nobody"), ("a hook in backward", "nobody"), ("the device", "device")])
def test_a_rank_that_stands_in_user_code_waits_for_nobody(ranks, where, whom):
    assert ranks(1, in_user_code, where, whom, group=False) == [whom]


def at_a_prompt() -> str:
    """In a rank: what is seen of a thread at the prompt of pdb."""
    reader, writer = os.pipe()

    def prompt() -> None:
        debugger = pdb.Pdb(stdin=os.fdopen(reader), stdout=io.StringIO())
        debugger.use_rawinput = False
        debugger.set_trace()

    return standing(prompt, lambda: os.write(writer, b"continue\n"), WaitsFor.PERSON)


def test_a_rank_at_a_debuggers_prompt_waits_for_a_person(ranks):
    assert ranks(1, at_a_prompt, group=False) == ["person"]
