"""How a model computes where nothing is learnt."""

from __future__ import annotations

import contextlib

import torch
from torch import nn


def inference(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """A context without gradients: `inference_mode`, or `no_grad` where a part of the model is
    TorchScript, whose code for training saves tensors for a backward all the same."""
    scripted = any(isinstance(module, torch.jit.ScriptModule) for module in model.modules())
    return torch.no_grad() if scripted else torch.inference_mode()
