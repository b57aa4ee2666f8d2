"""A schedule for --schedule.name and an optimizer for --optim.name."""

from typing import Any

import torch


def halving(update: int) -> float:
    """Factor of the peak learning rate for an update (from 0): halved every 100 updates."""
    return 0.5 ** (update // 100)


class Lion(torch.optim.Optimizer):
    """Updates by the sign of the momentum (Chen et al. 2023, https://arxiv.org/abs/2302.06675).

    `self.state` is saved in checkpoints and restored.
    """

    def __init__(self, groups: Any, lr: float, weight_decay: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            fast, slow = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                average = state["exp_avg"]
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                direction = torch.lerp(parameter.grad, average, fast).sign_()
                parameter.add_(direction, alpha=-group["lr"])
                average.lerp_(parameter.grad, 1 - slow)
