"""Stand-ins: real samples that a rank computes where it has no micro-batch, without any effect.

Other ranks may wait for this one in a collective of the model or the loss, in the forward or the
backward. A batch of 0 samples would keep them together too, but not every model, loss or batch can
be empty.
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
    """Context of a stand-in: synchronised batch norms count no samples, and all other buffers are
    put back."""
    before = [(owner, key, buffer := owner[key], None if buffer is None else buffer.clone())
              for module in model.modules() if not sync_batchnorm.is_synchronised(module)
              for owner, key, _ in buffer_slots(module)]
    try:
        with sync_batchnorm.without_samples():
            yield
    finally:
        with torch.no_grad():
            for owner, key, buffer, kept in before:
                if owner.get(key) is not buffer:
                    owner[key] = buffer
                if buffer is not None:
                    if buffer.shape != kept.shape:
                        buffer.resize_(kept.shape)
                    buffer.copy_(kept)


@contextlib.contextmanager
def zero_gradients(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Context of a backward that adds 0 to the gradients of the leaves, also where it is NaN."""
    hooks = [leaf.register_hook(torch.zeros_like) for leaf in leaves if leaf.requires_grad]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
