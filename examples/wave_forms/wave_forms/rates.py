"""A schedule and an optimizer, named by --schedule.name and --optim.name."""

import torch


def halving(update: int) -> float:
    """Number of the update (from 0) to a factor of the peak rate: half of it every 100."""
    return 0.5 ** (update // 100)


class Lion(torch.optim.Optimizer):
    """Steps of the momentum's sign (Chen et al. 2023, https://arxiv.org/abs/2302.06675).

    Whatever is in `self.state` is saved and comes back.
    """

    def __init__(self, groups, lr: float, weight_decay: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure=None) -> None:
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
