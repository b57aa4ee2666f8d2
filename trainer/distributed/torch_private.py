"""Every private name of torch that the trainer uses, with its purpose and why no public one serves.
tests/unit/distributed/test_torch_private.py has a test for each entry."""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map

BatchNorm = _BatchNorm
"""The base of all batch norms. DDP refuses subclasses of the public nn.SyncBatchNorm on a CPU."""


version: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
"""How often a tensor has been changed in place. Public functions only raise this counter."""


def is_in_bad_fork() -> bool:
    """Whether this process can't use CUDA because the one it is forked from has asked the driver.
    `torch.cuda.is_initialized` shows only a context, not `torch.cuda.is_available()`."""
    return bool(torch.cuda._is_in_bad_fork())  # type: ignore[no-untyped-call]


def set_timeout(group: ProcessGroup, timeout_s: float) -> None:
    """Set the timeout of all later collectives of a group, including those of DDP and user code.
    Public functions set it only when the group is made."""
    for device in group._device_types:
        group._get_backend(device)._set_default_timeout(timedelta(seconds=timeout_s))


def unreduced(ddp: DistributedDataParallel) -> list[int] | None:
    """After a backward that all-reduces: indices of the parameters without a gradient; None if all
    were reduced. DDP itself raises only in the next forward, after an update with unreduced
    gradients, and with accumulation `.grad` does not show it."""
    try:
        ddp.reducer._check_reducer_finalized()  # type: ignore[attr-defined]
    except RuntimeError as error:
        match = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
        return [int(i) for i in match[1].split()] if match else []
    return None


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Within a backward: call `callback` after the last gradient, before DDP waits for its sums.
    `register_multi_grad_hook` would cost a Python call for each parameter."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def autograd_node() -> str:
    """Name of the autograd node that runs in this thread, such as LogBackward0; "" for none."""
    node = torch._C._current_autograd_node()
    return "" if node is None else node.name()


def compilation_callbacks() -> Any:
    """Registry of callbacks at the begin and end of a compilation, which a kill may interrupt."""
    from torch._dynamo.callback import callback_handler  # takes seconds

    return callback_handler


def default_compile_cache() -> str:
    """Torch's default of TORCHINDUCTOR_CACHE_DIR, which its import writes to the environment."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return default_cache_dir()


def without_compile_wrapper(module: nn.Module) -> nn.Module:
    """The module inside the wrapper of `torch.compile(module)`, compiled under its own name with
    the same options, which `module.compile()` would not know."""
    inner = getattr(module, "_orig_mod", None)
    if inner is None:
        return module
    inner._compiled_call_impl = module.dynamo_ctx(inner._call_impl)  # type: ignore[operator]
    return inner


def loader_fetch_file() -> str:
    """File of the code in which a loader's process calls the data set, as a stack shows it."""
    from torch.utils.data._utils import fetch

    return str(fetch.__file__)


def rendezvous_state(handler: Any) -> Any:
    """The state of torch's dynamic rendezvous: its participants. The handler publishes none."""
    return handler._state_holder.state


def stop_heartbeats(handler: Any) -> None:
    """Stop the thread of a rendezvous whose store is lost; `shutdown` would use the store."""
    handler._stop_heartbeats()


@contextlib.contextmanager
def uncompiled(module: nn.Module) -> Iterator[None]:
    """Context in which a module does not run its compiled code, which cannot be traced.
    `torch.compiler.set_stance` would apply to all modules of the process."""
    compiled, module._compiled_call_impl = module._compiled_call_impl, None
    try:
        yield
    finally:
        module._compiled_call_impl = compiled


def tensorboard_graph(model: nn.Module, inputs: tuple[Any, ...]) -> Any:
    """The GraphDef of a model. `SummaryWriter.add_graph` would write it to a file itself."""
    from torch.utils.tensorboard._pytorch_graph import graph

    return graph(model, inputs)[0]


def buffer_slots(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, bool]]:
    """Of each buffer of a module itself: its dict, its key, whether the state dict contains it.
    `named_buffers` omits a tensor's second name and does not tell the persistent ones."""
    for name, _ in module._buffers.items():  # TorchScript's dict cannot be iterated otherwise
        yield module._buffers, name, name not in module._non_persistent_buffers_set
