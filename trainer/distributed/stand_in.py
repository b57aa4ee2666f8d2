"""Stand-ins: real samples that a rank computes where it has no micro-batch, without any effect.

Other ranks may wait for this one in a collective of the model or the loss. A batch of 0 samples
would do too, but not every model, loss or batch can be empty.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from trainer.distributed import sync_batchnorm
from trainer.distributed.torch_private import buffer_slots


@contextlib.contextmanager
def forward_and_backward(model: nn.Module) -> Iterator[None]:
    """Context of a stand-in: it is not in the statistics, and its changes of buffers are undone."""
    own = (m for m in model.modules() if not sync_batchnorm.is_synchronised(m))
    with buffers_preserved(own), sync_batchnorm.without_samples():
        yield


@contextlib.contextmanager
def zero_gradients(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Context of a backward that adds 0 to the gradients of the leaves, also where it is NaN."""
    hooks = [leaf.register_hook(torch.zeros_like) for leaf in leaves if leaf.requires_grad]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def buffers_preserved(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore the buffers of the modules themselves at the end of the context: the tensors, their
    shapes and their values."""
    slots = [(owner, key, owner[key]) for module in modules
             for owner, key, _ in buffer_slots(module)]
    kept = [(buffer, buffer.detach().clone()) for *_, buffer in slots if buffer is not None]
    try:
        yield
    finally:
        for owner, key, buffer in slots:
            if owner.get(key) is not buffer:
                owner[key] = buffer
        for buffer, before in kept:
            if buffer.shape != before.shape:
                buffer.resize_(before.shape)
            buffer.data.copy_(before)  # .data: autograd must not see a change of a saved tensor
