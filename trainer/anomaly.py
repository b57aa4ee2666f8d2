"""The hunt for a NaN: every operation of a step is looked at, and the one that makes it named."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.module_tracker import ModuleTracker

NOT_MAKERS = ("empty", "resize", "c10d")
"""In the names of operations that return memory of any content, or what other ranks have made."""


@dataclass(frozen=True)
class Origin:
    """Where a NaN came from.

    Attributes:
        phase: "forward" or "backward".
        module: plain name of the module; "" for the model's own forward, None outside of it.
        operation: such as aten.log.default.
        node: in the backward, what is differentiated, such as LogBackward0.
    """

    phase: str
    module: str | None
    operation: str
    node: str = ""

    def __str__(self) -> str:
        where = ("the loss, outside the model" if self.module is None
                 else f"module {self.module or '(the model itself)'}")
        return f"{self.operation} in the {self.phase} of {where}" + (
            f" ({self.node})" if self.node else "")


class _Looking(TorchDispatchMode):
    """Calls `found` with each operation that makes a NaN out of what has none."""

    def __init__(self, found: Callable[[str], None]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        clean = not _has_nan((args, kwargs))
        out = func(*args, **kwargs)
        if clean and not any(word in str(func) for word in NOT_MAKERS) and _has_nan(out):
            self._found(str(func))
        return out


@contextlib.contextmanager
def hunt(wrapped: nn.Module, model: nn.Module, tell: Callable[[Origin], None]) -> Iterator[None]:
    """Around forward and backward: tells of the first operation that makes a NaN.

    `torch.autograd.detect_anomaly` looks at the backward only, and raises: on one rank, while
    the others wait for it. Here the step goes on, and is left out by all.

    Args:
        wrapped: what is called; holds the model.
    """
    path = next(n for n, m in wrapped.named_modules() if m is model)
    root = f"{type(wrapped).__name__}.{path}" if path else type(wrapped).__name__
    tracker, told = ModuleTracker(), False

    def found(operation: str) -> None:
        nonlocal told
        if told:
            return
        told = True
        inside = [n for n in tracker.parents if n == root or n.startswith(root + ".")]
        module = max(inside, key=len).removeprefix(root).removeprefix(".") if inside else None
        node = torch._C._current_autograd_node() if tracker.is_bw else None
        tell(Origin("backward" if tracker.is_bw else "forward", module, operation,
                    node.name() if node is not None else ""))

    with tracker, _Looking(found):
        yield


def _has_nan(values: Any) -> bool:
    return any(
        isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
        and value.layout == torch.strided and bool(torch.isnan(value).any())
        for value in tree_leaves(values)
    )
