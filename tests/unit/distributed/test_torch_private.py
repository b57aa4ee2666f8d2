"""Each entry of `torch_private` works, and no other module uses private names of torch."""

from __future__ import annotations

import ast
import threading
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.nn.parallel import DistributedDataParallel

from trainer.distributed import torch_private

ROOT = Path(__file__).parents[3]
SOURCES = [path for package in ("trainer", "launch") for path in (ROOT / package).rglob("*.py")]
TREES = {path: ast.parse(path.read_text()) for path in SOURCES}
STANDARD = ("os._exit", "sys._getframe", "sys._current_frames", "atexit._run_exitfuncs",
            "subprocess._args_from_interpreter_flags", "np.random.mtrand._rand",
            "parser._actions", "value._asdict")
"""Private names of other libraries."""


@pytest.fixture
def group():
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_the_version_of_a_tensor_counts_its_changes_in_place():
    tensor = torch.zeros(2)
    before = torch_private.version(tensor)

    tensor.view(1, 2).add_(1)

    assert torch_private.version(tensor) == before + 1
    assert torch_private.version(tensor + 1) == 0


def test_the_timeout_of_a_group(group):
    torch_private.set_timeout(group, 7.0)

    assert group._get_backend(torch.device("cpu")).options._timeout.total_seconds() == 7.0


def test_unreduced_parameters_of_ddp(group):
    model = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    model.forward = lambda x, used: sum(model[i](x) for i in used)
    ddp = DistributedDataParallel(model)

    ddp(torch.ones(1, 1), (0, 1)).backward()
    assert torch_private.unreduced(ddp) is None
    ddp(torch.ones(1, 1), (0,)).backward()
    assert torch_private.unreduced(ddp) == [2, 3]


def test_the_node_and_the_end_of_a_backward():
    order: list[str] = []
    x = torch.ones(1, requires_grad=True)
    y = x.log()
    x.register_post_accumulate_grad_hook(lambda _: order.append("gradient"))
    y.register_hook(lambda _: order.append(torch_private.autograd_node()))
    y.register_hook(lambda _: torch_private.at_end_of_backward(lambda: order.append("end")))

    y.sum().backward()

    assert order == ["LogBackward0", "gradient", "end"]
    assert torch_private.autograd_node() == ""


def test_operations_and_nested_structures():
    seen: list[str] = []

    class Mode(torch_private.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.ones(1).exp()

    assert "aten.exp.default" in seen
    assert torch_private.tree_leaves({"a": [1, (2,)]}) == [1, 2]
    assert torch_private.tree_map(str, {"a": [1, (2,)]}) == {"a": ["1", ("2",)]}


def test_callbacks_of_a_compilation():
    registry, calls = torch_private.compilation_callbacks(), list[str]()
    registry.register_start_callback(start := lambda _: calls.append("start"))
    registry.register_end_callback(end := lambda _: calls.append("end"))
    try:
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    finally:
        registry.start_callbacks.remove(start)
        registry.end_callbacks.remove(end)

    assert calls == ["start", "end"]
    assert Path(torch_private.default_compile_cache()).name.startswith("torchinductor_")


def test_the_wrapper_of_a_compiled_module():
    calls: list[str] = []

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    def backend(graph, inputs):
        calls.append("compiled")
        return graph.forward

    model = Model()
    assert torch_private.without_compile_wrapper(torch.compile(model, backend=backend)) is model
    assert torch_private.without_compile_wrapper(model) is model
    with torch_private.uncompiled(model):
        model(torch.ones(1))
    assert calls == []
    model(torch.ones(1))
    assert calls == ["compiled"]


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
def test_the_graph_for_tensorboard():
    definition = torch_private.tensorboard_graph(nn.Linear(1, 1), (torch.ones(1, 1),))

    assert any("weight" in node.name for node in definition.node)


def test_the_buffers_of_a_module():
    norm = nn.BatchNorm1d(2)
    assert isinstance(norm, torch_private.BatchNorm)
    norm.register_buffer("cache", torch.ones(1), persistent=False)

    slots = {name: (owner[name], kept) for owner, name, kept in torch_private.buffer_slots(norm)}

    assert slots["running_mean"] == (norm.running_mean, True)
    assert slots["cache"] == (norm.cache, False)


def test_the_file_in_which_a_loader_calls_the_data_set():
    class Data(torch.utils.data.Dataset):
        def __getitem__(self, index: int) -> str:
            return "".join(frame.filename for frame in traceback.extract_stack())

    [[stack]] = torch.utils.data.DataLoader(Data(), sampler=[0])

    assert torch_private.loader_fetch_file() in stack


def test_the_state_and_the_heartbeats_of_a_rendezvous():
    store = dist.HashStore()
    handler = DynamicRendezvousHandler.from_backend(
        "run", store, C10dRendezvousBackend(store, "run"), 1, 1, local_addr="localhost")
    info = handler.next_rendezvous()
    assert info.world_size == len(torch_private.rendezvous_state(handler).participants) == 1

    torch_private.stop_heartbeats(handler)

    assert not [t for t in threading.enumerate() if "RendezvousKeepAliveTimer" in t.name]


def private_names() -> set[str]:
    """Uses of private names of torch, as FILE:LINE name.

    A private attribute counts as torch's if no class or module here defines it.
    """
    own, found = set[str](), set[str]()
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
                    and ast.unparse(node.value) == "self"):
                own.add(node.attr)
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            names: list[str] = []
            if isinstance(node, ast.Attribute) and node.attr not in own:
                names = [ast.unparse(node)]
            elif isinstance(node, ast.Import):
                names = [a.name for a in node.names if a.name.startswith("torch.")]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                last = [part for part in name.split(".") if part[0] == "_" and part[1:2] != "_"]
                public = name in STANDARD or name.startswith("torch._foreach_")  # in torch's docs
                if last and (not isinstance(node, ast.Attribute) or node.attr == last[-1]) \
                        and not public:
                    found.add(f"{path.relative_to(ROOT)}:{node.lineno} {name}")
    return found


def test_no_other_module_uses_a_private_name_of_torch():
    allowed = "trainer/distributed/torch_private.py"

    assert {name for name in private_names() if not name.startswith(allowed)} == set()


def test_this_process_is_no_fork_of_one_with_cuda():
    assert not torch_private.is_in_bad_fork()
