"""Whether a model is one that checkpoints can hold and give back, and ranks can send each other."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainer import tensorfile
from trainer.errors import ConfigError

UNSENDABLE = (torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn,
              torch.float8_e5m2)
"""Dtypes that gloo doesn't know, of those that a checkpoint holds."""


def check(model: nn.Module) -> None:
    """Raises: ConfigError: the model has a state that a checkpoint can't hold, or can't give back.
    """
    parts = dict(chain(model.named_parameters(), model.named_buffers()))
    for name, value in parts.items():
        if is_lazy(value) or value.is_meta:
            raise ConfigError(
                f"--task: the model's {name} has no values yet (a lazy module, or one made on the "
                "meta device); let model() give it some: call a lazy model once with a batch of "
                "zeros, to_empty() and initialise one from the meta device.")
    own = {tensor.data_ptr() for tensor in parts.values() if tensor.layout == torch.strided}
    saved = model.state_dict()
    for name, value in saved.items():
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"--task: the model's state_dict has {name!r}, a {type(value).__name__}, and a "
                "checkpoint holds tensors only; make it a buffer (register_buffer with a tensor) "
                "instead of an extra state.")
        if value.layout != torch.strided:
            raise ConfigError(f"--task: the model's {name} is sparse, and no checkpoint could hold "
                              "it; make it dense, or register its indices and values.")
        if value.numel() and value.data_ptr() not in own:
            raise ConfigError(
                f"--task: {name!r} of the model's state_dict is made anew whenever it is asked "
                "for, so what a checkpoint has of it couldn't be put back; a state_dict of your "
                "own, its hooks and extra states may rename and leave out, but not convert: make "
                "it a buffer (register_buffer with a tensor).")
        try:
            next(tensorfile.chunks({name: value}))
        except TypeError as error:
            raise ConfigError(f"--task: the model's {error}, so no checkpoint could hold it; use "
                              "another dtype (two real parts for a complex one).") from None
    held = {tensor.data_ptr() for tensor in saved.values()}
    lost = [n for n, p in model.named_parameters()
            if p.requires_grad and p.numel() and p.data_ptr() not in held]
    if lost:
        raise ConfigError(f"--task: the model's state_dict leaves out {', '.join(lost[:5])}, which "
                          "can be trained, so no checkpoint would hold what is learnt; leave it "
                          "in, or freeze it (requires_grad_(False)).")


def check_sendable(model: nn.Module) -> None:
    """Raises: ConfigError: between ranks on CPUs (gloo) a tensor of the model can't be sent."""
    for name, value in chain(model.named_parameters(), model.named_buffers()):
        sparse = value.layout != torch.strided
        if sparse or value.dtype in UNSENDABLE:
            raise ConfigError(
                f"--nproc_per_node: the model's {name} is "
                f"{'sparse' if sparse else str(value.dtype)}, and gloo, which connects the ranks, "
                f"can't send it; use {'a dense one' if sparse else 'another dtype'}, or one rank.")
