"""What a save costs on a card: the stall of a snapshot, a copy beside a kernel that is stuck."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.snapshot import Snapshot

STUCK_S = 5.0
CYCLES_PER_S = 2e9
"""More than the clock of today's cards: the kernel takes at least `STUCK_S`."""


def state_of(model: Any, optimizer: Any) -> dict[str, dict[str, Tensor]]:
    """File → name → tensor, as a checkpoint has them."""
    moments = {f"{number}.{name}": value for number, entry in enumerate(optimizer.state.values())
               for name, value in entry.items() if isinstance(value, Tensor)}
    return {"model": dict(model.state_dict()), "optimizer": moments}


def stall(live: dict[str, dict[str, Tensor]], repeats: int) -> dict[str, Any]:
    """Seconds for which a save holds the training: this trainer's snapshot, copies one by one to
    pageable memory as torch.save makes them; and the first snapshot, which makes its buffers."""
    tensors = [tensor for file in live.values() for tensor in file.values()]
    snapshot = Snapshot()
    first = _timed(lambda: snapshot.take(live))
    times: dict[str, list[float]] = {"snapshot": [], "one by one": []}
    for _ in range(repeats):
        times["snapshot"].append(_timed(lambda: snapshot.take(live)))
        times["one by one"].append(_timed(lambda: [tensor.cpu() for tensor in tensors]))
    return {"bytes": sum(tensor.nbytes for tensor in tensors), "first_s": first, **times}


def beside_a_stuck_kernel(live: dict[str, dict[str, Tensor]]) -> dict[str, Any]:
    """A survivor's copy: another thread, a stream of its own, while the main stream is stuck.

    Returns:
        seconds of the copy; whether the kernel still ran when it was complete; whether the copy
        has the bits of the boundary before the kernel.
    """
    snapshot = Snapshot()
    snapshot.take(live)  # the run has saved before: the buffers are there
    wanted = {file: {name: tensor.cpu().clone() for name, tensor in tensors.items()}
              for file, tensors in live.items()}
    boundary = torch.cuda.Event()
    main = torch.cuda.current_stream()
    boundary.record()
    torch.cuda._sleep(int(STUCK_S * CYCLES_PER_S))
    found: dict[str, Any] = {}

    def save() -> None:
        stream = torch.cuda.Stream()
        stream.wait_event(boundary)
        began = time.perf_counter()
        with torch.cuda.stream(stream):
            copy = snapshot.take(live, pin=False)
        found["seconds"] = time.perf_counter() - began
        found["kernel_still_ran"] = not main.query()
        found["same_bits"] = all(torch.equal(copy[file][name], tensor)
                                 for file, tensors in wanted.items()
                                 for name, tensor in tensors.items())

    thread = threading.Thread(target=save)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    return found


def _timed(run: Callable[[], Any]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
