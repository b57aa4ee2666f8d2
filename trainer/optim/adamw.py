"""AdamW (Loshchilov, Hutter 2019): a direct call of torch's fused kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer as torchs

FLAGS = ("amsgrad", "maximize", "capturable", "differentiable")
"""Options of a group that need torch's own step."""


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW(fused=True)` with less overhead: same state, same kernel, same bits.

    Around the kernel, torch writes a profiler record, sorts all tensors by device and dtype and
    checks options that do not change between steps. For a small model this takes longer than the
    kernel. `step` calls the kernel directly if the result is the same. Otherwise it calls torch's
    own step: at the first update, which creates the state, with hooks, under the profiler, and
    with a gradient scaler.
    """

    _uniform = False
    """Whether the parameters of each group have one device and one dtype."""
    _one: float | Tensor = 1.0
    """Increment of the update counts. A tensor on CPU, where each count would otherwise create
    one."""

    def __init__(self, groups: Any, **options: Any) -> None:
        super().__init__(groups, fused=True, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._uniform = all(len({(p.device, p.dtype) for p in group["params"]}) == 1
                            and not group["params"][0].is_complex() for group in self.param_groups)
        on_cpu = all(p.is_cpu for group in self.param_groups for p in group["params"])
        self._one = torch.tensor(1.0, device="cpu") if on_cpu else 1.0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient."""
        groups = self._tensors() if closure is None and not self._is_observed() else None
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

    step.hooked = True  # type: ignore[attr-defined]  # otherwise torch adds record and hooks

    def _is_observed(self) -> bool:
        """Whether hooks, a gradient scaler or the profiler take part in the step."""
        return bool(
            self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
            or torchs._global_optimizer_pre_hooks or torchs._global_optimizer_post_hooks
            or getattr(self, "found_inf", None) is not None
            or getattr(self, "grad_scale", None) is not None
            or torch.autograd._profiler_enabled()
        )  # fmt: skip

    def _tensors(self) -> list[list[tuple[Tensor, ...]]] | None:
        """For each group, (parameter, gradient, *state) of each parameter that has a gradient.

        None if the kernel cannot be called directly.
        """
        if not self._uniform:
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
if not getattr(_torchs_step, "hooked", False):  # true after the first instance of torch's class
    _torchs_step = torch.optim.Optimizer.profile_hook_step(_torchs_step)
