"""AdamW (Loshchilov, Hutter 2019) by torch's fused kernel, without what stands before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer as torchs

FLAGS = ("amsgrad", "maximize", "capturable", "differentiable")
"""Of a group; with any of them torch's own step is taken."""


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW(fused=True)`: its state, its kernel, its bits.

    Around the kernel torch writes a record for its profiler, sorts all tensors by device and dtype
    and looks at much that doesn't change from step to step; for a small model that takes longer
    than the kernel. Here the kernel is called at once where that comes to the same, and torch's own
    step where it doesn't: at the first update, which makes the state, with hooks, under the
    profiler, with a gradient scaler.
    """

    _alike = False
    """Whether the parameters of each group are of one device and one dtype."""
    _one: float | Tensor = 1.0
    """What is added to the counts of updates: on a CPU a tensor, or each count would make one."""

    def __init__(self, groups: Any, **options: Any) -> None:
        super().__init__(groups, fused=True, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's."""
        super().add_param_group(param_group)
        self._alike = all(len({(p.device, p.dtype) for p in group["params"]}) == 1
                          and not group["params"][0].is_complex() for group in self.param_groups)
        on_cpu = all(p.is_cpu for group in self.param_groups for p in group["params"])
        self._one = torch.tensor(1.0, device="cpu") if on_cpu else 1.0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient."""
        groups = self._tensors() if closure is None and self._is_unwatched() else None
        if groups is None:
            return _torchs_step(self, closure)
        counts = [tensors[-1] for group in groups for tensors in group]
        if not counts:
            return None
        with torch.no_grad():
            torch._foreach_add_(counts, self._one)  # type: ignore[call-overload]
            for group, tensors in zip(self.param_groups, groups, strict=True):
                if not tensors:
                    continue
                parameters, gradients, averages, squares, steps = zip(*tensors, strict=True)
                torch._fused_adamw_(
                    parameters, gradients, averages, squares, (), steps, lr=group["lr"],
                    beta1=group["betas"][0], beta2=group["betas"][1], eps=group["eps"],
                    weight_decay=group["weight_decay"], amsgrad=False, maximize=False)  # fmt: skip
        return None

    step.hooked = True  # type: ignore[attr-defined]  # else torch puts record and hooks around it

    def _is_unwatched(self) -> bool:
        """Whether nobody looks at the step or takes part in it."""
        return not (
            self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
            or torchs._global_optimizer_pre_hooks or torchs._global_optimizer_post_hooks
            or getattr(self, "found_inf", None) is not None
            or getattr(self, "grad_scale", None) is not None
            or torch.autograd._profiler_enabled()
        )  # fmt: skip

    def _tensors(self) -> list[list[tuple[Tensor, ...]]] | None:
        """Of each group: each parameter that has a gradient, with that and its state; None where
        the kernel can't be called for them just so."""
        if not self._alike:
            return None
        found = []
        for group in self.param_groups:
            if not (group["fused"] and isinstance(group["lr"], float)) or any(
                    [group[flag] for flag in FLAGS]):
                return None
            tensors: list[tuple[Tensor, ...]] = []
            for parameter in group["params"]:
                if (gradient := parameter.grad) is not None:
                    state = self.state[parameter]
                    if not state:
                        return None
                    tensors.append((parameter, gradient, state["exp_avg"], state["exp_avg_sq"],
                                    state["step"]))
            found.append(tensors)
        return found


_torchs_step = torch.optim.AdamW.step
if not getattr(_torchs_step, "hooked", False):  # it is from the first object of torch's class on
    _torchs_step = torch.optim.Optimizer.profile_hook_step(_torchs_step)
