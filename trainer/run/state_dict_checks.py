"""Check that a checkpoint can hold and restore a model."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainer.errors import ConfigError, listed
from trainer.storage import tensorfile


def check_state_dict(model: nn.Module) -> None:
    """Raise ConfigError if a checkpoint can't hold or restore the model's state."""
    parts = dict(chain(model.named_parameters(), model.named_buffers()))
    for name, value in parts.items():
        if is_lazy(value) or value.is_meta:
            raise ConfigError(
                f"--task: the model's {name} has no values yet (a lazy module, or a model on the "
                "meta device); model() must initialise it: call a lazy model once with a batch of "
                "zeros; use to_empty() and an initialisation for the meta device.")
    own = {tensor.data_ptr() for tensor in parts.values() if tensor.layout == torch.strided}
    saved = model.state_dict()
    for name, value in saved.items():
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"--task: the model's state_dict has {name!r}, a {type(value).__name__}, but a "
                "checkpoint holds tensors only; make it a buffer (register_buffer with a tensor) "
                "instead of an extra state.")
        if value.layout != torch.strided:
            raise ConfigError(f"--task: the model's {name} is sparse, and a checkpoint cannot hold "
                              "it; make it dense, or register its indices and values.")
        if value.numel() and value.data_ptr() not in own:
            raise ConfigError(
                f"--task: {name!r} of the model's state_dict is a new tensor at each call, so it "
                "could not be restored from a checkpoint; a custom state_dict, its hooks and extra "
                "states may rename and omit tensors, but not convert them: make it a buffer "
                "(register_buffer with a tensor).")
        try:
            next(tensorfile.serialize({name: value}))
        except TypeError as error:
            raise ConfigError(f"--task: the model's {error}, so a checkpoint cannot hold it; use "
                              "another dtype (two real parts for a complex one).") from None
    held = {tensor.data_ptr() for tensor in saved.values()}
    lost = [n for n, p in model.named_parameters()
            if p.requires_grad and p.numel() and p.data_ptr() not in held]
    if lost:
        raise ConfigError(f"--task: the model's state_dict omits {listed(lost)}, which is "
                          "trainable, so no checkpoint would hold it; include it, or freeze it "
                          "(requires_grad_(False)).")
